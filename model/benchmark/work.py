"""Work: what a decode step and a prefill have to read and to multiply at least, whoever does it.

With what the machine can do at best (`model/benchmark/machine.py`) that gives the time below which
they cannot come. What is left out is small, and the limit the kinder for it: norms, activations,
softmax, sampling, and the writing of results.

Decode reads every weight once a step, and the keys and values of every position that is attended
to. Of an embedding it reads the rows that are looked up, of a head the rows of the vocabulary
without its padding. A prefill computes the head for the last position of a prompt alone, and
attention only over the positions that each one sees.

A limit by memory holds where memory is read: a model that fits into the processor's caches can be
faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from logitd.model.benchmark.machine import Machine
from logitd.model.inference.memory import SCALE_BYTES
from logitd.model.inference.options import KVCacheDType, Quantization, head_quantization
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import attention_operations, count_elements

MATRIX_BYTES: Mapping[Quantization, float] = {"int8": 1, "int4": 4.5 / 8}
"""Of an element of a quantized matrix: int4's have a byte besides for every sixteen."""
QUANTIZED_ROW_BYTES = 8
"""A row of quantized weights has a scale and a sum besides."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a GPT one forward touches, counted in numbers, not bytes.

    block_matrices   elements of the matrices of all blocks; block_rows their rows
    head, head_rows  the same of the head, tied or not, without padding
    vectors          norms and biases, the head's without padding
    looked_up        elements of the embedding rows of one token
    kv_width         keys and values of one position in all layers
    attended         multiplications and additions by one query that sees one position, all layers
    item_bytes       of one number
    cell_bytes       of one number of keys and values, with its part of a scale
    """

    block_matrices: int
    block_rows: int
    head: int
    head_rows: int
    vectors: int
    looked_up: int
    kv_width: int
    attended: int
    item_bytes: int
    cell_bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and operations of matrix products; None where the machine's rate for such
    products was not measured (int8, int4)."""

    read_bytes: float
    operations: float | None


@dataclass(frozen=True, slots=True)
class Limit:
    """The least seconds that work can take, and what sets them."""

    seconds: float
    by: Literal["memory", "matrix products"]


def size_of(gpt: GPT, kept: KVCacheDType = "auto") -> ModelSize:
    """`kept`: what keys and values are kept in."""
    config, item_bytes = gpt.config, gpt.token_embedding.weight.element_size()
    elements = count_elements(config)
    return ModelSize(
        block_matrices=elements.block_matrices,
        block_rows=elements.block_rows,
        head=config.vocab_size * config.d_model,
        head_rows=config.vocab_size,
        vectors=elements.vectors - unread_bias(config),
        looked_up=elements.looked_up,
        kv_width=2 * config.n_layer * config.kv_width,
        attended=attention_operations(config),
        item_bytes=item_bytes,
        cell_bytes=1 + SCALE_BYTES / config.head_dim if kept == "int8" else item_bytes,
    )


def unread_bias(config: GPTConfig) -> int:
    """Elements of the head's bias that are padding."""
    return (config.padded_vocab_size - config.vocab_size) * config.head_bias


def decode_work(
    size: ModelSize, *, batch: int, live_positions: float, quantize: Quantization = "none"
) -> Work:
    """One step of `batch` sequences that attend over `live_positions` together, their new ones
    included. Weights count as many bytes as their dtype has, also where they are compressed."""
    matrices, item = size.block_matrices + size.head, size.item_bytes
    read = matrix_bytes(size.block_matrices, size.block_rows, item, quantize)
    read += matrix_bytes(size.head, size.head_rows, item, head_quantization(quantize))
    read += (size.vectors + size.looked_up * batch) * item
    operations = 2 * matrices * batch + size.attended * live_positions
    return Work(
        read_bytes=read + size.kv_width * live_positions * size.cell_bytes,
        operations=operations if quantize == "none" else None,
    )


def matrix_bytes(elements: int, rows: int, item_bytes: int, quantize: Quantization) -> float:
    """What matrices take, in elements of `item_bytes` or quantized."""
    if quantize == "none":
        return elements * item_bytes
    return elements * MATRIX_BYTES[quantize] + QUANTIZED_ROW_BYTES * rows


def prefill_work(size: ModelSize, *, prompts: int, length: int) -> Work:
    """As many prompts of this length, up to the logits that follow each. Quantization is for decode
    steps;
    a prefill computes in the model's own dtype."""
    seen = length * (length + 1) // 2  # by the first position one, by the last all
    read = size.block_matrices + size.head + size.vectors + size.looked_up * prompts * length
    operations = 2 * size.block_matrices * length + 2 * size.head + size.attended * seen
    return Work(read_bytes=read * size.item_bytes, operations=prompts * operations)


def limit(work: Work, machine: Machine) -> Limit:
    """Reading and multiplying can overlap: the longer of the two is the limit."""
    reading = Limit(work.read_bytes / machine.read_bandwidth, "memory")
    if work.operations is None:
        return reading
    multiplying = Limit(work.operations / machine.matrix_rate, "matrix products")
    return max(reading, multiplying, key=lambda bound: bound.seconds)
