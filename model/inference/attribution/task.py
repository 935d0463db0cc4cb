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
"""Steps of integrated gradients; each is a forward and a backward pass over the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionTask:
    """The target of an attribution and its methods.

    position  of the prompt, from 0; its logits are for the next token
    token_id  the token of the logit; None: the likeliest next token
    minus_id  token whose logit is subtracted
    methods   each at most once
    steps     of integrated gradients
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
        """Number of forward passes over the prompt. A backward pass, which computes every block
        again, counts as two."""
        gradient = 2 if "gradient_times_input" in self.methods else 0
        path = 1 + 3 * self.steps if "integrated_gradients" in self.methods else 0
        return 1 + gradient + path


@dataclass(frozen=True, slots=True)
class Part:
    """The addition of one part of the model to the target; `head` is set for a head."""

    stage: str
    head: int | None
    value: float


@dataclass(frozen=True, slots=True)
class IntegratedGradients:
    """`values` of each token of the prompt, and the target at the baseline. The integral over the
    path is target(prompt) - target(baseline); `gap` is the error of a finite number of steps."""

    values: tuple[float, ...]
    target: float
    baseline_target: float

    @property
    def sum(self) -> float:
        return math.fsum(self.values)

    @property
    def gap(self) -> float:
        """Sum of the attributions - (target(prompt) - target(baseline))."""
        return self.sum - (self.target - self.baseline_target)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The target of one prompt, and its attributions by each requested method.

    logit, minus_logit    of the tokens, in float32 arithmetic (float64 in a float64 model)
    gradient_times_input  of each token of the prompt; 0 behind the position
    direct                in the order of the forward; `direct_sum` is the target
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
    """Number of computed rows: the text up to the position, in whole blocks, within the
    context."""
    return min(-(-(task.position + 1) // BLOCK) * BLOCK, config.context_length)


def kept_elements(task: AttributionTask, config: GPTConfig) -> int:
    """Elements that an attribution keeps at most: the stream before each block, six more tensors of
    that size (prompt, baseline, sum, gradients), and autograd's share of one block."""
    units = config.d_ff * (4 if config.activation == "swiglu" else 2)
    values = config.kv_width if config.value_embeddings else 0
    block = 6 * config.d_model + 6 * config.n_head * config.head_dim + units + 2 * values
    # Twice, for the gradients of these.
    return padded_length(task, config) * ((config.n_layer + 6) * config.d_model + 2 * block)
