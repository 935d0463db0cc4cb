"""Sequence: one running generation, or one prompt whose rows are being computed.

Its tokens, how many of them are in the cache, and what moments it has passed. Mutable, owned by
the engine alone. Decides nothing: see `scheduler.py`.
"""

from dataclasses import dataclass, field
from enum import Enum

from model.engine.api import (
    FinishEvent,
    FinishReason,
    GenerationRequest,
    LogitsRequest,
    Request,
    SequenceTimes,
    TokenConstraint,
    TokenMatcher,
)

ROWS_CREDIT = 2
"""Pieces of rows that may be on their way to a reader at once."""


class State(Enum):
    WAITING = "waiting"  # in the queue, without a slot
    PREFILL = "prefill"  # has a slot; part of the prompt is still to be computed
    DECODE = "decode"  # prompt computed, one token a step
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Group:
    """What the sequences of one request share."""

    request: Request
    started: bool = False  # one of them was admitted

    @property
    def scored(self) -> bool:
        """Whether the prompt's own logprobs were asked for."""
        request = self.request
        return isinstance(request, GenerationRequest) and request.prompt_logprobs is not None


@dataclass(eq=False, slots=True)
class Sequence:
    """One of the n sequences of a request (a LogitsRequest has one)."""

    group: Group
    index: int
    arrived: float
    tokens: list[int] = field(init=False)  # the prompt, then what was generated
    matcher: TokenMatcher | None = field(init=False)  # of its constraint, if it has one
    state: State = State.WAITING
    slot: int | None = None
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int = 0  # of these, copied from another slot at the start
    credit: int = ROWS_CREDIT
    admitted: float | None = None
    prefilled: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self.matcher = None if self.constraint is None else self.constraint.matcher()

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def generation(self) -> GenerationRequest | None:
        """The request, if it generates."""
        return self.request if isinstance(self.request, GenerationRequest) else None

    @property
    def constraint(self) -> TokenConstraint | None:
        """What its text has to be, if that was asked for."""
        return None if self.generation is None else self.generation.params.constraint

    @property
    def logits(self) -> LogitsRequest | None:
        """The request, if it asks for rows."""
        return self.request if isinstance(self.request, LogitsRequest) else None

    @property
    def first_needed(self) -> int:
        """The first prompt position whose hidden state is asked for; those before it may be
        copied from another slot."""
        if self.logits is not None:
            return self.logits.positions[0]
        return 0 if self.scores_prompt else self.prompt_length - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether this sequence computes the prompt's logprobs, on behalf of its siblings too."""
        return self.group.scored and self.index == 0

    @property
    def may_compute(self) -> bool:
        """False while the reader of its rows is behind."""
        return self.generation is not None or self.credit > 0

    def finish_event(
        self,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        param: str | None = None,
    ) -> FinishEvent:
        return FinishEvent(
            request_id=self.request_id,
            index=self.index,
            reason=reason,
            times=SequenceTimes(self.arrived, self.admitted, self.prefilled, now),
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached,
            completion_tokens=self.generated,
            stop_token_id=stop_token_id,
            error=error,
            param=param,
        )
