"""Log: the figures of the steps since the last report.

Losses are kept on the device and looked at only when a report is due, so that steps need not wait
for each other.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SMOOTHING = 0.8
"""Share of the past in the smoothed loss, at each report."""


@dataclass(frozen=True)
class Figures:
    """Means over the steps of a report; the gradient norm and learning rate are the last step's."""

    loss: float
    smoothed_loss: float
    learning_rate: float  # as a share of the peak
    gradient_norm: float  # before clipping
    tokens_per_second: float
    seconds_per_step: float


class StepLog:
    """Collects steps until a report takes them."""

    def __init__(self) -> None:
        self._smoothed: float | None = None
        self._clear()
        self.start()

    def _clear(self) -> None:
        self.steps = 0
        self._tokens = 0
        self._loss: Tensor | float = 0.0
        self._norm: Tensor | float = 0.0
        self._share = 0.0

    def resume(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Go on smoothing where a run stopped."""
        for record in metrics:
            if record["kind"] == "train":
                self._smoothed = record["smoothed_loss"]

    def start(self) -> None:
        """Start the clock, unless it runs: what happens between steps is no training time."""
        if not self.steps:
            self._since = time.monotonic()

    def add(self, *, loss: Tensor, norm: Tensor, share: float, tokens: int) -> None:
        self.steps += 1
        self._tokens += tokens
        self._loss = self._loss + loss
        self._norm = norm
        self._share = share

    def take(self) -> Figures:
        """The figures of the steps since the last call."""
        loss = float(self._loss) / self.steps  # waits for the device
        seconds = time.monotonic() - self._since
        before = loss if self._smoothed is None else self._smoothed
        self._smoothed = SMOOTHING * before + (1 - SMOOTHING) * loss
        figures = Figures(
            loss=loss,
            smoothed_loss=self._smoothed,
            learning_rate=self._share,
            gradient_norm=float(self._norm),
            tokens_per_second=self._tokens / max(seconds, 1e-9),
            seconds_per_step=seconds / self.steps,
        )
        self._clear()
        return figures
