"""GPT-NeoX and Pythia in Hugging Face folders: shape and weights, in this project's terms.

Query, key and value are one matrix there, head by head: (n_head, 3, head_dim) rows. A part of each
head turns, whose channels are brought into the order that they have here (`rope.py`). Both kinds of
residuals, tied and untied heads; and the way back, for an export.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, Settings, StateDictReader
from logitd.model.convert.hf.activation import activation_name, read_activation
from logitd.model.convert.hf.rope import half_split, read_rope, rope_parameters
from logitd.model.transformer.config import GPTConfig, gpt2_shape
from logitd.model.transformer.gpt import GPT

PREFIX = "gpt_neox."
"""Of everything but the head, in a model that has one."""


def read_neox(settings: Settings, reader: StateDictReader) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The model without its head. Raises ConvertError and ConfigError."""
    width, n_head = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if width % n_head:
        raise ConvertError(
            f"hidden_size {width} is not divisible by num_attention_heads {n_head}: the heads of "
            "GPT-NeoX share the width equally"
        )
    context = settings.integer("max_position_embeddings", default=2048)
    rope = read_rope(
        settings,
        head_dim=width // n_head,
        context_length=context,
        theta="rotary_emb_base",
        share="rotary_pct",
        default_share=0.25,
    )
    config = gpt2_shape(
        vocab_size=settings.integer("vocab_size"),
        context_length=context,
        n_layer=settings.integer("num_hidden_layers"),
        n_head=n_head,
        d_model=width,
        d_ff=settings.integer("intermediate_size"),
        norm_eps=settings.number("layer_norm_eps", 1e-5),
        positions="rotary",
        activation=read_activation(settings, "hidden_act", "gelu"),
        residual="parallel" if settings.flag("use_parallel_residual", True) else "sequential",
        qkv_bias=settings.flag("attention_bias", True),
        tied_head=settings.flag("tie_word_embeddings", False),
        **rope,
    )
    reader.ignore(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    return config, _weights(reader, config)


def _weights(reader: StateDictReader, config: GPTConfig) -> dict[str, Tensor]:
    prefix = "" if "embed_in.weight" in reader else PREFIX
    weights = {
        "token_embedding.weight": reader.take(
            f"{prefix}embed_in.weight", config.vocab_size, config.d_model
        )
    }
    for module in _modules(config, attention_bias=config.qkv_bias):
        name = f"{prefix}{module.theirs}"
        weights[f"{module.here}.weight"] = reader.take(f"{name}.weight", *module.shape)
        if module.biased:
            weights[f"{module.here}.bias"] = reader.take(f"{name}.bias", module.shape[0])
    return {
        name: apart(tensor, config) if ".qkv." in name else tensor
        for name, tensor in weights.items()
    }


def neox_config(config: GPTConfig) -> dict[str, Any]:
    """The keys that are GPT-NeoX's own."""
    rope = rope_parameters(config)
    return {
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.residual == "parallel",
        "attention_bias": attention_bias(config),
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), config.dropout),
        # The old form and the new one.
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": config.rope_theta,
        "rope_parameters": rope,
    }


def attention_bias(config: GPTConfig) -> bool:
    """Whether all matrices of attention get a bias there: where one of them has it here."""
    return config.bias or config.qkv_bias


def neox_weights(gpt: GPT) -> dict[str, Tensor]:
    """The weights by GPT-NeoX's names, without padded rows; biases that there are not are zeros."""
    config, state = gpt.config, gpt.state_dict()
    weights = {f"{PREFIX}embed_in.weight": state["token_embedding.weight"][: config.vocab_size]}
    if not config.tied_head:
        weights["embed_out.weight"] = state["head.weight"][: config.vocab_size]
    for module in _modules(config, attention_bias=attention_bias(config)):
        weight = state[f"{module.here}.weight"]
        bias = state.get(f"{module.here}.bias", weight.new_zeros(len(weight)))
        if module.here.endswith("qkv"):
            weight, bias = together(weight, config), together(bias, config)
        weights[f"{PREFIX}{module.theirs}.weight"] = weight
        if module.biased:
            weights[f"{PREFIX}{module.theirs}.bias"] = bias
    return weights


@dataclass(frozen=True)
class _Module:
    """A norm or a matrix by its two names, with the shape of its weights there."""

    theirs: str
    here: str
    shape: tuple[int, ...]
    biased: bool = True


def _modules(config: GPTConfig, *, attention_bias: bool) -> Iterator[_Module]:
    width, hidden, biased = config.d_model, config.d_ff, attention_bias
    yield _Module("final_layer_norm", "final_norm", (width,))
    for layer in range(config.n_layer):
        theirs, here = f"layers.{layer}", f"blocks.{layer}"
        yield _Module(f"{theirs}.input_layernorm", f"{here}.attention_norm", (width,))
        yield _Module(f"{theirs}.post_attention_layernorm", f"{here}.mlp_norm", (width,))
        qkv = f"{theirs}.attention.query_key_value"
        yield _Module(qkv, f"{here}.qkv", (3 * width, width), biased)
        yield _Module(f"{theirs}.attention.dense", f"{here}.attention_out", (width, width), biased)
        yield _Module(f"{theirs}.mlp.dense_h_to_4h", f"{here}.mlp_up", (hidden, width))
        yield _Module(f"{theirs}.mlp.dense_4h_to_h", f"{here}.mlp_down", (width, hidden))


def apart(rows: Tensor, config: GPTConfig) -> Tensor:
    """Rows (3 * C, ...) of all heads' queries, then keys, then values, of rows head by head."""
    heads = rows.view(config.n_head, 3, config.head_dim, *rows.shape[1:])  # (H, 3, D, ...)
    query, key, value = heads.unbind(dim=1)
    order = half_split(config.head_dim, config.rotary_dim)
    return torch.cat((query[:, order], key[:, order], value)).reshape(rows.shape)


def together(rows: Tensor, config: GPTConfig) -> Tensor:
    """The way back from `apart`."""
    parts = rows.view(3, config.n_head, config.head_dim, *rows.shape[1:])  # (3, H, D, ...)
    order = torch.tensor(half_split(config.head_dim, config.rotary_dim)).argsort()
    query, key, value = parts[0][:, order], parts[1][:, order], parts[2]
    return torch.stack((query, key, value), dim=1).reshape(rows.shape)
