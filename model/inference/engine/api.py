"""The engine's words: what goes in, what comes out, and what can be wrong.

Requests and parameters (in), events and statistics (out), the configuration and the errors.
Everything is frozen plain data of the standard library, so that it can cross a thread or a process;
of a constraint only the shape is told here (`model/inference/constraints/compiler.py` makes them).
Token ids only: texts, stop strings and the end-of-text token are the caller's business.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, get_args

from model.transformer.config import BLOCK, Speculation

Stage = Literal["raw", "processed"]
"""Logprobs before (raw) or after (processed) bias, penalties, temperature and filters."""


class InvalidRequest(ValueError):
    """A request that the engine refuses; `param` names the field to mend."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConstraintError(Exception):
    """A constraint that cannot be compiled, or that lets nothing follow; the message says why."""


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are answers, the others are not."""

    STOP = "stop"  # it produced one of its stop tokens, or all numbers asked for were computed
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller asked
    TIMEOUT = "timeout"  # its deadline passed, in the queue or later
    ERROR = "error"  # the engine failed on it; the event says how


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that bound the engine's memory and its steps.

    slots          sequences that can be in the KV cache at once
    prefill_chunk  prompt positions computed per step at most, whole blocks of 32
    prefix_reuse   whether a new prompt copies a shared prefix from any slot instead of
                   computing it
    speculate      where drafts come from, tokens that a decode step verifies behind the last one
                   (`model/inference/engine/ngram.py`); they change how long an answer takes, not
                   the answer
    """

    slots: int = 16
    prefill_chunk: int = 256
    prefix_reuse: bool = True
    speculate: Speculation = "none"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidRequest(f"slots is {self.slots}; at least 1 is needed", "slots")
        if self.prefill_chunk < BLOCK or self.prefill_chunk % BLOCK:
            raise InvalidRequest(
                f"prefill_chunk is {self.prefill_chunk}; it must be a positive multiple of {BLOCK}",
                "prefill_chunk",
            )
        if self.speculate not in get_args(Speculation):
            raise InvalidRequest(
                f"speculate is {self.speculate!r}; it is {' or '.join(get_args(Speculation))}",
                "speculate",
            )


class TokenMatcher(Protocol):
    """How far one sequence has come in its constraint."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow, as far as that is known: `allowed` knows."""

    def allowed(self) -> Any:
        """Which ids may come next: a NumPy array of booleans (V,), not to be changed. At least one
        of them is true, unless the matcher is complete now. Raises ConstraintError when nothing can
        follow and the text is not whole. May take time, once after each token."""

    def advance(self, token_id: int) -> None:
        """Take in a token that was allowed. Raises ConstraintError when nothing can follow it and
        that is known at once."""


class TokenConstraint(Protocol):
    """What the token ids of a sequence have to be, one after the other."""

    @property
    def kind(self) -> str:
        """The field of a request that it comes from."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary that it was made for."""

    def matcher(self) -> TokenMatcher:
        """The matcher of one more sequence."""


