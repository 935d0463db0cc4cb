"""A GPT-2 in llama.cpp's file format, by the `gguf` package.

The matrices in float32, bfloat16 or q8_0 (blocks of 32 bytes with a scale each), norms, biases and
positions in float32: what llama.cpp's own converter writes. q4_0 is made of float32 by llama.cpp
itself (`llama_cpp_batch.py`). The vocabulary is a stand-in of the
right size: nothing is ever tokenized.
"""

from pathlib import Path

import gguf

from benchmarks.peers.weights import NORM_EPS, Tensors
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
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.d_model)
    writer.add_feed_forward_length(4 * shape.d_model)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_eps(NORM_EPS)
    add_vocabulary(writer, shape.vocab_size)
    for name, value in tensors.items():
        matrix = value.ndim == 2 and not name.startswith("position")
        kind = TYPES[dtype] if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])  # the list may not be empty
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)


def gguf_name(name: str) -> str:
    """`blocks.3.qkv.bias` is `blk.3.attn_qkv.bias` there."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}"
