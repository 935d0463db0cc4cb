"""DivergenceMonitor: detects diverged training, so that bad weights never replace good ones.

Training diverges in two ways. A loss or gradient norm that is not finite ends the run immediately.
The loss may also explode but remain finite, and stay far above its best. "Far above" means more
than half the difference between the best smoothed loss and the first loss, and at least one nat. If
the smoothed loss is far above its best after the warmup, for `REPORTS` reports and `STEPS` steps in
a row, the run has diverged; bad batches and spikes do not last that long. In the meantime the run
is suspect, and its weights must not be saved.

The smoothed loss is a moving average over reports. It follows a falling loss late, so it is used
only here and in the diagnosis; reports have the loss of their own steps.

The monitor sees only the metrics in reports, not every step. The trainer acts on the diagnosis.
"""

import math
from collections.abc import Mapping
from typing import Any

from logitd.model.training.run.step_log import Figures

REPORTS = 20
STEPS = 100
SMOOTHING = 0.8
"""Weight of the previous smoothed loss at each report."""
MARGIN = 1.0
"""Smallest distance from the best loss that counts as far above, in nats per token."""


class DivergenceMonitor:
    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._first = self._best = math.inf
        self._smoothed: float | None = None
        self._since: int | None = None  # step of the first report with a loss far above
        self._reports = 0
        self._last: tuple[int, Figures] | None = None

    def state(self) -> dict[str, Any]:
        """The state for a resumed run."""
        return {
            "first": self._first,
            "best": self._best,
            "smoothed": self._smoothed,
            "since": self._since,
            "reports": self._reports,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        since, smoothed = state["since"], state["smoothed"]
        self._since = None if since is None else int(since)
        self._smoothed = None if smoothed is None else float(smoothed)
        self._first, self._best = float(state["first"]), float(state["best"])
        self._reports = int(state["reports"])

    def start(self, loss: float) -> None:
        """Record the loss of the first step, which is computed before any update of the weights."""
        self._first = self._best = loss

    def observe(self, step: int, figures: Figures) -> None:
        self._last = step, figures
        before = figures.loss if self._smoothed is None else self._smoothed
        smoothed = self._smoothed = SMOOTHING * before + (1 - SMOOTHING) * figures.loss
        if step <= self._warmup or smoothed <= self._limit():
            self._since, self._reports = None, 0
        else:
            self._since = step if self._since is None else self._since
            self._reports += 1
        self._best = min(self._best, smoothed)

    def _limit(self) -> float:
        margin = (self._first - self._best) / 2 if math.isfinite(self._first) else 0.0
        return self._best + max(MARGIN, margin)

    @property
    def suspect(self) -> bool:
        """True if the loss is far above its best, so that the weights must not be saved."""
        return self._since is not None

    def diagnosis(self, *, last: bool = False) -> str | None:
        """Why the run has diverged; None if it has not. `last` is True if no steps are left in
        which the run could recover."""
        if self._last is None:
            return None
        step, figures = self._last
        if not (math.isfinite(figures.loss) and math.isfinite(figures.gradient_norm)):
            return (
                f"training diverged: at step {step} the loss is {figures.loss} and the gradient "
                f"norm {figures.gradient_norm}"
            )
        if self._since is None:
            return None
        if not last and (self._reports < REPORTS or step - self._since < STEPS):
            return None
        return (
            f"training diverged: since step {self._since} the smoothed loss is above "
            f"{self._limit():.2f}; at step {step} it is {self._smoothed:.2f}, and its "
            f"best was {self._best:.2f}"
        )
