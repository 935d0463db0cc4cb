"""Flops: the arithmetic that a training step needs, and its share of the machine's rate.

Counts the matrix products of the model's definition: for every token the block matrices and the
head, and its attention over the positions that it sees. The backward pass takes twice the
forward's. Does not count norms, activations, softmax, the optimizer, or discarded results, such as
attention to positions that the causal mask hides. So the share is how much of the machine goes into
training, not how busy it is.

A common convention (Chowdhery et al., 2022, appendix B; nanoGPT) counts attention over the whole
window instead, and has larger shares at long contexts.
"""

from dataclasses import dataclass

from logitd.model.device import Placement
from logitd.model.machine import matrix_rate
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.size import attention_operations, count_elements

RATE_WIDTH = 512
"""Width of the square matrices that a CPU's rate is measured with: wide enough for its full rate,
and done before another process takes the core away."""


def flops_per_token(config: GPTConfig) -> float:
    """Operations (a multiplication and an addition are two) of forward and backward pass for one
    token of a window of the context length.

    With M elements in the matrices of blocks and head, L layers, H heads of width D and T
    positions: 6 M + 12 L H D (T + 1) / 2, because a position sees (T + 1) / 2 on average.
    """
    matrices = count_elements(config).block_matrices + config.vocab_size * config.d_model
    attention = attention_operations(config) * (config.context_length + 1) / 2
    return 3 * (2 * matrices + attention)


@dataclass(frozen=True)
class Meter:
    """Turns tokens per second into a share of the machine's rate.

    flops_per_token   of the model in training
    matrix_rate       operations per second of a matrix product in the dtype of training
    """

    flops_per_token: float
    matrix_rate: float

    @classmethod
    def measure(cls, config: GPTConfig, placement: Placement) -> "Meter":
        """Measure the machine with torch's present threads: in some hundredths of a second, or in
        two seconds if torch has no fast products of the dtype (bfloat16 on AVX2)."""
        width = RATE_WIDTH if placement.device.type == "cpu" else None
        rate = matrix_rate(placement.device, placement.dtype, width)
        return cls(flops_per_token(config), rate)

    def share(self, tokens_per_second: float) -> float:
        """Model flops utilisation, 0 to 1 (above 1 if the machine was disturbed while it was
        measured)."""
        return tokens_per_second * self.flops_per_token / self.matrix_rate
