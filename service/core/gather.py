"""Gather: everything that a submission computes, for replies small enough to be held."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.engine.events import (
    AttributionEvent,
    FinishEvent,
    OutputsChunk,
    PromptEvent,
    PromptToken,
)
from logitd.service.core.errors import from_finish
from logitd.service.engine.submission import Submission

MOST_NATS = 700.0
"""exp of more leaves float64."""


@dataclass(slots=True)
class Gathered:
    """Rows and attributions by request; scored tokens by request and sequence; how each sequence
    ended."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[PromptToken]] = field(default_factory=dict)
    attributions: dict[str, Attribution] = field(default_factory=dict)
    finishes: list[FinishEvent] = field(default_factory=list)


async def gather(submission: Submission) -> Gathered:
    """Wait for all of a submission. Raises ApiError when a sequence ended early, EngineStopped when
    the engine failed; whatever ends this call ends the submission."""
    gathered = Gathered()
    try:
        while not submission.finished:
            for event in await submission.take():
                match event:
                    case OutputsChunk(request_id=request_id, rows=rows):
                        gathered.rows.setdefault(request_id, []).extend(rows)
                    case PromptEvent(request_id=request_id, index=index, tokens=tokens):
                        gathered.tokens.setdefault((request_id, index), []).extend(tokens)
                    case AttributionEvent(request_id=request_id, attribution=attribution):
                        gathered.attributions[request_id] = attribution
                    case FinishEvent():
                        if (failure := from_finish(event)) is not None:
                            raise failure
                        gathered.finishes.append(event)
    finally:
        submission.abort()
    return gathered


def logprobs_of(tokens: Sequence[PromptToken]) -> list[float]:
    """The logprobs of scored tokens; the first of a prompt has none."""
    return [token.chosen.logprob for token in tokens if token.chosen is not None]


def perplexity(tokens: Sequence[PromptToken]) -> float | None:
    """exp of the mean negative logprob; None where nothing is scored, or no float is so large."""
    logprobs = logprobs_of(tokens)
    if not logprobs:
        return None
    nats = -math.fsum(logprobs) / len(logprobs)
    return math.exp(nats) if nats < MOST_NATS else None
