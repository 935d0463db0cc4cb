"""Health: whether a run still learns, so that bad weights never replace good ones.

Two ways to go wrong. A loss or gradient norm that is not finite ends the run at once. A loss that
has exploded is finite: it stands far above its best and does not come back. The rule: "far above"
is half the way from the best smoothed loss back up to the first step's, and at least one nat; a run
that stands there after its warmup for `REPORTS` reports and `STEPS` steps in a row has diverged.
Single bad batches and spikes are over long before. While a loss stands there nothing is saved,
because it may be the beginning of the end.

Sees only the numbers that are reported; what is done about them is the trainer's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REPORTS = 20
STEPS = 100
MARGIN = 1.0
"""Nats per token above the best, at least."""


@dataclass(frozen=True)
class Look:
    """What a report shows."""

    step: int
    loss: float
    smoothed_loss: float
    gradient_norm: float


class Health:
    """Follows the reports of a run."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._first = self._best = math.inf
        self._since: int | None = None  # the step from which on the loss stands far above
        self._reports = 0
        self._last: Look | None = None

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {
            "first": self._first,
            "best": self._best,
            "since": self._since,
            "reports": self._reports,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._first, self._best = state["first"], state["best"]
        self._since, self._reports = state["since"], state["reports"]

    def begin(self, loss: float) -> None:
        """Take the first step's loss: that of weights which have learned nothing here."""
        self._first = self._best = loss

    def look(self, look: Look) -> None:
        """Take a report."""
        self._last = look
        if look.step <= self._warmup or look.smoothed_loss <= self._limit():
            self._since, self._reports = None, 0
        else:
            self._since = look.step if self._since is None else self._since
            self._reports += 1
        self._best = min(self._best, look.smoothed_loss)

    def _limit(self) -> float:
        """The smoothed loss above which a run is suspected."""
        margin = (self._first - self._best) / 2 if math.isfinite(self._first) else 0.0
        return self._best + max(MARGIN, margin)

    @property
    def suspected(self) -> bool:
        """Whether the loss stands far above its best: not a state to keep."""
        return self._since is not None

    def complaint(self, *, last: bool = False) -> str | None:
        """Why the run has diverged, or None. `last`: there is no time left to come back."""
        if self._last is None:
            return None
        look = self._last
        if not (math.isfinite(look.loss) and math.isfinite(look.gradient_norm)):
            return (
                f"training diverged: at step {look.step} the loss is {look.loss} and the gradient "
                f"norm {look.gradient_norm}"
            )
        if self._since is None:
            return None
        if last or (self._reports >= REPORTS and look.step - self._since >= STEPS):
            return (
                f"training diverged: since step {self._since} the smoothed loss stands above "
                f"{self._limit():.2f}, at step {look.step} it is {look.smoothed_loss:.2f}, and its "
                f"best was {self._best:.2f}"
            )
        return None