class MaskAhead(Protocol):
    """Asks matchers what is allowed while the model computes (`constraints/mask_worker.py`)."""

    def begin(self, matchers: Sequence[TokenMatcher]) -> Callable[[], None]:
        """Ask each of them, beside the caller, who then waits by what is returned. What one
        raises is dropped: it will raise it again when it is asked the next time."""

    def close(self) -> None:
        """Begin nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens. `model/inference/sampling/sampler.py` defines each step.

    max_tokens         tokens to generate at most
    seed               key of the random draws; same seed, same tokens (0 to 2^64 - 1)
    temperature        0 is greedy
    top_k              keep the k likeliest (0: all)
    top_p, min_p       keep the likeliest that make up the mass p; those at least min_p as likely
                       as the likeliest
    repetition_penalty, presence_penalty, frequency_penalty   1, 0 and 0 do nothing
    logit_bias         added to the logits of ids
    allowed_token_ids  no other id can be drawn (None: all)
    constraint         what the whole text has to be (None: anything); ends the sequence when
                       nothing may follow, and may be cut short by max_tokens
    stop_token_ids     end the sequence; part of its ids
    min_tokens         before as many tokens, stop tokens cannot be drawn
    logprobs           None: none; k: of each token, and of the k likeliest
    logprobs_stage     raw or processed
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    constraint: TokenConstraint | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    logprobs_stage: Stage = "raw"

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1)
        _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_range("temperature", self.temperature, 0, 10**6)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -100, 100)
        _check_range("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0; it must be above 0 (1 keeps all)", "top_p")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -(10**9), 10**9)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty; nothing could be drawn",
                                 "allowed_token_ids")  # fmt: skip
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0)
        if (
            self.min_tokens
            and self.allowed_token_ids is not None
            and self.stop_token_ids.issuperset(self.allowed_token_ids)
        ):
            raise InvalidRequest(
                "allowed_token_ids holds only stop tokens, which min_tokens forbids", "min_tokens"
            )
        if self.constraint is not None:
            _check_alone(self.constraint, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Generate `n` sequences after one prompt.

    prompt_logprobs  None: none; k: raw logprobs of the prompt's own tokens and of the k likeliest
                     in the place of each. The whole prompt is computed for them.
    priority         lower is admitted earlier; equals in the order of arrival
    prefix_reuse     whether the prompt may copy a prefix that another slot holds
    deadline         a time of the engine's clock
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    prompt_logprobs: int | None = None
    priority: int = 0
    prefix_reuse: bool = True
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Rows of logits: the columns of all ids, or of `columns` in their order: (P, columns).

    processing        None: raw; else these steps of the sampler are applied to each row as if it
                      were drawn from, with -inf for what they drop
    completion_start  the position from which the prompt's tokens count as generated, which is what
                      presence and frequency penalties look at (None: none of them)
    """

    columns: tuple[int, ...] | None = None
    processing: SamplingParams | None = None
    completion_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Rows of the residual stream: (P, layers, d_model). Layer 0 is after the embeddings, i after
    block i, before the final norm."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Rows of attention weights: (P, layers, heads, T), T the prompt's length; what a position
    does not see is 0. Layers count from 0, the first block."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """What the model computes at the `positions` (ascending) of a prompt. Nothing is generated.

    Rows are computed a piece at a time. A piece is handed out as a `RowsEvent`, and the next one
    but one is computed only after `Engine.grant`: a slow reader pauses its own request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    wanted: Logits | HiddenStates | AttentionWeights = Logits()
    priority: int = 0
    prefix_reuse: bool = True
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Raw logprobs of given texts: of each of `continuations` after the prompt, a sequence each, or
    of the prompt itself where there are none.

    The prompt is computed once, up to the last whole block that all share.

    top   also tell the k likeliest in the place of each token
    """

    request_id: str
    token_ids: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...] = ()
    top: int = 0
    priority: int = 0
    prefix_reuse: bool = True
    deadline: float | None = None


Request = GenerationRequest | RowsRequest | ScoreRequest


def sequence_lengths(request: Request) -> list[int]:
    """Prompt tokens of each sequence that a request will run as."""
    length = len(request.token_ids)
    match request:
        case GenerationRequest(n=n):
            return [length] * n
        case ScoreRequest(continuations=continuations) if continuations:
            return [length + len(continuation) for continuation in continuations]
        case _:
            return [length]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An id with its log probability (nats) and its rank (1: the likeliest)."""

    token_id: int
    logprob: float
    rank: int


class TokenEvent(NamedTuple):
    """One generated token; a step may give several of one sequence, in their order. `chosen` and
    `top` are there when logprobs were asked for. A tuple, because it is made for every token."""

    request_id: str
    index: int  # type: ignore[assignment]  # which of the n sequences; hides what tuples can do
    token_id: int
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A given token with its raw logprob, and the likeliest in its place. The first token of a
    prompt has none: nothing predicts it."""

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
    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class RowsEvent:
    """Some rows of a RowsRequest: `rows` is a NumPy array, float32, its first axis the positions
    and the others those of what was wanted."""

    request_id: str
    positions: tuple[int, ...]
    rows: Any


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
    prompt_tokens: int
    cached_tokens: int  # of the prompt, copied from another slot
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    param: str | None = None  # the field of the request that the error comes from, if it is one


Event = TokenEvent | PromptEvent | RowsEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. A drafted token is accepted when it was drawn and its row gave the token
    after it: a decode step less."""

    events: tuple[Event, ...]
    prefilled_tokens: int
    decoded_sequences: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine between two steps."""

    waiting: int
    running: int
    running_tokens: int  # of the running sequences' prompts
    slots: int
    slots_used: int


def _check_alone(constraint: TokenConstraint, params: SamplingParams) -> None:
    """Refuse what could leave a constrained sequence without any token to draw."""
    for name, asked in (
        ("allowed_token_ids", params.allowed_token_ids is not None),
        ("min_tokens", params.min_tokens > 0),
    ):
        if asked:
            raise InvalidRequest(
                f"{name} and {constraint.kind} could forbid every token together; leave one out",
                name,
            )


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high or math.isinf(value):  # NaN fails every comparison
        wanted = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value}; it must be a finite number, {wanted}", name)
