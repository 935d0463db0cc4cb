"""Stated losses: finds the training and validation losses that a model's file states.

A stated loss is evidence for a computation: on a text like the training data, the right variant has
about that loss. `by_text.py` compares the two.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from logitd.model.convert.foreign import finite_number

_KIND = r"(best|last|final|min|lowest|avg|mean|train|training|val|valid|validation|dev|test|eval)"
_NAMES = re.compile(rf"({_KIND}_?){{0,3}}loss(es)?")
MOST_NATS = 20.0
"""A stated loss of this or more is ignored: programs store a large number before the first
evaluation."""
ALLOWED_NATS, ALLOWED_SHARE = 0.1, 0.1
"""The loss on a text may exceed the largest stated loss by the first number (in nats per token) or
by the second (a fraction of the stated loss), whichever allows more. The losses differ because the
text is a different part of the data, and because its windows of 128 tokens may be shorter than in
training."""
DEPTH = 3


@dataclass(frozen=True, slots=True)
class StatedLoss:
    """A loss in nats per token, and its key in the file."""

    name: str
    nats: float

    @property
    def limit(self) -> float:
        """The highest loss on a text like the training data that still agrees with the stated
        loss."""
        return self.nats + max(ALLOWED_NATS, ALLOWED_SHARE * self.nats)


def stated_loss(contents: Any) -> StatedLoss | None:
    """The largest loss that a file states; None if it states none. In a list of losses, only the
    last counts."""
    losses = [loss for loss in _losses(contents, DEPTH) if 0 < loss.nats < MOST_NATS]
    return max(losses, key=lambda loss: loss.nats, default=None)


def _losses(values: Any, depth: int) -> Iterator[StatedLoss]:
    if isinstance(values, list | tuple) and values and isinstance(values[-1], Mapping):
        values = values[-1]
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if isinstance(key, str) and _NAMES.fullmatch(key.lower()):
            last = value[-1] if isinstance(value, list | tuple) and value else value
            if (nats := finite_number(last)) is not None:
                yield StatedLoss(key, nats)
        elif depth:
            yield from _losses(value, depth - 1)
