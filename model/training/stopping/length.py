"""Length: the progress and the end of a run, by steps, by the clock, or by whichever comes first.

The minutes include set-up and saving the last step. The learning rate depends on the completed
share of the run (`model/training/optim/schedule.py`), so it also decays in a run that only the
clock ends. But the number of steps of such a run depends on the machine's speed: only a run with a
set number of steps can be repeated exactly.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Progress of a run, over all commands that trained it.

    seconds  wall-clock time
    setup    part of `seconds` before the second step of each command: text, measuring, compiling
    ending   expected seconds of saving the last step
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    setup: float = 0.0
    ending: float = 0.0


@dataclass(frozen=True)
class Length:
    """The length of a run. At least one of the fields is set."""

    steps: int | None
    minutes: float | None  # wall-clock time over all commands

    def done(self, counters: Counters) -> float:
        """The completed share of the run, 0 to 1."""
        by_steps = counters.step / self.steps if self.steps else 0.0
        trained = max(0.0, counters.seconds - counters.setup)
        by_clock = trained and trained / max(trained, trained + self.clock_left(counters))
        return min(1.0, max(by_steps, by_clock))

    def clock_left(self, counters: Counters) -> float:
        """Seconds left for steps; infinite if no minutes are set."""
        if self.minutes is None:
            return math.inf
        return self.minutes * 60 - counters.ending - counters.seconds

    def seconds_left(self, counters: Counters, seconds_per_step: float) -> float:
        by_steps = (self.steps - counters.step) * seconds_per_step if self.steps else math.inf
        return max(0.0, min(by_steps, self.clock_left(counters)))

    def out_of_steps(self, counters: Counters) -> bool:
        return self.steps is not None and counters.step >= self.steps
