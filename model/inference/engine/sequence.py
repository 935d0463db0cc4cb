"""Sequence: one running generation, or one prompt whose outputs or attributions are being computed.

Its tokens, how many of them are in the cache, and what moments it has passed. Mutable, owned by
the engine alone. Decides nothing: see `scheduler.py`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from logitd.model.inference.constraints.protocol import TokenConstraint, TokenMatcher
from logitd.model.inference.engine.cost import NO_COST, StepCost
from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.inference.engine.ngram import Drafter
from logitd.model.inference.engine.requests import (
    AttributionRequest,
    GenerationRequest,
    OutputsRequest,
    Request,
    ScoreRequest,
    is_tapped,
)

CHUNKS_IN_FLIGHT = 2
"""Chunks of outputs that may be on their way to a reader at once."""


class State(Enum):
    WAITING = "waiting"  # in the queue, without a slot
    PREFILL = "prefill"  # has a slot; part of the prompt is still to be computed
    PAUSED = "paused"  # gave its slot back, until the reader of its outputs has caught up
    ATTRIBUTION = "attribution"  # begun; needs no slot, one piece a step
    DECODE = "decode"  # prompt computed, one token a step, and drafted tokens that were right
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Group:
    """What the sequences of one request share. `weights` is the version that answers it."""

    request: Request
    weights: int = 0
    cost: StepCost = NO_COST
    listed: Any = None  # the sampler's `ListedIds`, once a row of a sequence was processed


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One of the sequences of a request."""

    group: Group
    index: int
    arrived: float
    price: int = 0  # tokens that it counts as in the queue
    request: Request = field(init=False)
    request_id: str = field(init=False)
    generation: GenerationRequest | None = field(init=False)  # the request, if it generates
    tokens: list[int] = field(init=False)  # the prompt, then what was generated
    prompt_length: int = field(init=False)
    longest: int = field(init=False)  # of `tokens`: max_tokens after the prompt
    stop_token_ids: frozenset[int] = field(init=False)
    matcher: TokenMatcher | None = field(init=False)  # of its constraint, if it has one
    tapped: bool = field(init=False)
    """Whether its stages are recorded or changed: then it is computed apart from the others, and
    its slot holds nothing that another could copy."""
    decoded_step: int = 0  # in which it was decoded last
    state: State = State.WAITING
    slot: int | None = None
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int = 0  # of these, copied from another slot at the start
    credit: int = CHUNKS_IN_FLIGHT
    handed_out: int = 0  # of the positions whose outputs are asked for
    paused_at: float | None = None  # when its reader fell behind; None: it has not
    admitted_step: int = 0  # in which it got its slot
    drafter: Drafter | None = None  # while it decodes, if its drafts are verified
    admitted: float | None = None
    prefilled: float | None = None

    def __post_init__(self) -> None:
        request = self.request = self.group.request
        self.request_id = request.request_id
        self.generation = request if isinstance(request, GenerationRequest) else None
        self.tokens = list(request.token_ids)
        if isinstance(request, ScoreRequest) and request.continuations:
            self.tokens += request.continuations[self.index]
        self.prompt_length = self.longest = len(self.tokens)
        self.stop_token_ids = frozenset()
        if self.generation is not None:
            self.longest += self.generation.params.max_tokens
            self.stop_token_ids = self.generation.params.stop_token_ids
        self.matcher = None if self.constraint is None else self.constraint.matcher()
        self.tapped = is_tapped(request)

    @property
    def held_slot(self) -> int:
        """The slot of a sequence that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def tokens_left(self) -> int:
        """How many more tokens it may generate."""
        return self.longest - len(self.tokens)

    @property
    def constraint(self) -> TokenConstraint | None:
        """The constraint of its request, if it has one."""
        return None if self.generation is None else self.generation.params.constraint

    @property
    def outputs(self) -> OutputsRequest | None:
        """The request, if it asks for outputs."""
        return self.request if isinstance(self.request, OutputsRequest) else None

    @property
    def attribution(self) -> AttributionRequest | None:
        """The request, if it asks for attributions."""
        return self.request if isinstance(self.request, AttributionRequest) else None

    @property
    def scores_from(self) -> int | None:
        """The first position whose row scores the token after it, if tokens are scored. Of a
        generation the first sequence does it, on behalf of its siblings."""
        match self.request:
            case ScoreRequest(token_ids=prompt, continuations=continuations):
                return len(prompt) - 1 if continuations else 0
            case GenerationRequest(prompt_logprobs=int()) if self.index == 0:
                return 0
            case _:
                return None

    @property
    def scores_first(self) -> bool:
        """Whether its first token is among the scored ones, although nothing predicts it."""
        request = self.request
        return not (isinstance(request, ScoreRequest) and request.continuations)

    @property
    def scored_in_arrays(self) -> bool:
        """Whether scored tokens are told in arrays."""
        return isinstance(self.request, ScoreRequest) and self.request.arrays

    @property
    def scored_top(self) -> int:
        """How many of the likeliest are given in the place of each scored token."""
        match self.request:
            case ScoreRequest(top=top):
                return top
            case GenerationRequest(prompt_logprobs=int(top)):
                return top
            case _:
                return 0

    @property
    def first_needed(self) -> int:
        """The first prompt position whose hidden state is still asked for; those before it may be
        copied from another slot."""
        if self.outputs is not None and not self.all_handed_out:
            return self.outputs.positions[self.handed_out]
        return self.prompt_length - 1 if self.scores_from is None else self.scores_from

    @property
    def may_compute(self) -> bool:
        """False while the reader of its outputs is behind."""
        return self.outputs is None or self.credit > 0 or self.all_handed_out

    @property
    def all_handed_out(self) -> bool:
        """Whether no more outputs of it will be computed."""
        return self.outputs is not None and self.handed_out == len(self.outputs.positions)

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
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached,
            completion_tokens=self.generated,
            stop_token_id=stop_token_id,
            error=error,
            param=param,
            price=self.price,
        )
