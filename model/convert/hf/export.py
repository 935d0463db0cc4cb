"""Export of a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` can read.

The files are `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
`tokenizer_config.json`. transformers is not needed to write them. `hf/config.py` reads the same
names, layouts and defaults. Sinusoidal positions are exported as GPT-2's learned positions, which
are also added to the embedding. A vocabulary of whole words becomes a WordLevel tokenizer. For a
model without a vocabulary, no tokenizer is written.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.weights_file import write_weights as write_file
from logitd.model.convert import layouts
from logitd.model.convert.family import GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3
from logitd.model.convert.foreign import FLOATS
from logitd.model.convert.hf.added import GENERATION
from logitd.model.convert.hf.config import activation_name
from logitd.model.convert.hf.dialect import to_oniguruma
from logitd.model.convert.hf.folder import CONFIG, WEIGHTS
from logitd.model.convert.hf.merges import merges_of, written
from logitd.model.convert.hf.rope import rope_parameters
from logitd.model.convert.hf.special_tokens import TOKENIZER_CONFIG
from logitd.model.convert.hf.tokenizer import TOKENIZER
from logitd.model.convert.layouts import NORMS, Layout, write_sizes, write_weights
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT


def write_folder(
    folder: Path, info: CheckpointInfo, gpt: GPT, family: str, log: Callable[[str], None]
) -> None:
    """Write the files into an empty folder. `log` is called with notes for the user. Raises
    ConvertError and OSError."""
    tokenizer = info.tokenizer
    name, layout, shape = FAMILIES[family]
    config = write_sizes(info.config, layout) | shape(info.config)
    weights = write_weights(gpt, layout, biased=biased_parts(info.config, family))
    dtype = next(iter(weights.values())).dtype
    end = tokenizer.ends[0] if len(tokenizer.ends) == 1 else [*tokenizer.ends] or None
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": end}
    config |= {
        "architectures": [name],
        "model_type": family,
        "vocab_size": info.config.vocab_size,
        "tie_word_embeddings": info.config.tied_head,
        "torch_dtype": FLOATS[dtype],
        **ends,
    }
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION, ends)
    if tokenizer.has_text:
        _write_json(folder / TOKENIZER, tokenizer_document(tokenizer))
        _write_json(folder / TOKENIZER_CONFIG, _tokenizer_config(info))
    else:
        log("no tokenizer is written, because the model has no vocabulary, only token ids")
    write_file(folder / WEIGHTS, weights, {"format": "pt"})
    if len(tokenizer.tokens) < len(tokenizer.ranks):
        log(
            f"{len(tokenizer.ranks) - len(tokenizer.tokens)} of the 256 bytes are not tokens: "
            "logitd refuses a text that needs one, but transformers drops those characters silently"
        )


def biased_parts(config: GPTConfig, family: str) -> set[str]:
    """The parts that have a bias in the exported architecture, even if all values of the bias are
    zero."""
    if family == QWEN2:
        return {"qkv"}
    attention = config.bias or config.qkv_bias
    parts = {"qkv", "attention_out"} if attention or family == GPT2 else set()
    if family in (GPT2, GPT_NEOX):
        return parts | {"mlp_up", "mlp_down", *NORMS}
    return parts | ({"mlp_up", "mlp_down"} if config.bias else set())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "activation_function": activation_name(config.activation),
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
    }


def _neox_config(config: GPTConfig) -> dict[str, Any]:
    rope = rope_parameters(config)
    return {
        "hidden_act": activation_name(config.activation),
        "use_parallel_residual": config.residual == "parallel",
        "attention_bias": config.bias or config.qkv_bias,
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), config.dropout),
        # The old form and the new one.
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": config.rope_theta,
        **_rope_of_both_forms(config, rope),
    }


def _llama_config(config: GPTConfig, **more: Any) -> dict[str, Any]:
    rope = rope_parameters(config)
    del rope["partial_rotary_factor"]  # whole heads
    return {
        "hidden_act": "silu",
        "attention_dropout": config.dropout,
        # The old form and the new one.
        "rope_theta": config.rope_theta,
        **_rope_of_both_forms(config, rope),
        **more,
    }


def _rope_of_both_forms(config: GPTConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for transformers 5, and `rope_scaling`, which earlier versions read."""
    if config.rope_scaling is None:
        return {"rope_parameters": rope}
    inside = ("rope_theta", "partial_rotary_factor")  # only in the new form
    scaling = {key: value for key, value in rope.items() if key not in inside}
    return {"rope_parameters": rope, "rope_scaling": scaling}


