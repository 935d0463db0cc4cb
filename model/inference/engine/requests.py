"""Requests of the engine: generations, rows of computed values, scores and attributions.

Frozen plain data of the standard library, so that it can cross a thread or a process. Token ids
only: texts, stop strings and the end-of-text token are the caller's business.
"""

from dataclasses import dataclass
from typing import ClassVar

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Generate `n` sequences after one prompt.

    prompt_logprobs  None: none; k: raw logprobs of the prompt's own tokens and of the k likeliest
                     in the place of each. Needs the whole prompt to be computed
    priority         lower is admitted earlier
    caller           callers of one priority are admitted in turn, each one's requests in order of
                     arrival
    interventions    changes inside the forward, in this order; such a request neither copies a
                     prefix nor leaves one
    prefix_reuse     let the prompt copy a prefix from another slot
    deadline         a time of the engine's clock
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    prompt_logprobs: int | None = None
    priority: int = 0
    caller: str = ""
    prefix_reuse: bool = True
    deadline: float | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Rows of logits (P, columns): of all ids, or of `columns` in their order.

    processing        None: raw; else each row after these steps of the sampler, as if a token were
                      sampled from it, with -inf for dropped ids
    completion_start  position from which the prompt's tokens count as generated, for presence and
                      frequency penalties (None: none of them)
    """

    columns: tuple[int, ...] | None = None
    processing: SamplingParams | None = None
    completion_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Rows of the residual stream (P, layers, d_model). Layer 0 is after the embeddings, i after
    block i, before the final norm."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Rows of attention weights (P, layers, heads, T), T the prompt's length; later positions have
    0. Layers count from 0, the first block."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Rows of named stages (P, elements): the values of each stage, flattened, in the order of
    `stages` (names of `model/transformer/stages.py`). `heads` selects heads of the stages that have
    any; None: all."""

    stages: tuple[str, ...]
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens:
    """Rows (P, layers, numbers): figures of the head's logits on the stream after each of `layers`
    (as in HiddenStates), defined in `model/inference/sampling/lens.py`. They cover the `top_k`
    likeliest ids, the named `token_ids`, and with `following` the next token of the prompt, as the
    last of the named ones."""

    layers: tuple[int, ...]
    top_k: int
    token_ids: tuple[int, ...] = ()
    following: bool = False

    @property
    def named(self) -> int:
        """Number of named ids at each position."""
        return len(self.token_ids) + self.following


LARGEST_LENS_VOCABULARY = 2**24
"""Ids are sent as float32, which has every integer up to it."""


Output = Logits | HiddenStates | AttentionWeights | Activations | Lens


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsRequest:
    """Compute `output` at the `positions` (ascending) of a prompt. Generates nothing.

    Rows are computed in pieces, each handed out as an `OutputsChunk`. Two pieces can be on their
    way; the next is computed after `Engine.grant`. So a slow reader pauses its own request, which
    may lose its slot to waiting ones (`scheduler.py`).
    """

    request_id: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    output: Output = Logits()
    priority: int = 0
    caller: str = ""
    prefix_reuse: bool = True
    deadline: float | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Raw logprobs of given texts: of each of `continuations` after the prompt, a sequence each, or
    of the prompt itself without any. The prompt is computed once, up to its last whole block.

    top     also list the k likeliest in the place of each token
    arrays  in arrays (`ScoresChunk`) without ranks, instead of an object for each token
    """

    request_id: str
    token_ids: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...] = ()
    top: int = 0
    arrays: bool = False
    priority: int = 0
    caller: str = ""
    prefix_reuse: bool = True
    deadline: float | None = None
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionRequest:
    """Attributions of a logit of a prompt (`model/inference/attribution/`), as one
    `AttributionEvent`. Needs no slot, shares no prefix, and is computed a piece a step
    (`attributions.py`)."""

    interventions: ClassVar[tuple[Intervention, ...]] = ()
    prefix_reuse: ClassVar[bool] = False

    request_id: str
    token_ids: tuple[int, ...]
    task: AttributionTask
    priority: int = 0
    caller: str = ""
    deadline: float | None = None


Request = GenerationRequest | OutputsRequest | ScoreRequest | AttributionRequest


def sequence_lengths(request: Request) -> list[int]:
    """Prompt tokens of each sequence of a request."""
    length = len(request.token_ids)
    match request:
        case GenerationRequest(n=n):
            return [length] * n
        case ScoreRequest(continuations=continuations) if continuations:
            return [length + len(continuation) for continuation in continuations]
        case _:
            return [length]


def is_tapped(request: Request) -> bool:
    """True if stages of its sequences are recorded or changed."""
    records = isinstance(request, OutputsRequest) and isinstance(request.output, Activations)
    return records or bool(request.interventions)
