"""Average: an exponential average of the weights, which may become a run's last checkpoint.

From step to step the weights oscillate around their average over recent steps, and a model with
the averaged weights often predicts better. The time constant of the average is a share of the run,
so it adapts to the planned length. The average takes 4 bytes (float32) per trained parameter. It is
updated at most fifty times per time constant, which takes hardly any time in long runs. After the
last step, `model/training/recording/recorder.py` evaluates both the weights and their average, and
saves the better ones.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from logitd.model.training.distributed.fsdp import gather, local, shard_of
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.transformer.gpt import GPT

STRIDE = 0.02
"""Interval between updates of the average, as a share of the time constant."""


class Average:
    """The average of a model's trained parameters; if the model is sharded, only of this process's
    rows.

    time     time constant as a share of the run; 0: there is no average
    pending  share of the run that was completed since the last update of the average
    """

    def __init__(self, gpt: GPT, time: float, ranks: Ranks = ALONE) -> None:
        self.time, self.pending, self._ranks = time, 0.0, ranks
        trained = [each for each in gpt.parameters() if each.requires_grad and time]
        self._shards = [shard_of(each) for each in trained]
        self._weights: list[Tensor] = [local(each.data) for each in trained]
        self._averages = [each.clone() for each in self._weights]

    def follow(self, share: float) -> None:
        """Count a step that completed a `share` of the run, and update the average if it is due."""
        self.pending += share
        if self._averages and self.pending >= STRIDE * self.time:
            torch._foreach_lerp_(
                self._averages, self._weights, 1 - math.exp(-self.pending / self.time)
            )
            self.pending = 0.0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the model's weights inside the `with` block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the weights of the model and their average."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on the main process. All processes of a sharded model must call it."""
        pairs = zip(self._averages, self._shards, strict=True)
        return {
            "pending": self.pending,
            "averages": [gather(each, shard, self._ranks) for each, shard in pairs],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a result of `state_dict`. None means that the saved run had no average; the average
        then begins with the current weights. Raises ValueError if shapes differ."""
        rows = self._weights
        if state is not None:
            self.pending = float(state["pending"])
            if len(state["averages"]) != len(rows):
                raise ValueError(
                    f"the average has {len(state['averages'])} tensors; expected {len(rows)}"
                )
            pairs = zip(state["averages"], self._shards, strict=True)
            rows = [whole[shard.rows] for whole, shard in pairs]
        for average, values in zip(self._averages, rows, strict=True):
            if average.shape != values.shape:
                raise ValueError(f"an average has shape {[*values.shape]}, not {[*average.shape]}")
            average.copy_(values)
