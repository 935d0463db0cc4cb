"""Requests of the engine: generations, rows of computed values, scores and attributions.

Requests are immutable and hold only standard types, so that they can be passed between threads and
processes. They hold token ids: the caller handles texts, stop strings and the end of text.
"""

from dataclasses import dataclass
from typing import ClassVar

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.circuit.task import CircuitTask
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """The fields of all requests.

    priority  requests with lower values are admitted first
    caller    callers with requests of the same priority take turns; the requests
              of one caller are admitted in the order of arrival
    deadline  time, on the engine's clock, at which the request is ended if unfinished
    """

    request_id: str
    token_ids: tuple[int, ...]
    priority: int = 0
    caller: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFields(CommonFields):
    """The fields of requests that are computed in a slot of the cache.

    prefix_reuse   allow the prompt to copy a prefix from another slot
    interventions  changes inside the forward pass, applied in this order; a request with
                   interventions neither copies a prefix nor offers one
    """

    prefix_reuse: bool = True
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(SlotFields):
    """Generate `n` sequences after one prompt.

    prompt_logprobs  None: none; k: raw logprobs of the prompt's tokens and of the k most likely
                     tokens at each position; then no prefix is copied
    """

    params: SamplingParams
    n: int = 1
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Rows of logits (P, columns): of all ids, or of `columns` in their order.

    processing        None: raw logits; else the logits from which the sampler would sample with
                      these parameters, -inf for dropped ids
    completion_start  first position of the prompt that counts as generated, for presence and
                      frequency penalties (None: no position does)
    """

    columns: tuple[int, ...] | None = None
    processing: SamplingParams | None = None
    completion_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Rows of the residual stream (P, layers, d_model), before the final norm. Layer 0 is the
    stream after the embeddings, layer i the stream after block i."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Rows of attention weights (P, layers, heads, T); T is the length of the prompt. Weights of
    later positions are 0. Layer 0 is the first block."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Rows of named stages (P, elements): the flattened values of all `stages` in their order
    (`model/transformer/stages.py`). `heads` selects heads in the stages that have heads (None:
    all)."""

    stages: tuple[str, ...]
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens:
    """Rows (P, layers, numbers): statistics of the logits that the head computes from the stream
    after each of `layers` (numbered as in HiddenStates). `model/inference/sampling/lens.py` defines
    them. They cover the `top_k` most likely ids and the named `token_ids`. `following` adds the
    next token of the prompt as the last named id. The prompt's last position has no next token, so
    it must not be requested with `following`."""

    layers: tuple[int, ...]
    top_k: int
    token_ids: tuple[int, ...] = ()
    following: bool = False

    @property
    def named(self) -> int:
        """Number of named ids at each position, including the following token if requested."""
        return len(self.token_ids) + self.following


LARGEST_LENS_VOCABULARY = 2**24
"""Largest vocabulary for a lens: ids are returned as float32, which represents every integer up to
this number."""


Output = Logits | HiddenStates | AttentionWeights | Activations | Lens


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsRequest(SlotFields):
    """Compute `output` at the `positions` (ascending) of a prompt. Generates nothing.

    Rows are computed in pieces, each delivered as an `OutputsChunk`. At most two delivered pieces
    may be unread; the next piece is computed after `Engine.grant`. So a slow reader pauses only its
    own request, which may lose its slot to a waiting request (`scheduler.py`).
    """

    positions: tuple[int, ...]
    output: Output = Logits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(SlotFields):
    """Raw logprobs of given tokens: the tokens of each of `continuations` after the prompt, or of
    the prompt if there are no continuations. Each continuation is a sequence. They share the
    complete blocks of the prompt, which are computed only once.

    top     number of most likely tokens to list at each position
    arrays  return arrays without ranks (`ScoresChunk`) instead of an object for each token
    """

    continuations: tuple[tuple[int, ...], ...] = ()
    top: int = 0
    arrays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionRequest(CommonFields):
    """Attributions of a logit to the parts of a prompt or of the model
    (`model/inference/attribution/`), or the circuit of a difference of logits
    (`model/inference/circuit/`), returned as one `AttributionEvent`. A step computes one piece
    (`attributions.py`), which needs no slot and shares no prefix."""

    prefix_reuse: ClassVar[bool] = False
    interventions: ClassVar[tuple[Intervention, ...]] = ()

    task: AttributionTask | CircuitTask


Request = GenerationRequest | OutputsRequest | ScoreRequest | AttributionRequest


def sequence_lengths(request: Request) -> list[int]:
    """Number of prompt tokens of each sequence, continuations included."""
    length = len(request.token_ids)
    match request:
        case GenerationRequest(n=n):
            return [length] * n
        case ScoreRequest(continuations=continuations) if continuations:
            return [length + len(continuation) for continuation in continuations]
        case _:
            return [length]


def is_tapped(request: Request) -> bool:
    """True if a request records or changes stages of the forward pass."""
    records = isinstance(request, OutputsRequest) and isinstance(request.output, Activations)
    return records or bool(request.interventions)
