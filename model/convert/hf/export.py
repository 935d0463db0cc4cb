"""A Hugging Face folder: what `AutoModelForCausalLM` and `AutoTokenizer` read.

`config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
`tokenizer_config.json`, written without transformers. Names, layouts and defaults are those that
`hf/config.py` reads. Sinusoidal positions become GPT-2's learned ones: they are added alike. A
vocabulary of whole words becomes a WordLevel one, and a model of token ids alone gets no tokenizer.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.weights_file import write_weights
from logitd.model.convert.family import GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3
from logitd.model.convert.foreign import FLOATS, ConvertError
from logitd.model.convert.hf.activation import activation_name
from logitd.model.convert.hf.config import CONFIG, WEIGHTS
from logitd.model.convert.hf.dialect import to_oniguruma
from logitd.model.convert.hf.merges import byte_characters, merges_of, written
from logitd.model.convert.hf.neox import neox_config, neox_weights
from logitd.model.convert.hf.rope import rope_parameters
from logitd.model.convert.hf.tokenizer import TOKENIZER, TOKENIZER_CONFIG
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

CLASSES = {
    GPT2: "GPT2LMHeadModel",
    GPT_NEOX: "GPTNeoXForCausalLM",
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
}


def write_folder(
    folder: Path, info: CheckpointInfo, gpt: GPT, family: str, log: Callable[[str], None]
) -> None:
    """Write the files into an empty folder. Raises ConvertError and OSError."""
    tokenizer = info.tokenizer
    config, weights = _family(gpt, family)
    dtype = next(iter(weights.values())).dtype
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    config |= {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": info.config.vocab_size,
        "tie_word_embeddings": info.config.tied_head,
        "torch_dtype": FLOATS[dtype],
        **ends,
    }
    _write_json(folder / CONFIG, config)
    _write_json(folder / "generation_config.json", ends)
    if tokenizer.has_text:
        _write_json(folder / TOKENIZER, tokenizer_document(tokenizer))
        _write_json(folder / TOKENIZER_CONFIG, _tokenizer_config(info))
    else:
        log("there is no vocabulary, so no tokenizer is written: the model takes token ids alone")
    write_weights(folder / WEIGHTS, weights, {"format": "pt"})
    if len(tokenizer.tokens) < len(tokenizer.ranks):
        log(
            f"{len(tokenizer.ranks) - len(tokenizer.tokens)} of the 256 bytes are not tokens: a "
            "text that needs one is refused here, and loses those characters there without a word"
        )


def _family(gpt: GPT, family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an architecture's configuration says of the shape, and the weights by its names."""
    if family == GPT2:
        return _gpt2_config(gpt.config), gpt_weights(gpt)
    if family == GPT_NEOX:
        return neox_config(gpt.config), _own(neox_weights(gpt))
    return _rotary_config(gpt.config, family), rotary_weights(gpt, family)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.d_ff,
        "activation_function": activation_name(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
    }


