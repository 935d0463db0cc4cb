"""What is asked of an attribution, and what it gives: frozen plain data, without torch.

The target is a token's logit at one position of a prompt, or the difference of two tokens' logits
there. The definitions of the methods are in `gradients.py` and `direct.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from logitd.model.transformer.config import BLOCK, GPTConfig

Method = Literal["gradient_times_input", "integrated_gradients", "direct"]
METHODS: tuple[Method, ...] = get_args(Method)

DEFAULT_STEPS = 32
"""Of integrated gradients; each is a forward and a backward pass over the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionTask:
    """What is attributed, and how.

    position  of the prompt, from 0: its logits are those of the token that follows
    token_id  whose logit it is; None: the likeliest next token
    minus_id  whose logit is subtracted; None: none
    methods   each at most once
    steps     of integrated gradients
    baseline  where integrated gradients begin: at zero vectors (None), or at the embedding of this
              token at every position
    """

    position: int
    token_id: int | None = None
    minus_id: int | None = None
    methods: tuple[Method, ...] = ("gradient_times_input",)
    steps: int = DEFAULT_STEPS
    baseline: int | None = None

    @property
    def passes(self) -> int:
        """How often the prompt goes through the model: a forward pass counts as one, a backward
        pass, which computes every block anew, as two."""
        gradient = 2 if "gradient_times_input" in self.methods else 0
        path = 1 + 3 * self.steps if "integrated_gradients" in self.methods else 0
        return 1 + gradient + path


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the model adds to the target: a head where `head` is given."""

    stage: str
    head: int | None
    value: float


@dataclass(frozen=True, slots=True)
class IntegratedGradients:
    """`values` of each token of the prompt, and the target at the baseline. By definition the
    integral over the path is target(prompt) - target(baseline); the `gap` is what a sum of finitely
    many steps misses of it."""

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
    """The target of one prompt, and what each method that was asked for makes of it.

    logit, minus_logit    of the tokens, in float32 arithmetic (float64 in a float64 model)
    gradient_times_input  of each token of the prompt; those behind the position have 0
    direct                in the order of the forward; with `direct_sum`, the target
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
        """Whether everything in it is a finite number."""
        path = self.integrated_gradients
        return all(
            map(
                math.isfinite,
                (
                    *(self.target, *(self.gradient_times_input or ())),
                    *(() if path is None else (*path.values, path.baseline_target)),
                    *(part.value for part in self.direct or ()),
                ),
            )
        )

    @property
    def direct_sum(self) -> float | None:
        """Of the parts."""
        return None if self.direct is None else math.fsum(part.value for part in self.direct)


def padded_length(task: AttributionTask, config: GPTConfig) -> int:
    """Rows that are computed: the text up to the position, in whole blocks, within the context."""
    return min(-(-(task.position + 1) // BLOCK) * BLOCK, config.context_length)


def kept_elements(task: AttributionTask, config: GPTConfig) -> int:
    """Elements of what an attribution has in memory at most: the stream before each block, six more
    of that size (prompt, baseline, sum, gradients), and what autograd keeps of one block."""
    units = config.d_ff * (4 if config.activation == "swiglu" else 2)
    values = config.kv_width if config.value_embeddings else 0
    block = 6 * config.d_model + 6 * config.n_head * config.head_dim + units + 2 * values
    # And as much again while the gradients of these are computed.
    return padded_length(task, config) * ((config.n_layer + 6) * config.d_model + 2 * block)
