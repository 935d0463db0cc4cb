"""GGUF: writes llama.cpp's file format with the `gguf` package (the extra `gguf`).

Matrices have the dtype of the export; norms, biases and positions are float32, as in llama.cpp's
own converter. The vocabulary is written as byte-level BPE.

llama.cpp implements split patterns in code and selects them by name. A pattern that has no name
there is refused unless the user chooses the name of another pattern; then some texts are encoded
differently. `exportable.py` lists everything else that is refused. To quantize a file, use
`llama-quantize`.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.convert.exportable import PRE_TOKENIZERS
from logitd.model.convert.family import GPT2, LLAMA
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.export import FAMILIES, biased_parts
from logitd.model.convert.hf.merges import merges_of, written
from logitd.model.convert.layouts import evens_first, write_weights
from logitd.model.extras import installation
from logitd.model.transformer.gpt import GPT


def write_gguf(path: Path, info: CheckpointInfo, gpt: GPT, family: str, pre: str | None) -> None:
    """Write a model as a GGUF file, if `exportable.py` has no objections. `pre` is the name of the
    llama.cpp pre-tokenizer; None selects it by the checkpoint's split pattern. Raises ConvertError
    and OSError."""
    try:
        import gguf
    except ImportError as error:
        raise ConvertError(
            f"writing GGUF needs the package gguf, which is not installed: {installation('gguf')}"
        ) from error
    config = info.config
    # Hugging Face's names, which the package translates. llama.cpp's "llama" rotates adjacent
    # channels, and no matrix is stored (in, out).
    channels = evens_first if family == LLAMA else None
    layout = replace(FAMILIES[family][1], transposed=False, channels=channels)
    weights = write_weights(gpt, layout, biased=biased_parts(config, family))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.n_layer)
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
    _add_vocabulary(writer, gguf, info, pre or PRE_TOKENIZERS[info.tokenizer.pattern])
    kinds, files = gguf.GGMLQuantizationType, gguf.LlamaFileType
    kind, file_type = {
        torch.float32: (kinds.F32, files.ALL_F32),
        torch.bfloat16: (kinds.BF16, files.MOSTLY_BF16),
        torch.float16: (kinds.F16, files.MOSTLY_F16),
    }[next(iter(weights.values())).dtype]
    writer.add_file_type(file_type)
    for name, tensor in weights.items():
        stored_name = names.get_name(name, (".weight", ".bias"))
        assert stored_name is not None, f"the package gguf has no name for {name}"
        matrix = tensor.dim() == 2 and not stored_name.startswith("position_embd")
        stored = kind if matrix else kinds.F32
        values = gguf.quants.quantize(tensor.float().numpy(), stored)
        writer.add_tensor(stored_name, values, raw_dtype=stored)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add_vocabulary(writer: Any, gguf: Any, info: CheckpointInfo, cut: str) -> None:
    tokenizer = info.tokenizer
    merges, _ = merges_of(tokenizer.ranks)
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
            tokens.append(written(raw))
            types.append(gguf.TokenType.NORMAL)
        else:
            tokens.append(f"[PAD{token_id}]")
            types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(map(written, pair)) for pair in merges])
    writer.add_add_bos_token(False)
    if tokenizer.end_of_text is not None:
        writer.add_bos_token_id(tokenizer.end_of_text)
    ends = writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id
    for add, end in zip(ends, tokenizer.ends, strict=False):
        add(end)
    if info.chat_template is not None:
        writer.add_chat_template(info.chat_template.source)
