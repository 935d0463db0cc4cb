"""Tasks and results of attributions: frozen plain data, without torch.

The target is a token's logit at one position of a prompt, or the difference of two tokens' logits
there. `gradients.py` and `direct.py` define the methods.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from logitd.model.transformer.config import BLOCK, GPTConfig

Method = Literal["gradient_times_input", "integrated_gradients", "direct"]
METHODS: tuple[Method, ...] = get_args(Method)

DEFAULT_STEPS = 32
"""Default number of steps of integrated gradients; each is a forward and a backward pass over the
prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionTask:
    """The target of an attribution and its methods.

    position  position in the prompt, from 0; its logits are for the next token
    token_id  token whose logit is attributed; None: the likeliest next token
    minus_id  token whose logit is subtracted
    methods   methods to apply, each at most once
    steps     number of steps of integrated gradients
    baseline  start of integrated gradients: zero vectors (None), or the embedding of this token at
              every position
    """

    position: int
    token_id: int | None = None
    minus_id: int | None = None
    methods: tuple[Method, ...] = ("gradient_times_input",)
    steps: int = DEFAULT_STEPS
    baseline: int | None = None

    @property
    def passes(self) -> int:
        """Cost in forward passes over the prompt. A backward pass counts as two, because it
        computes every block again."""
        gradient = 2 if "gradient_times_input" in self.methods else 0
        path = 1 + 3 * self.steps if "integrated_gradients" in self.methods else 0
        return 1 + gradient + path


@dataclass(frozen=True, slots=True)
class Part:
    """A part's contribution to the target. `head` is None unless the part is a head."""

    stage: str
    head: int | None
    value: float


@dataclass(frozen=True, slots=True)
class IntegratedGradients:
    """A value for each token of the prompt, and the target at the prompt and at the baseline. With
    infinitely many steps the values would sum to target(prompt) - target(baseline)."""

    values: tuple[float, ...]
    target: float
    baseline_target: float

    @property
    def sum(self) -> float:
        return math.fsum(self.values)

    @property
    def gap(self) -> float:
        """Error due to the finite number of steps: sum - (target(prompt) - target(baseline))."""
        return self.sum - (self.target - self.baseline_target)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The target of one prompt, and its attributions by each requested method.

    logit, minus_logit    logits of the tokens, in float32 arithmetic (float64 in a float64 model)
    gradient_times_input  a value for each token of the prompt; 0 after the position
    direct                contributions in the order of the forward; their sum is the target
    """

    token_id: int
    minus_id: int | None
    logit: float
    minus_logit: float | None
    gradient_times_input: tuple[float, ...] | None = None
    integrated_gradients: IntegratedGradients | None = None
    direct: tuple[Part, ...] | None = None

    @property
    def target(self) -> float:
        return self.logit if self.minus_logit is None else self.logit - self.minus_logit

    @property
    def is_finite(self) -> bool:
        numbers = [self.target, *(self.gradient_times_input or ())]
        numbers += [part.value for part in self.direct or ()]
        if (path := self.integrated_gradients) is not None:
            numbers += [*path.values, path.baseline_target]
        return all(map(math.isfinite, numbers))

    @property
    def direct_sum(self) -> float | None:
        return None if self.direct is None else math.fsum(part.value for part in self.direct)


def padded_length(task: AttributionTask, config: GPTConfig) -> int:
    """Number of computed rows: the text up to the position, rounded up to whole blocks, at most the
    context."""
    return min(-(-(task.position + 1) // BLOCK) * BLOCK, config.context_length)


def kept_elements(task: AttributionTask, config: GPTConfig) -> int:
    """Largest number of elements that an attribution keeps: the stream before each block, six more
    tensors of that size (prompt, baseline, sum, gradients), two for `residual_mix` and two for
    `backout`, and the values that autograd keeps of one block."""
    units = config.d_ff * (4 if config.activation == "swiglu" else 2)
    values = config.kv_width if config.value_embeddings else 0
    block = 6 * config.d_model + 6 * config.n_head * config.head_dim + units + 2 * values
    # Doubled to include their gradients.
    streams = config.n_layer + 6 + 2 * config.residual_mix + 2 * config.backout
    return padded_length(task, config) * (streams * config.d_model + 2 * block)
