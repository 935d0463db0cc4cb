"""Sequence: the state of one generation, or of one prompt whose outputs or attributions are
computed.

It holds the tokens, the number of tokens in the cache, and the times of its arrival, admission and
prefill. The engine owns and changes it; `scheduler.py` makes the decisions.
"""

import bisect
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from logitd.model.inference.constraints.protocol import TokenConstraint, TokenMatcher
from logitd.model.inference.engine.cost import StepCost
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
"""Maximum number of output chunks that a reader may leave unread."""


class State(Enum):
    WAITING = "waiting"  # in the queue, without a slot
    PREFILL = "prefill"  # has a slot; part of the prompt is not computed yet
    PAUSED = "paused"  # evicted until the reader of its outputs has caught up
    ATTRIBUTION = "attribution"  # begun; needs no slot
    DECODE = "decode"  # prompt computed; one token per step, plus accepted drafts
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scored tokens of a prompt.

    start   position of the first row; a row scores the token after its position
    whole   also list the prompt's first token, which has no logprob
    top     number of most likely ids to list at each position
    arrays  return arrays (`ScoresChunk`) instead of an object for each token
    """

    start: int
    whole: bool
    top: int
    arrays: bool = False


@dataclass(eq=False, slots=True)
class Group:
    """The data shared by all sequences of a request. `weights` is the version of the weights that
    they are computed with."""

    request: Request
    weights: int = 0
    cost: StepCost = field(default_factory=StepCost)
    listed: Any = None  # the sampler's `ListedIds`, created for the first processed row


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    group: Group
    index: int
    arrived: float
    price: int = 0  # in tokens, for admission (`cost.py`)
    request: Request = field(init=False)
    request_id: str = field(init=False)
    generation: GenerationRequest | None = field(init=False)  # the request, if it generates
    scoring: Scoring | None = field(init=False)
    tokens: list[int] = field(init=False)  # the prompt, then the generated ones
    prompt_length: int = field(init=False)
    longest: int = field(init=False)  # limit of len(tokens)
    stop_token_ids: frozenset[int] = field(init=False)
    matcher: TokenMatcher | None = field(init=False)
    tapped: bool = field(init=False)
    """True if stages of the sequence are recorded or changed. Then it is computed separately, and
    its slot cannot be copied."""
    decoded_step: int = 0  # last step in which it decoded, if it is tapped
    masked_step: int = 0  # last step in which it decoded, if it has a constraint
    state: State = State.WAITING
    slot: int | None = None
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int = 0  # leading tokens that were copied from another slot
    credit: int = CHUNKS_IN_FLIGHT  # chunks that may still be delivered before the next `grant`
    handed_out: int = 0  # number of positions whose outputs were delivered
    paused_at: float | None = None  # time at which its reader fell behind
    admitted_step: int = 0  # step in which it got its slot
    drafter: Drafter | None = None  # while it decodes with drafts
    admitted: float | None = None
    prefilled: float | None = None

    def __post_init__(self) -> None:
        request = self.request = self.group.request
        self.request_id = request.request_id
        self.generation = request if isinstance(request, GenerationRequest) else None
        self.scoring = _scoring(request, self.index)
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
        """The slot. The sequence must hold one."""
        assert self.slot is not None
        return self.slot

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the sequence may still generate."""
        return self.longest - len(self.tokens)

    @property
    def constraint(self) -> TokenConstraint | None:
        return None if self.generation is None else self.generation.params.constraint

    @property
    def outputs(self) -> OutputsRequest | None:
        """The request if it is an OutputsRequest, else None."""
        return self.request if isinstance(self.request, OutputsRequest) else None

    @property
    def attribution(self) -> AttributionRequest | None:
        """The request if it is an AttributionRequest, else None."""
        return self.request if isinstance(self.request, AttributionRequest) else None

    @property
    def changes_rows(self) -> bool:
        """True if the sequence generates with interventions."""
        return self.tapped and self.generation is not None

    @property
    def first_needed(self) -> int:
        """The first position whose hidden state is still needed; earlier positions may be
        copied."""
        if self.outputs is not None and not self.all_handed_out:
            return self.outputs.positions[self.handed_out]
        return self.prompt_length - 1 if self.scoring is None else self.scoring.start

    @property
    def may_compute(self) -> bool:
        """False while the reader of the sequence's outputs is behind."""
        return self.outputs is None or self.credit > 0 or self.all_handed_out

    @property
    def all_handed_out(self) -> bool:
        return self.outputs is not None and self.handed_out == len(self.outputs.positions)

    def positions_in(self, start: int, end: int) -> tuple[int, ...]:
        """Requested positions in [start, end) whose outputs have not been delivered yet."""
        if self.outputs is None:
            return ()
        positions = self.outputs.positions
        first = max(self.handed_out, bisect.bisect_left(positions, start))
        return positions[first : bisect.bisect_left(positions, end)]


def _scoring(request: Request, index: int) -> Scoring | None:
    """The scored tokens of a sequence. Only the first sequence of a generation scores the
    prompt."""
    match request:
        case ScoreRequest(token_ids=prompt, continuations=continuations):
            start = len(prompt) - 1 if continuations else 0
            return Scoring(start, not continuations, request.top, request.arrays)
        case GenerationRequest(prompt_logprobs=int(top)) if index == 0:
            return Scoring(0, True, top)
        case _:
            return None
