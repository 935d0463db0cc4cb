"""What the engine is asked for: a generation, rows of what the model computes, a score, or what a
logit hangs on.

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
                     in the place of each. The whole prompt is computed for them.
    priority         lower is admitted earlier
    caller           whose request it is: of one priority, callers are admitted in turn, and the
                     requests of each in the order of arrival
    interventions    what is changed inside the forward, in this order; such a request neither
                     copies a prefix nor leaves one
    prefix_reuse     whether the prompt may copy a prefix that another slot holds
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
    """Rows of logits: the columns of all ids, or of `columns` in their order: (P, columns).

    processing        None: raw; else these steps of the sampler are applied to each row as if a
                      token were sampled from it, with -inf for what they drop
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
class Activations:
    """Rows of named stages (P, elements): the values of each at the position, flattened and one
    after the other in the order of `stages` (names of `model/transformer/stages.py`); of those that
    have heads, the chosen ones. None: all."""

    stages: tuple[str, ...]
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens:
    """Rows (P, layers, numbers): what the head says of the stream after each of the chosen layers
    (as in HiddenStates), in the figures of `model/inference/sampling/lens.py`: of its `top_k`
    likeliest ids and of the named `token_ids`; with `following`, of the token too that follows the
    position in the prompt, as the last of the named ones."""

    layers: tuple[int, ...]
    top_k: int
    token_ids: tuple[int, ...] = ()
    following: bool = False

    @property
    def named(self) -> int:
        """How many ids are named at each position."""
        return len(self.token_ids) + self.following


LARGEST_LENS_VOCABULARY = 2**24
"""Ids travel as float32, which has every integer up to it."""


Output = Logits | HiddenStates | AttentionWeights | Activations | Lens


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsRequest:
    """What the model computes at the `positions` (ascending) of a prompt. Nothing is generated.

    Rows are computed a piece at a time. A piece is handed out as a `OutputsChunk`, and the next one
    but one is computed only after `Engine.grant`: a slow reader pauses its own request, which gives
    its slot to whoever waits for one (`scheduler.py`).
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
    of the prompt itself where there are none.

    The prompt is computed once, up to the last whole block that all share.

    top     also tell the k likeliest in the place of each token
    arrays  tell it in arrays (`ScoresChunk`), without ranks, instead of an object for each token
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
    """What a logit of a prompt hangs on (`model/inference/attribution/`), told at once as an
    `AttributionEvent`.

    Needs no slot, reads and leaves no prefix, and is computed a piece a step (`attributions.py`).
    """

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
    """Prompt tokens of each sequence that a request will run as."""
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
