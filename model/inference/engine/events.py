"""What the engine tells: events of sequences, the result of a step, and its state between steps.

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
    """Why a sequence ended. The first two are answers, the others are not."""

    STOP = "stop"  # it produced one of its stop tokens, or all numbers asked for were computed
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller asked
    TIMEOUT = "timeout"  # its deadline passed, in the queue or later
    UNREAD = "unread"  # its reader was behind for the longest, and others needed the memory
    REPLACED = "replaced"  # the weights that answered it had to go before its end
    ERROR = "error"  # the engine failed on it; the event says how


class TokenEvent(NamedTuple):
    """One generated token; a step may give several of one sequence, in their order. `chosen` and
    `top` are there when logprobs were asked for. A tuple, because it is made for every token."""

    request_id: str
    index: int  # type: ignore[assignment]  # which of the n sequences; hides what tuples can do
    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Logprobs of given tokens from position `start` on, when they were asked for. A generation is
    told once those of its prompt (index 0), before its first token; a ScoreRequest those of each
    of its sequences."""

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
    """Some rows of a OutputsRequest: `rows` is a NumPy array, float32, its first axis the positions
    and the others those of what was wanted."""

    request_id: str
    positions: tuple[int, ...]
    rows: Any


@dataclass(frozen=True, slots=True)
class AttributionEvent:
    """The whole answer to an AttributionRequest."""

    request_id: str
    index: int
    attribution: Attribution


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Moments of one sequence on the engine's clock (seconds); None where it never got there."""

    arrived: float
    admitted: float | None
    prefilled: float | None  # prompt computed: the first token is there
    finished: float


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a sequence: each accepted sequence gets exactly one."""

    request_id: str
    index: int
    reason: FinishReason
    times: SequenceTimes
    prompt_tokens: int  # of the request's prompt: all of its sequences say the same
    cached_tokens: int  # of the sequence, copied from another slot
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    param: str | None = None  # the field of the request that the error comes from, if it is one
    price: int | None = None  # tokens that it counted as in the queue; None: those of its prompt

    @property
    def counts_prompt(self) -> bool:
        """Whether the prompt's tokens count: of several sequences of a prompt, once."""
        return self.index == 0


Event = TokenEvent | PromptEvent | ScoresChunk | OutputsChunk | AttributionEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. A drafted token is accepted when it was sampled and its row gave the token
    after it: a decode step less."""

    events: tuple[Event, ...]
    prefilled_tokens: int
    decoded_sequences: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evicted_sequences: int = 0  # that lost their slots, because their readers were behind
    attribution_pieces: int = 0  # one at most


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine between two steps."""

    waiting: int
    running: int
    paused: int  # evicted, until their readers have caught up
    begun_tokens: int  # what the running and the paused sequences count as (`cost.py`)
    slots: int
    slots_used: int
