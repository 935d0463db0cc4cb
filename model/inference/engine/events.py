"""Events of the engine: those of sequences, the result of a step, and the state between steps.

Frozen plain data of the standard library, so that it can cross a thread or a process. Token ids
only: text is the caller's business.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.sampling.params import TokenLogprob
from logitd.model.inference.sampling.results import ScoredRows, ScoredToken


class FinishReason(StrEnum):
    """The reason why a sequence ended. Only the first two are answers."""

    STOP = "stop"  # a stop token, a complete constraint, or all requested numbers computed
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # by the caller
    TIMEOUT = "timeout"  # its deadline passed, in the queue or later
    UNREAD = "unread"  # its reader was the furthest behind, and others needed the memory
    REPLACED = "replaced"  # its weights were removed before its end
    ERROR = "error"  # described by the event


class TokenEvent(NamedTuple):
    """One generated token. A step may have several of one sequence, in order. `chosen` and `top`
    are set if logprobs were requested. A tuple, because one is made for every token."""

    request_id: str
    index: int  # type: ignore[assignment]  # of the n sequences; hides a method of tuple
    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Logprobs of given tokens from position `start` on, if requested: of a generation's prompt,
    once (index 0) and before its first token; of each sequence of a ScoreRequest."""

    request_id: str
    index: int
    start: int
    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoresChunk:
    """Logprobs of given tokens from position `start` on as arrays, for a ScoreRequest that asks for
    arrays. The first token of a prompt is never among them."""

    request_id: str
    index: int
    start: int
    scores: ScoredRows


@dataclass(frozen=True, slots=True)
class OutputsChunk:
    """Some rows of an OutputsRequest: a NumPy array, float32, (positions, ...)."""

    request_id: str
    positions: tuple[int, ...]
    rows: Any


@dataclass(frozen=True, slots=True)
class AttributionEvent:
    request_id: str
    index: int
    attribution: Attribution


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Times of a sequence in seconds of the engine's clock; None for stages it did not reach."""

    arrived: float
    admitted: float | None
    prefilled: float | None  # prompt computed: the first token is there
    finished: float


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a sequence; every accepted sequence gets exactly one."""

    request_id: str
    index: int
    reason: FinishReason
    times: SequenceTimes
    prompt_tokens: int  # of the request's prompt, the same for all of its sequences
    cached_tokens: int  # copied from another slot
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    param: str | None = None  # field of the request that caused the error
    price: int | None = None  # tokens that it counted as in the queue; None: those of its prompt

    @property
    def counts_prompt(self) -> bool:
        """True for one sequence of a prompt, whose tokens count once."""
        return self.index == 0


Event = TokenEvent | PromptEvent | ScoresChunk | OutputsChunk | AttributionEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. Each accepted drafted token saves a decode step."""

    events: tuple[Event, ...]
    prefilled_tokens: int
    decoded_sequences: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evicted_sequences: int = 0  # lost their slots, because their readers were behind
    attribution_pieces: int = 0  # one at most


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    running: int
    paused: int  # evicted, until their readers have caught up
    begun_tokens: int  # price of the running and paused sequences (`cost.py`)
    slots: int
    slots_used: int
