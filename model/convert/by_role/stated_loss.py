"""Stated losses: the losses that a file stores about its own training.

They are evidence for a computation: the right variant predicts a text like the training data about
as well as the file says. `resolve.py` compares them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from logitd.model.convert.foreign import finite_number

_KIND = r"(best|last|final|min|lowest|avg|mean|train|training|val|valid|validation|dev|test|eval)"
_NAMES = re.compile(rf"({_KIND}_?){{0,3}}loss(es)?")
MOST_NATS = 20.0
"""Larger numbers mean "not evaluated yet"."""
ALLOWED_NATS, ALLOWED_SHARE = 0.1, 0.1
"""Allowed excess, absolute and relative, of the loss on a text over the largest stated one: the
text has other parts of the data, and windows of 128 tokens have less context than those of
training."""
DEPTH = 3


@dataclass(frozen=True, slots=True)
class StatedLoss:
    """A loss in nats per token, and its key in the file."""

    name: str
    nats: float

    @property
    def limit(self) -> float:
        """The largest loss on a similar text that agrees with it."""
        return self.nats + max(ALLOWED_NATS, ALLOWED_SHARE * self.nats)


def stated_loss(contents: Any) -> StatedLoss | None:
    """The largest loss that a file states; None if it states none. Of a list, only the last loss
    counts."""
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
