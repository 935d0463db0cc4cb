"""Tasks and results of attributions: frozen plain data, without torch.

The target is a token's logit at one position of a prompt, the difference of two tokens' logits
there, or the product of a direction with the value of a stage there. `gradients.py` and `direct.py`
define the methods, `stage_gradients.py` the gradients of stages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from logitd.model.transformer.config import BLOCK, GPTConfig
from logitd.model.transformer.stages import match_stages

Method = Literal["gradient_times_input", "integrated_gradients", "direct"]
METHODS: tuple[Method, ...] = get_args(Method)

OVER_KEYS = ("attention.scores", "attention.probs")
"""Names, within a block, of the stages that fused attention does not compute."""

DEFAULT_STEPS = 32
"""Default number of steps of integrated gradients. Each step is a forward and a backward pass over
the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A direction at a stage: a NumPy array with the stage's shape at one position. If the stage
    has an axis over keys, that axis is as long as the prompt."""

    stage: str
    direction: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionTask:
    """The target of an attribution and its methods.

    position  position in the prompt, from 0; its logits predict the next token
    token_id  token whose logit is attributed; None: the likeliest next token
    minus_id  token whose logit is subtracted
    probe     direction whose product with a stage is the target, instead of a logit
    stages    stages, by name, with respect to which the gradient of the target is returned
    methods   methods to apply, each at most once
    steps     number of steps of integrated gradients
    baseline  start of integrated gradients: zero vectors (None), or the embedding of this token at
              every position
    """

    position: int
    token_id: int | None = None
    minus_id: int | None = None
    probe: Probe | None = None
    stages: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ("gradient_times_input",)
    steps: int = DEFAULT_STEPS
    baseline: int | None = None

    @property
    def computes_weights(self) -> bool:
        """True if the gradients need explicit attention scores and weights, which fused attention
        does not compute."""
        probed = () if self.probe is None else (self.probe.stage,)
        return any(name.endswith(OVER_KEYS) for name in (*self.stages, *probed))

    @property
    def passes(self) -> int:
        """The cost of the task, in forward passes over the prompt. A backward pass counts as two,
        because it computes every block again."""
        gradient = 2 if self.stages or "gradient_times_input" in self.methods else 0
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
    """A value for each token of the prompt, and the values of the target for the prompt and for the
    baseline. With infinitely many steps the token values would sum to target(prompt) -
    target(baseline)."""

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

    token_id              the token; None if the target is a probe
    logit, minus_logit    logits of the tokens, in float32 arithmetic (float64 in a float64 model);
                          if the target is a probe, `logit` is its value
    gradient_times_input  a value for each token of the prompt; 0 after the task's position
    direct                contributions in the order of the forward pass; their sum is the target
    gradients             NumPy arrays (T, ...) of the gradients with respect to stages, by name; 0
                          after the task's position
    """

    token_id: int | None
    minus_id: int | None
    logit: float
    minus_logit: float | None
    gradient_times_input: tuple[float, ...] | None = None
    integrated_gradients: IntegratedGradients | None = None
    direct: tuple[Part, ...] | None = None
    gradients: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def target(self) -> float:
        return self.logit if self.minus_logit is None else self.logit - self.minus_logit

    @property
    def is_finite(self) -> bool:
        numbers = [self.target, *(self.gradient_times_input or ())]
        numbers += [part.value for part in self.direct or ()]
        if (path := self.integrated_gradients) is not None:
            numbers += [*path.values, path.baseline_target]
        arrays = self.gradients.values()
        return all(map(math.isfinite, numbers)) and all(np.isfinite(each).all() for each in arrays)

    @property
    def direct_sum(self) -> float | None:
        return None if self.direct is None else math.fsum(part.value for part in self.direct)


def padded_length(task: AttributionTask, config: GPTConfig) -> int:
    """Number of rows to compute: the number of tokens up to the task's position, rounded up to a
    multiple of BLOCK, but at most the context length."""
    return min(-(-(task.position + 1) // BLOCK) * BLOCK, config.context_length)


def kept_elements(task: AttributionTask, config: GPTConfig) -> int:
    """Largest number of elements that an attribution keeps: the stream before each block; six more
    tensors of the size of a stream (for the prompt, the baseline, the sum and gradients), and two
    more each for `residual_mix` and `backout`; the gradients with respect to stages; and the values
    and gradients that autograd keeps for one block."""
    units = config.d_ff * (4 if config.activation == "swiglu" else 2)
    values = config.kv_width if config.value_embeddings else 0
    block = 6 * config.d_model + 6 * config.n_head * config.head_dim + units + 2 * values
    length = padded_length(task, config)
    stages = match_stages(task.stages, config) if task.stages else ()
    kept = sum(math.prod(stage.shape(config, length)) for stage in stages)
    if task.computes_weights:
        block += 2 * config.n_head * length
    # Doubled to include their gradients.
    streams = config.n_layer + 6 + 2 * config.residual_mix + 2 * config.backout
    return length * (streams * config.d_model + 2 * block + kept)