def _rotary_config(config: GPTConfig, family: str) -> dict[str, Any]:
    rope = rope_parameters(config)
    del rope["partial_rotary_factor"]  # whole heads
    shape = {
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        # The old form and the new one.
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
    }
    if config.rope_scaling is not None:
        shape["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    if family == QWEN2:
        return {**shape, "use_sliding_window": False}
    if family == QWEN3:
        return {**shape, "use_sliding_window": False, "attention_bias": config.qkv_bias}
    biased = config.bias or config.qkv_bias
    return {**shape, "attention_bias": biased, "mlp_bias": config.bias}


def gpt_weights(gpt: GPT) -> dict[str, Tensor]:
    """The weights by GPT-2's names, its matrices (in, out), without padded rows."""
    config, state = gpt.config, gpt.state_dict()
    rows, width = config.vocab_size, config.d_model
    positions = state.get("position_embedding.weight")
    if positions is None:
        positions = gpt.sinusoids.to(state["token_embedding.weight"].dtype)
    weights = {
        "transformer.wte.weight": state["token_embedding.weight"][:rows],
        "transformer.wpe.weight": positions,
    }
    names = {"final_norm": ("transformer.ln_f", width)}
    for layer in range(config.n_layer):
        here, target = f"blocks.{layer}", f"transformer.h.{layer}"
        names |= {
            f"{here}.attention_norm": (f"{target}.ln_1", width),
            f"{here}.qkv": (f"{target}.attn.c_attn", config.qkv_width),
            f"{here}.attention_out": (f"{target}.attn.c_proj", width),
            f"{here}.mlp_norm": (f"{target}.ln_2", width),
            f"{here}.mlp_up": (f"{target}.mlp.c_fc", config.d_ff),
            f"{here}.mlp_down": (f"{target}.mlp.c_proj", width),
        }
    for ours, (theirs, size) in names.items():
        weight = state[f"{ours}.weight"]
        weights[f"{theirs}.weight"] = weight.T if weight.dim() == 2 else weight
        weights[f"{theirs}.bias"] = state.get(f"{ours}.bias", weight.new_zeros(size))
    if not config.tied_head:
        weights["lm_head.weight"] = state["head.weight"][:rows]
    return _own(weights)


def rotary_weights(gpt: GPT, family: str) -> dict[str, Tensor]:
    """The weights by Llama's names, without padded rows."""
    config, state = gpt.config, gpt.state_dict()
    rows = config.vocab_size
    attention_biased = (config.bias or config.qkv_bias) and family in (LLAMA, QWEN3)
    sizes = [config.n_head * config.head_dim, config.kv_width, config.kv_width]
    weights = {
        "model.embed_tokens.weight": state["token_embedding.weight"][:rows],
        "model.norm.weight": state["final_norm.weight"],
    }
    if not config.tied_head:
        weights["lm_head.weight"] = state["head.weight"][:rows]
    for layer in range(config.n_layer):
        here, target = f"blocks.{layer}", f"model.layers.{layer}"
        weights |= {
            f"{target}.input_layernorm.weight": state[f"{here}.attention_norm.weight"],
            f"{target}.post_attention_layernorm.weight": state[f"{here}.mlp_norm.weight"],
        }
        if config.qk_norm:
            weights |= {
                f"{target}.self_attn.q_norm.weight": state[f"{here}.query_norm.weight"],
                f"{target}.self_attn.k_norm.weight": state[f"{here}.key_norm.weight"],
            }
        for ours, theirs, parts, biased in (
            ("qkv", [f"self_attn.{part}_proj" for part in "qkv"], sizes,
             attention_biased or family == QWEN2),
            ("attention_out", ["self_attn.o_proj"], [config.d_model], attention_biased),
            ("mlp_up", ["mlp.gate_proj", "mlp.up_proj"], [config.d_ff] * 2, config.bias),
            ("mlp_down", ["mlp.down_proj"], [config.d_model], config.bias),
        ):  # fmt: skip
            weight = state[f"{here}.{ours}.weight"]
            for name, part in zip(theirs, weight.split(parts), strict=True):
                weights[f"{target}.{name}.weight"] = part
            if biased:
                bias = state.get(f"{here}.{ours}.bias", weight.new_zeros(len(weight)))
                for name, part in zip(theirs, bias.split(parts), strict=True):
                    weights[f"{target}.{name}.bias"] = part
    return _own(weights)


def _own(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own, as safetensors needs them."""
    return {name: torch.clone(t, memory_format=torch.contiguous_format)
            for name, t in weights.items()}  # fmt: skip


def tokenizer_document(tokenizer: Tokenizer) -> dict[str, Any]:
    """A `tokenizer.json` that encodes as `tokenizer` does (`merges.py` says why). Raises
    ConvertError where its pattern cannot be written for the other engine."""
    ranks = tokenizer.tokens
    if tokenizer.vocab_size != len(ranks) + len(tokenizer.special_tokens):
        raise ConvertError(
            "the vocabulary has ids without a token between its special tokens; Hugging Face's "
            "tokenizers have none"
        )
    parts = _merged_parts(tokenizer) if tokenizer.kind == "bpe" else _word_parts(tokenizer)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, token_id in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "post_processor": None,
        **parts,
    }


def _merged_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    """How byte pairs are cut, merged and joined."""
    characters = byte_characters()
    merges, _ = merges_of(tokenizer.tokens)
    named = {written(token, characters): rank for token, rank in tokenizer.tokens.items()}
    return {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                _split(tokenizer),
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # what is a token as a whole is looked up, as tiktoken does
            "vocab": _by_id(named | _between(tokenizer)),
            "merges": [[written(part, characters) for part in pair] for pair in merges],
        },
    }


def _word_parts(tokenizer: Tokenizer) -> dict[str, Any]:
    """How whole pieces are cut, looked up and joined: with spaces, which is what a tokenizer
    without a decoder does, or as they are."""
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
            "unk_token": "",  # which is not a token: what is unknown is an error, as here
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
    """Special tokens with ids below that of an ordinary one: a library that adds them behind the
    others takes such an id from the vocabulary."""
    last = max(tokenizer.tokens.values())
    return {name: i for name, i in tokenizer.special_tokens.items() if i < last}


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
