"""Length: the progress and the end of a run, by steps, by the clock, or by whichever comes first.

The minutes include set-up and saving the last step. The learning rate depends on the completed
share of the run (`model/training/optim/schedule.py`). If the clock ends a run, the share is planned
again before each step: with time for n more steps, the next one completes 1/n of the rest. So the
share never falls. Even if the machine becomes slower, the learning rate decays early enough that
the last step has the final learning rate. The plan is part of the counters, so a resumed run
continues with it: seed, step and the recorded shares determine every bit. Only a run with a set
number of steps can be repeated exactly from its settings alone.
"""

import math
from dataclasses import dataclass, replace

from logitd.model.plural import pluralize

WINDOW = 5
"""Minimum number of steps over which the time of a step is averaged. Later in a run, the average is
over a fifth of the steps so far."""
RESERVE = 1.5
"""Time reserved for saving the last step, as a multiple of the time that the latest save took."""
MORE_FOR_SLOWER = 0.1
"""Maximum additional reserve, as a share of the run's minutes, if steps have become slower."""


@dataclass(frozen=True)
class Counters:
    """Progress of a run, over all commands that trained it.

    seconds      wall-clock time
    setup        part of `seconds` spent before the second step of each command, and on the first
                 step with longer windows: text, measuring, compiling
    ending       seconds reserved for saving the last step
    pace         seconds of a recent step, without the tasks between steps; 0 if unknown
    ending_pace  the pace when `ending` was measured; 0 if unknown
    share        completed share of the minutes, as planned
    minutes      the minutes for which `share` was planned; None if it was not planned
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    setup: float = 0.0
    ending: float = 0.0
    pace: float = 0.0
    ending_pace: float = 0.0
    share: float = 0.0
    minutes: float | None = None

    def stepped(self, seconds: float, tokens: int, *, warm: bool) -> "Counters":
        """Count a step that ended at `seconds`. Its time counts toward the pace only if the step
        is `warm`, which means that it is not the first of a command or with longer windows."""
        took, pace = seconds - self.seconds, self.pace
        if warm:
            pace += (took - pace) / max(WINDOW, self.step / WINDOW) if pace else took
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            seconds=seconds,
            pace=pace,
            # A single step is not representative.
            ending_pace=self.ending_pace or (pace if self.step > WINDOW else 0.0),
        )

    def saved(self, took: float) -> "Counters":
        """Reserve time for the ending, given that the latest save took `took` seconds."""
        ending_pace = self.pace if self.step > WINDOW else 0.0
        return replace(self, ending=RESERVE * took, ending_pace=ending_pace)

    @property
    def slowdown(self) -> float:
        """Ratio of the current time per step to the time per step when `ending` was measured, at
        least 1."""
        return max(1.0, self.pace / self.ending_pace) if self.ending_pace else 1.0


@dataclass(frozen=True)
class Length:
    """The length of a run. At least one of the fields is set. In all methods, `tasks` is the
    average time of the tasks between two steps, in seconds."""

    steps: int | None
    minutes: float | None  # wall-clock time over all commands

    def done(self, counters: Counters) -> float:
        """The completed share of the run, 0 to 1."""
        if self.is_over_by_clock(counters):
            return 1.0
        by_steps = counters.step / self.steps if self.steps else 0.0
        return min(1.0, max(by_steps, self._share(counters)))

    def scheduled(self, counters: Counters) -> float:
        """The share by which the learning rate has fallen. It differs from `done` if the clock
        ended the run after its only step, before a pace was known and a share planned."""
        unplanned = self.is_over_by_clock(counters) and not counters.pace
        return counters.share if unplanned else self.done(counters)

    def plan(self, counters: Counters, tasks: float) -> Counters:
        """The counters, with `share` set to the share of the minutes that the run should have
        completed after the next step. In a new run `share` is 0 until the pace is known."""
        if self.minutes is None:
            return counters
        share, left = self._share(counters), self._clock_steps(counters, counters.pace, tasks)
        planned = 1.0 if left == 1 else share + (1 - share) / left
        return replace(counters, share=planned, minutes=self.minutes)

    def clock_left(self, counters: Counters) -> float:
        """Seconds left for further steps; infinite if no minutes are set."""
        if self.minutes is None:
            return math.inf
        return self.minutes * 60 - self.reserved(counters) - counters.seconds

    def reserved(self, counters: Counters) -> float:
        """Seconds reserved for the ending: more if steps have become slower since it was
        measured."""
        more = counters.ending * (counters.slowdown - 1)
        return counters.ending + min(more, MORE_FOR_SLOWER * 60 * (self.minutes or math.inf))

    def steps_left(self, counters: Counters, pace: float, tasks: float) -> float:
        """Expected number of steps until the end; infinite if the pace is 0 and the number of steps
        is not limited."""
        by_steps = self.steps - counters.step if self.steps else math.inf
        return (
            0.0
            if self.is_over(counters)
            else min(by_steps, self._clock_steps(counters, pace, tasks))
        )

    def seconds_left(self, counters: Counters, pace: float, tasks: float) -> float:
        """Expected seconds until the last step is saved, if steps take `pace` seconds."""
        steps = self.steps_left(counters, pace, tasks)
        return steps * (pace + tasks) + counters.ending / RESERVE * counters.slowdown

    def is_over(self, counters: Counters) -> bool:
        """True if no further step is due."""
        return self.is_over_by_steps(counters) or self.is_over_by_clock(counters)

    def is_over_by_steps(self, counters: Counters) -> bool:
        return self.steps is not None and counters.step >= self.steps

    def is_over_by_clock(self, counters: Counters) -> bool:
        planned = counters.pace > 0 and counters.minutes == self.minutes
        over = counters.share >= 1 if planned else self.clock_left(counters) <= 0
        return self.minutes is not None and counters.step > 0 and over

    def setup_notice(self, counters: Counters) -> str | None:
        """A notice before the first step if set-up leaves at most half of `minutes`."""
        minutes, left = self.minutes, self.clock_left(counters)
        if minutes is None or left > 60 * minutes / 2:
            return None
        took = f"set-up took {counters.setup:.0f} s"
        if left > 0:
            return f"{took}, so {left:.0f} s of --minutes {minutes:g} are left for training"
        return (
            f"{took} and used up --minutes {minutes:g}, so only one step is trained: increase "
            "--minutes"
        )

    def shortening_notice(self, steps: int, expected: int) -> str:
        """A notice that fewer steps fit into `minutes` than expected."""
        return (
            f"--minutes {self.minutes:g} suffice for about {pluralize(steps, 'step', ',')} instead "
            f"of {expected:,}: the learning rate falls sooner, to reach its final value in time"
        )

    def _share(self, counters: Counters) -> float:
        """The completed share of `minutes`: the planned share or, if no share was planned for this
        value of `minutes`, the share of the training time that has passed."""
        if self.minutes is None:
            return 0.0
        if counters.minutes == self.minutes:
            return counters.share
        trained = max(0.0, counters.seconds - counters.setup)
        return trained and trained / max(trained, trained + self.clock_left(counters))

    def _clock_steps(self, counters: Counters, pace: float, tasks: float) -> float:
        """Number of further steps that fit into `minutes`, at least 1. Infinite if `minutes` is
        None or the pace is unknown."""
        if self.minutes is None or not pace:
            return math.inf
        return max(1, round(self.clock_left(counters) / (pace + tasks)))
