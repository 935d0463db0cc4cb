"""Work: lower bounds of the bytes that a step reads and of the matrix products that it computes.

The peak rates of the machine (`model/machine.py`) make a time of them. Norms, activations, softmax
and sampling are left out, because they are small. A decode step reads every weight once, and the
keys and values of every position that is attended to; of an embedding it reads the rows that are
looked up, of a head the rows without padding. A prefill computes the head for the last position of
each prompt. A model in the processor's caches can exceed the limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from logitd.model.inference.memory import SCALE_BYTES
from logitd.model.inference.options import KVCacheDType, Quantization, head_quantization
from logitd.model.machine import Machine
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import attention_operations, count_elements

MATRIX_BYTES: Mapping[Quantization, float] = {"int8": 1, "int4": 4.5 / 8}
"""Bytes per element of a quantized matrix; int4 has a byte of scale per sixteen elements."""
QUANTIZED_ROW_BYTES = 8
"""Bytes per row of a quantized matrix for its scale and its sum."""


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read, and operations of matrix products, None if their rate is not measured (int8
    and int4)."""

    read_bytes: float
    operations: float | None


def decode_work(
    gpt: GPT,
    *,
    batch: int,
    live_positions: float,
    quantize: Quantization = "none",
    kept: KVCacheDType = "auto",
) -> Work:
    """A step of `batch` sequences that attend to `live_positions` in total, their new ones
    included, with keys and values `kept` in a dtype. Compressed weights count the bytes of their
    dtype."""
    config, elements = gpt.config, count_elements(gpt.config)
    item = gpt.token_embedding.weight.element_size()
    cell = 1 + SCALE_BYTES / config.head_dim if kept == "int8" else item
    head = config.vocab_size * config.d_model
    read = _matrix_bytes(elements.block_matrices, elements.block_rows, item, quantize)
    read += _matrix_bytes(head, config.vocab_size, item, head_quantization(quantize))
    read += (_vectors(gpt) + elements.looked_up * batch) * item
    seen = attention_operations(config) * live_positions
    return Work(
        read_bytes=read + 2 * config.n_layer * config.kv_width * live_positions * cell,
        operations=2 * (elements.block_matrices + head) * batch + seen
        if quantize == "none"
        else None,
    )


def prefill_work(gpt: GPT, *, prompts: int, length: int) -> Work:
    """A prefill of prompts of one length, up to the logits behind each. Quantization has no effect:
    a prefill computes in the model's own dtype."""
    config, elements = gpt.config, count_elements(gpt.config)
    head = config.vocab_size * config.d_model
    read = elements.block_matrices + head + _vectors(gpt) + elements.looked_up * prompts * length
    operations = 2 * elements.block_matrices * length + 2 * head
    operations += attention_operations(config) * length * (length + 1) // 2  # pairs of positions
    item = gpt.token_embedding.weight.element_size()
    return Work(read_bytes=read * item, operations=prompts * operations)


def limit(work: Work, machine: Machine) -> tuple[float, str]:
    """The least seconds of a work, and their cause. Reading and multiplying can overlap, so the
    longer of the two is the limit."""
    limits = [(work.read_bytes / machine.read_bandwidth, "memory")]
    if work.operations is not None:
        limits.append((work.operations / machine.matrix_rate, "matrix products"))
    return max(limits)


def _vectors(gpt: GPT) -> int:
    padding = (gpt.config.padded_vocab_size - gpt.config.vocab_size) * gpt.config.head_bias
    return count_elements(gpt.config).vectors - padding


def _matrix_bytes(elements: int, rows: int, item_bytes: int, quantize: Quantization) -> float:
    if quantize == "none":
        return elements * item_bytes
    return elements * MATRIX_BYTES[quantize] + QUANTIZED_ROW_BYTES * rows
