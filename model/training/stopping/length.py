"""Length: progress of a run and its end, by steps, by the clock, or by whichever comes first.

The learning rate falls with the share of the run that is done
(`model/training/optim/optimizers.py`), so a run that only the clock ends cools down in time as
well. But its number of steps depends on the machine's speed: only a run of a given number of steps
can be repeated exactly.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Progress of a run, in all sittings together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Length:
    """The end of a run. At least one of the two is set."""

    steps: int | None
    minutes: float | None  # wall clock, all sittings together

    def done(self, counters: Counters) -> float:
        """The share of the run that is done, 0 to 1."""
        by_steps = counters.step / self.steps if self.steps else 0.0
        by_clock = counters.seconds / 60 / self.minutes if self.minutes else 0.0
        return min(1.0, max(by_steps, by_clock))

    def seconds_left(self, counters: Counters, seconds_per_step: float) -> float:
        by_steps = (self.steps - counters.step) * seconds_per_step if self.steps else math.inf
        by_clock = self.minutes * 60 - counters.seconds if self.minutes else math.inf
        return max(0.0, min(by_steps, by_clock))

    def out_of_steps(self, counters: Counters) -> bool:
        return self.steps is not None and counters.step >= self.steps
