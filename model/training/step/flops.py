"""Flops: the operations that a training step needs, and the rate at which the machine can do them.

The count includes the matrix products of the model's definition: for every token the block
matrices, the head, and attention to the token itself and to those before it. The backward pass
counts twice the forward pass. Norms, activations, softmax, the optimizer and discarded results
(such as attention to masked positions) do not count. So the reported share of the machine's rate
measures useful work, not how busy the machine is.

A common convention (Chowdhery et al., 2022, appendix B; nanoGPT) counts attention over the whole
window instead, so it reports larger shares at long contexts.
"""

from logitd.model.device import Placement
from logitd.model.machine import matrix_rate
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.size import attention_operations, count_elements, seen_pairs

RATE_WIDTH = 512
"""Width of the square matrices with which a CPU's rate is measured. They are wide enough for the
full rate, and small enough that a product ends before another process takes the core."""


def flops_per_token(config: GPTConfig, window: int | None = None) -> float:
    """Number of operations that the forward and backward passes need for one token, in a window of
    `window` positions (default: the context length). A multiplication and an addition count as two.

    With M elements in the matrices of blocks and head, L layers, H heads of width D and T
    positions: 6 M + 12 L H D (T + 1) / 2, because a position sees (T + 1) / 2 on average. With
    sliding windows it sees fewer.
    """
    matrices = count_elements(config).block_matrices + config.vocab_size * config.d_model
    length = window or config.context_length
    attention = attention_operations(config) * seen_pairs(config, length) / length
    return 3 * (2 * matrices + attention)


def machine_rate(placement: Placement) -> float:
    """Operations per second of matrix products in the dtype of training, with torch's current
    number of threads. Measuring takes a few hundredths of a second, or two seconds if torch has no
    fast products of the dtype (bfloat16 on AVX2)."""
    width = RATE_WIDTH if placement.device.type == "cpu" else None
    return matrix_rate(placement.device, placement.dtype, width)
