"""Events of the engine: the events of sequences, the result of a step, and the engine's statistics.

Events are immutable and hold only standard types, so that they can be passed between threads and
processes. They hold token ids; the caller turns them into text.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.circuit.task import Circuit
from logitd.model.inference.sampling.params import TokenLogprob
from logitd.model.inference.sampling.results import ScoredRows, ScoredToken

GRADIENTS_NOT_FINITE = "the model's logits or their gradients are not finite"
"""The error of a sequence whose attributions or circuit are not finite."""


class FinishReason(StrEnum):
    """The reason why a sequence ended. The sequence's result is complete only after STOP or
    LENGTH."""

    STOP = "stop"  # a stop token, a complete constraint, or all requested numbers computed
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # by the caller
    TIMEOUT = "timeout"  # its deadline passed, in the queue or later
    UNREAD = "unread"  # its reader was furthest behind, and the memory was needed
    REPLACED = "replaced"  # its weights were removed before its end
    ERROR = "error"  # described by the event


class TokenEvent(NamedTuple):
    """A generated token. A step may yield several tokens of one sequence, in order. `chosen` and
    `top` are set if logprobs were requested. The class is a named tuple, because creating an event
    for every token must be fast."""

    request_id: str
    index: int  # type: ignore[assignment]  # 0 to n - 1; hides a method of tuple
    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Logprobs of the tokens of a prompt from position `start` on, if requested. A
    GenerationRequest gets them once (index 0), before its first token; a ScoreRequest gets them for
    each sequence."""

    request_id: str
    index: int
    start: int
    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoresChunk:
    """Logprobs of the tokens from position `start` on, for a ScoreRequest with `arrays`. The first
    token of a prompt has none."""

    request_id: str
    index: int
    start: int
    scores: ScoredRows


@dataclass(frozen=True, slots=True)
class OutputsChunk:
    """Rows of an OutputsRequest: a NumPy array (positions, ...) of float32."""

    request_id: str
    positions: tuple[int, ...]
    rows: Any


@dataclass(frozen=True, slots=True)
class AttributionEvent:
    request_id: str
    index: int
    attribution: Attribution | Circuit


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Times of events in the life of a sequence, in seconds on the engine's clock; None for events
    that did not occur."""

    arrived: float
    admitted: float | None
    prefilled: float | None  # end of the prompt, when the first token is sampled
    finished: float


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a sequence; every accepted sequence gets exactly one."""

    request_id: str
    index: int
    reason: FinishReason
    times: SequenceTimes
    prompt_tokens: int  # length of the request's prompt, the same for all of its sequences
    cached_tokens: int  # copied from another slot
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    param: str | None = None  # field of the request that caused the error
    price: int | None = None  # its price in the queue, in tokens; None: its prompt's length

    @property
    def counts_prompt(self) -> bool:
        """True for the first sequence of a prompt. The reported usage counts a prompt only once,
        however many sequences it has."""
        return self.index == 0


Event = TokenEvent | PromptEvent | ScoresChunk | OutputsChunk | AttributionEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. `accepted_tokens` of the `drafted_tokens` were accepted; each of them
    saves a decode step."""

    events: tuple[Event, ...]
    prefilled_tokens: int
    decoded_sequences: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evicted_sequences: int = 0  # sequences that lost their slots to faster readers
    attribution_pieces: int = 0  # at most one


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    running: int
    paused: int  # evicted, and their readers have not caught up
    begun_tokens: int  # price of the running and paused sequences (`cost.py`)
    slots: int
    slots_used: int
