"""A GPT-2 or a Llama in llama.cpp's file format, written by the `gguf` package.

Matrices are in float32, bfloat16 or q8_0 (blocks of 32 bytes with a scale each); norms, biases and
positions are in float32, as in llama.cpp's own converter. llama.cpp itself converts float32 to q4_0
(`llama_cpp_batch.py`). The vocabulary is a placeholder of the right size with one word per id:
nothing is ever tokenized.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.weights import NORM_EPS, ROPE_THETA, Tensors
from benchmarks.shapes import Shape

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}

NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
}

PARTS = {
    "attention_norm": "attn_norm",
    "qkv": "attn_qkv",
    "attention_out": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp_up": "ffn_up",
    "mlp_down": "ffn_down",
}


def write_gguf(path: Path, shape: Shape, tensors: Tensors, dtype: str) -> None:
    writer = gguf.GGUFWriter(str(path), shape.family)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.d_model)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    if shape.family == "llama":
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_layer_norm_rms_eps(NORM_EPS)
        writer.add_rope_freq_base(ROPE_THETA)
        writer.add_rope_dimension_count(shape.d_model // shape.n_head)
    else:
        writer.add_layer_norm_eps(NORM_EPS)
    add_vocabulary(writer, shape.vocab_size)
    for name, value in named(shape, tensors):
        matrix = value.ndim == 2 and not name.startswith("position")
        kind = TYPES[dtype] if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])  # the list must not be empty
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)


def named(shape: Shape, tensors: Tensors) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each tensor with llama.cpp's name. A Llama has separate matrices for queries, keys,
    values, gate and up, and channels that rotate together are adjacent."""
    for name, value in tensors.items():
        if shape.family == "llama" and name.endswith(".qkv.weight"):
            block = f"blk.{name.split('.')[1]}"
            heads = (shape.n_head, shape.kv_heads)
            width = shape.d_model // shape.n_head
            ends = np.cumsum([count * width for count in heads])
            query, key, whole = np.split(value, ends)
            yield f"{block}.attn_q.weight", neighbors(query, shape.n_head)
            yield f"{block}.attn_k.weight", neighbors(key, shape.kv_heads)
            yield f"{block}.attn_v.weight", whole
        elif shape.family == "llama" and name.endswith(".mlp_up.weight"):
            block = f"blk.{name.split('.')[1]}"
            gate, up = np.split(value, 2)
            yield f"{block}.ffn_gate.weight", gate
            yield f"{block}.ffn_up.weight", up
        else:
            yield gguf_name(name), value


def neighbors(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows (heads * D, d_model) so that channels that rotate together are adjacent. In the
    original order, they are in separate halves of a head."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """Convert `blocks.3.qkv.bias` to llama.cpp's `blk.3.attn_qkv.bias`."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}"