FAMILIES: Mapping[str, tuple[str, Layout, Callable[[GPTConfig], dict[str, Any]]]] = {
    GPT2: ("GPT2LMHeadModel", layouts.GPT2, _gpt2_config),
    GPT_NEOX: ("GPTNeoXForCausalLM", layouts.NEOX, _neox_config),
    LLAMA: (
        "LlamaForCausalLM",
        layouts.LLAMA,
        lambda c: _llama_config(c, attention_bias=c.bias or c.qkv_bias, mlp_bias=c.bias),
    ),
    QWEN2: ("Qwen2ForCausalLM", layouts.LLAMA, partial(_llama_config, use_sliding_window=False)),
    QWEN3: (
        "Qwen3ForCausalLM",
        layouts.LLAMA,
        lambda c: _llama_config(c, use_sliding_window=False, attention_bias=c.qkv_bias),
    ),
}
"""For each architecture: the class in transformers, the layout, and further configuration keys."""


def tokenizer_document(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of a `tokenizer.json` that encodes texts as `tokenizer` does (see `merges.py`).
    `exportable.py` must have no objections."""
    named = tokenizer.special_tokens | tokenizer.added_tokens
    parts = _merged_parts(tokenizer) if tokenizer.kind == "bpe" else _word_parts(tokenizer)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(tokenizer, text, token_id)
            for text, token_id in sorted(named.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "post_processor": None,
        **parts,
    }


def _added_token(tokenizer: Tokenizer, text: str, token_id: int) -> dict[str, Any]:
    special, flags = text in tokenizer.special_tokens, tokenizer.added_flags.get(text, ())
    return {
        "id": token_id,
        "content": text,
        **{flag: flag in flags for flag in ("single_word", "lstrip", "rstrip")},
        "normalized": "normalized" in flags or not (special or "unnormalized" in flags),
        "special": special,
    }


def _merged_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    merges, _ = merges_of(tokenizer.tokens)
    named = {written(token): rank for token, rank in tokenizer.tokens.items()}
    return {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [_split(tokenizer), _byte_level(with_regex=False)],
        },
        "decoder": _byte_level(with_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # whole pieces are looked up first, as in tiktoken
            "vocab": _by_id(named | _between(tokenizer)),
            "merges": [list(map(written, pair)) for pair in merges],
        },
    }


def _byte_level(*, with_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": with_regex,
        "trim_offsets": True,
        "use_regex": with_regex,
    }


def _word_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    """The pre-tokenizer, decoder and model for a vocabulary of whole words. Without a decoder,
    words are joined with spaces."""
    spaced = tokenizer.kind == "words"
    words = {token.decode(): rank for token, rank in tokenizer.tokens.items()}
    if spaced:
        words = {word.removeprefix(" "): rank for word, rank in words.items()}
    return {
        "pre_tokenizer": _split(tokenizer),
        "decoder": None if spaced else {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": _by_id(words | _between(tokenizer)),
            "unk_token": "",  # not a token, so that an unknown word is an error, as here
        },
    }


def _split(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": to_oniguruma(tokenizer.pattern)},
        "behavior": "Removed",
        "invert": True,
    }


def _between(tokenizer: Tokenizer) -> dict[str, int]:
    """Added tokens with ids between the ids of ordinary tokens. They must be listed in the
    vocabulary, because the tokenizers library gives all other added tokens ids after the end of the
    vocabulary."""
    ordinary = set(tokenizer.tokens.values())
    named = tokenizer.special_tokens | tokenizer.added_tokens
    return {name: i for name, i in named.items() if i < max(ordinary) and i not in ordinary}


def _by_id(vocabulary: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def _tokenizer_config(info: CheckpointInfo) -> dict[str, Any]:
    tokenizer, template = info.tokenizer, info.chat_template
    document: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": info.config.context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    if tokenizer.end_of_text is not None:
        name = tokenizer.end_of_text_name
        document |= {"bos_token": name, "eos_token": name}
    if template is not None:
        document["chat_template"] = template.source
    return document
