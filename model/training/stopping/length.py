"""Length: progress of a run and its end, by steps, by the clock, or by the first of both.

The minutes are those of the whole command, with setup and saving the last step. The learning rate
falls with the share of the run that is done (`model/training/optim/schedule.py`), so a run that
only the clock ends cools down in time as well. But its number of steps depends on the machine's
speed: only a run of a given number of steps can be repeated exactly.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Progress of a run, in all sittings together.

    seconds  wall clock
    setup    seconds of them before each sitting's second step: text, measuring, compiling
    ending   seconds that saving the last step is expected to take
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    setup: float = 0.0
    ending: float = 0.0


@dataclass(frozen=True)
class Length:
    """The end of a run. At least one of the two is set."""

    steps: int | None
    minutes: float | None  # wall clock, all sittings together

    def done(self, counters: Counters) -> float:
        """The share of the run that is done, 0 to 1."""
        by_steps = counters.step / self.steps if self.steps else 0.0
        trained = max(0.0, counters.seconds - counters.setup)
        by_clock = trained and trained / max(trained, trained + self.clock_left(counters))
        return min(1.0, max(by_steps, by_clock))

    def clock_left(self, counters: Counters) -> float:
        """Seconds of the minutes that are left for steps; infinite without minutes."""
        if self.minutes is None:
            return math.inf
        return self.minutes * 60 - counters.ending - counters.seconds

    def seconds_left(self, counters: Counters, seconds_per_step: float) -> float:
        by_steps = (self.steps - counters.step) * seconds_per_step if self.steps else math.inf
        return max(0.0, min(by_steps, self.clock_left(counters)))

    def out_of_steps(self, counters: Counters) -> bool:
        return self.steps is not None and counters.step >= self.steps
