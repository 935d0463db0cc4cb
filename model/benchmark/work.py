"""Work: lower bounds on the bytes that a step reads and on the matrix products that it computes.

Divided by the peak rates of the machine (`model/machine.py`), they give lower bounds on the
duration of the step. Norms, activations, softmax and sampling are small and not counted. A decode
step reads every weight once, and the keys and values of all positions that are attended to. Only
the embedding rows that are looked up are counted, and the head is counted without its padding. A
prefill computes the head only for the last position of each prompt. A model that fits into the
processor's caches can be faster than the bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from logitd.model.inference.memory import SCALE_BYTES
from logitd.model.inference.options import KVCacheDType, Quantization, head_quantization
from logitd.model.machine import Machine
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import (
    attention_operations,
    count_elements,
    seen_pairs,
    seen_positions,
)

MATRIX_BYTES: Mapping[Quantization, float] = {"int8": 1, "int4": 4.5 / 8}
"""Bytes per element of a quantized matrix; int4 also stores a one-byte scale for every sixteen
elements."""
QUANTIZED_ROW_BYTES = 8
"""Bytes per row of a quantized matrix, for the row's scale and sum."""


@dataclass(frozen=True, slots=True)
class Work:
    """The number of bytes to read, and the number of operations in matrix products. `operations` is
    None for int8 and int4, because the machine's rate for them is not measured."""

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
    """The work of a decode step of `batch` sequences of the same length, which attend to
    `live_positions` positions in total, including the new ones. `kept` is the dtype of the KV
    cache. Compressed weights are counted at their uncompressed size."""
    config, elements = gpt.config, count_elements(gpt.config)
    item = gpt.token_embedding.weight.element_size()
    cell = 1 + SCALE_BYTES / config.head_dim if kept == "int8" else item
    head = config.vocab_size * config.d_model
    read = _matrix_bytes(elements.block_matrices, elements.block_rows, item, quantize)
    read += _matrix_bytes(head, config.vocab_size, item, head_quantization(quantize))
    read += (_vectors(gpt) + elements.looked_up * batch) * item
    seen = batch * seen_positions(config, live_positions / batch)
    return Work(
        read_bytes=read + 2 * config.kv_width * seen * cell,
        operations=2 * (elements.block_matrices + head) * batch
        + attention_operations(config) * seen
        if quantize == "none"
        else None,
    )


def prefill_work(gpt: GPT, *, prompts: int, length: int) -> Work:
    """The work of a prefill of `prompts` prompts of `length` tokens each, including the logits at
    the last position of each prompt. Quantization does not matter, because a prefill computes in
    the model's own dtype."""
    config, elements = gpt.config, count_elements(gpt.config)
    head = config.vocab_size * config.d_model
    read = elements.block_matrices + head + _vectors(gpt) + elements.looked_up * prompts * length
    operations = 2 * elements.block_matrices * length + 2 * head
    operations += attention_operations(config) * seen_pairs(config, length)
    item = gpt.token_embedding.weight.element_size()
    return Work(read_bytes=read * item, operations=prompts * operations)


def limit(work: Work, machine: Machine) -> tuple[float, str]:
    """The shortest possible time in seconds for some work, and what limits it: "memory" or "matrix
    products". Reading and multiplying can overlap, so the longer of the two times is the limit."""
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
