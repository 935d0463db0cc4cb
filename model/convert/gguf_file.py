"""GGUF, llama.cpp's file format, by the `gguf` package (the extra `gguf`).

Matrices in the dtype of the checkpoint, norms, biases and positions in float32, as llama.cpp's
own converter writes them, with the vocabulary as byte-level BPE.

How a text is cut before merging is code there, by a name. A pattern that none of these names stands
for is refused, unless a name is given: ids of texts then differ in places, those of tokens do not.
What else is refused stands in `exportable.py`. Quantizing is llama.cpp's own business
(`llama-quantize`).
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.convert.exportable import PRE_TOKENIZERS
from logitd.model.convert.family import GPT2, LLAMA, QWEN2, QWEN3
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.export import biased_parts
from logitd.model.convert.hf.merges import byte_characters, merges_of, written
from logitd.model.convert.layouts import GGUF_GPT2, GGUF_LLAMA, GGUF_QWEN, write_weights
from logitd.model.extras import installation
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT

LAYOUTS = {GPT2: GGUF_GPT2, LLAMA: GGUF_LLAMA, QWEN2: GGUF_QWEN, QWEN3: GGUF_QWEN}


def write_gguf(path: Path, info: CheckpointInfo, gpt: GPT, family: str, pre: str | None) -> None:
    """Write the model, to which there are no objections, as a GGUF file. `pre` is llama.cpp's name
    of how texts are cut, where no name stands for the checkpoint's pattern. Raises ConvertError and
    OSError."""
    try:
        import gguf
    except ImportError as error:
        raise ConvertError(
            f"writing GGUF needs the package gguf, which is not installed: {installation('gguf')}"
        ) from error
    config = info.config
    cut = pre or PRE_TOKENIZERS[info.tokenizer.pattern]
    merges = _merges(info.tokenizer)
    weights = write_weights(gpt, LAYOUTS[family], biased=biased_parts(config, family))
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_name(info.name)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_head)
    writer.add_vocab_size(config.vocab_size)
    if family == GPT2:
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(config.n_kv_head)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _add_vocabulary(writer, gguf, info, cut, merges)
    kind = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
        torch.float16: gguf.GGMLQuantizationType.F16,
    }[next(iter(weights.values())).dtype]
    writer.add_file_type(
        {"F32": gguf.LlamaFileType.ALL_F32, "BF16": gguf.LlamaFileType.MOSTLY_BF16}.get(
            kind.name, gguf.LlamaFileType.MOSTLY_F16
        )
    )
    for name, tensor in weights.items():
        matrix = tensor.dim() == 2 and not name.startswith("position_embd")
        stored = kind if matrix else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(tensor.float().numpy(), stored)
        writer.add_tensor(name, values, raw_dtype=stored)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _merges(tokenizer: Tokenizer) -> list[str]:
    """The merges, as lines."""
    merges, _ = merges_of(tokenizer.ranks)
    characters = byte_characters()
    return [" ".join(written(part, characters) for part in pair) for pair in merges]


def _add_vocabulary(
    writer: Any, gguf: Any, info: CheckpointInfo, cut: str, merges: list[str]
) -> None:
    tokenizer, characters = info.tokenizer, byte_characters()
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    apart = {token_id: text for text, token_id in tokenizer.added_tokens.items()}
    tokens, types = [], []
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        if token_id in names:
            tokens.append(names[token_id])
            types.append(gguf.TokenType.CONTROL)
        elif token_id in apart:
            tokens.append(apart[token_id])
            types.append(gguf.TokenType.USER_DEFINED)
        elif raw:
            tokens.append(written(raw, characters))
            types.append(gguf.TokenType.NORMAL)
        else:
            tokens.append(f"[PAD{token_id}]")
            types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if tokenizer.end_of_text is not None:
        writer.add_bos_token_id(tokenizer.end_of_text)
    ends = writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id
    for add, end in zip(ends, tokenizer.ends, strict=False):
        add(end)
    if info.chat_template is not None:
        writer.add_chat_template(info.chat_template.source)
