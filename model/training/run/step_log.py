"""StepLog: collects the metrics of the steps since the last report.

Losses stay on the device until a report is due, because copying them would make each step wait for
the previous one.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Figures:
    """The metrics of a report: means over its steps, except for the gradient norm and the learning
    rate, which are those of its last step."""

    loss: float  # nats per token
    learning_rate: float  # share of the peak
    gradient_norm: float  # before clipping
    tokens_per_second: float
    matrix_share: float  # model FLOPs utilization; above 1 if the rate was measured too low
    seconds_per_step: float


class StepLog:
    """The steps since the last report. `machine_rate` is in operations per second."""

    def __init__(self, machine_rate: float) -> None:
        self._machine_rate = machine_rate
        self._clear()
        self.start()

    def _clear(self) -> None:
        self.steps = self._tokens = 0
        self._operations = 0.0
        self._loss: Tensor | float = 0.0
        self._norm: Tensor | float = 0.0
        self._lr_scale = 0.0
        self._before = 0.0  # seconds of these steps before the resume

    def state(self) -> dict[str, Any]:
        """The state to save: the steps since the last report."""
        return {
            "steps": self.steps,
            "tokens": self._tokens,
            "operations": self._operations,
            "loss": self._loss,
            "norm": self._norm,
            "share": self._lr_scale,
            "seconds": time.monotonic() - self._since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps, self._tokens = int(state["steps"]), int(state["tokens"])
        self._operations = float(state.get("operations", 0.0))  # absent in older states
        self._loss, self._norm = float(state["loss"]), float(state["norm"])
        self._lr_scale, self._before = float(state["share"]), float(state["seconds"])

    def start(self) -> None:
        """Start the clock before the first step after a report or a resume, so that the time spent
        on setup, evaluations and checkpoints does not count."""
        self._since = time.monotonic() - self._before

    def add(
        self, *, loss: Tensor, norm: Tensor, lr_scale: float, tokens: int, operations: float
    ) -> None:
        self.steps += 1
        self._tokens += tokens
        self._operations += operations
        self._loss = self._loss + loss
        self._norm, self._lr_scale = norm, lr_scale

    def take(self) -> Figures:
        """Return the metrics of the steps since the last call, and begin a new report. There must
        be at least one such step."""
        figures = self.figures()
        self._clear()
        return figures

    def figures(self) -> Figures:
        """The metrics of the steps since the last call to `take`."""
        loss = float(self._loss) / self.steps  # waits for the device
        seconds = max(time.monotonic() - self._since, 1e-9)
        return Figures(
            loss=loss,
            learning_rate=self._lr_scale,
            gradient_norm=float(self._norm),
            tokens_per_second=self._tokens / seconds,
            matrix_share=self._operations / seconds / self._machine_rate,
            seconds_per_step=seconds / self.steps,
        )
