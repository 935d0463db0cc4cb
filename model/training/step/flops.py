"""Flops: the arithmetic that a training step has to do, and what share of the machine it uses.

Counted are the products of matrices that the model's definition asks for: of every token the block
matrices and the head, and its attention over the positions that it sees; the backward pass takes
twice the forward's. Left out are norms, activations, softmax, the optimizer, and whatever an
implementation computes and throws away, such as attention to what the causal mask hides. So the
share says how much of the machine goes into training, not how busy it is.

A convention that is often met (Chowdhery et al., 2022, appendix B; nanoGPT) counts attention over
the whole window instead, and so gives larger shares at long contexts.
"""

from dataclasses import dataclass

import torch

from model.benchmark.machine import matrix_rate
from model.benchmark.work import size_of
from model.device import Placement
from model.transformer.config import GPTConfig
from model.transformer.gpt import GPT

RATE_WIDTH = 512
"""Of the square matrices that a CPU's rate is measured with: wide enough for its full rate, and
done before a neighbour takes the core away."""


def flops_per_token(config: GPTConfig) -> float:
    """Operations (a multiplication and an addition are two) of forward and backward pass for one
    token of a window of the context length.

    With M numbers in the matrices of blocks and head, L layers, H heads of width D and T positions:
    6 M + 12 L H D (T + 1) / 2, a position seeing (T + 1) / 2 others on average.
    """
    with torch.device("meta"):  # shapes alone: nothing is allocated
        size = size_of(GPT(config))
    forward = 2 * (size.block_matrices + size.head)
    return 3 * (forward + size.attended * (config.context_length + 1) / 2)


def matrix_parameters(config: GPTConfig) -> int:
    """Numbers in the matrices of all blocks."""
    with torch.device("meta"):
        return size_of(GPT(config)).block_matrices


@dataclass(frozen=True)
class Meter:
    """Turns tokens per second into a share of what the machine could do.

    flops_per_token   of the model in training
    matrix_rate       operations per second of a product of matrices in the numbers of training
    """

    flops_per_token: float
    matrix_rate: float

    @classmethod
    def measure(cls, config: GPTConfig, placement: Placement) -> "Meter":
        """Measure the machine, in some hundredths of a second; torch has been told its threads."""
        width = RATE_WIDTH if placement.device.type == "cpu" else None
        rate = matrix_rate(placement.device, placement.dtype, width)
        return cls(flops_per_token(config), rate)

    def share(self, tokens_per_second: float) -> float:
        """Model flops utilisation, 0 to 1 (above it where the machine was disturbed when it was
        measured)."""
        return tokens_per_second * self.flops_per_token / self.matrix_rate
