"""Computed: the results of engine requests, collected from their events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from logitd.model.inference.engine.events import (
    AttributionEvent,
    Event,
    FinishEvent,
    OutputsChunk,
    PromptEvent,
)
from logitd.model.inference.sampling.results import ScoredToken

MOST_NATS = 700.0
"""Largest exponent, in nats: the exp of larger numbers may be too large for a float64."""


@dataclass(slots=True)
class Computed:
    """The results of several requests: rows, attributions and circuits by request, scored tokens by
    request and sequence, and the final event of each sequence."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[ScoredToken]] = field(default_factory=dict)
    attributions: dict[str, Any] = field(default_factory=dict)
    finishes: list[FinishEvent] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Add an event. The caller must check a FinishEvent for errors."""
        match event:
            case OutputsChunk(request_id=request_id, rows=rows):
                self.rows.setdefault(request_id, []).extend(rows)
            case PromptEvent(request_id=request_id, index=index, tokens=tokens):
                self.tokens.setdefault((request_id, index), []).extend(tokens)
            case AttributionEvent(request_id=request_id, attribution=attribution):
                self.attributions[request_id] = attribution
            case FinishEvent():
                self.finishes.append(event)


def logprobs_of(tokens: Sequence[ScoredToken]) -> list[float]:
    """The logprobs of the tokens that have one: the first token of a prompt has none."""
    return [token.chosen.logprob for token in tokens if token.chosen is not None]


def perplexity(tokens: Sequence[ScoredToken]) -> float | None:
    """The exponential of the mean negative logprob; None if no token is scored or the result
    overflows."""
    logprobs = logprobs_of(tokens)
    if not logprobs:
        return None
    nats = -math.fsum(logprobs) / len(logprobs)
    return math.exp(nats) if nats < MOST_NATS else None
