"""LitGPT's `lit_model.pth` with `model_config.yaml`: the shapes of Llama, GPT-NeoX and Pythia.

Query, key and value rows stand one after the other under `attn.qkv`; versions before that name have
them under `attn.attn`, interleaved by group (the queries of a group, its key, its value). Where a
part of a head turns, it is the first channels, as in GPT-NeoX (`hf/rope.py`). A head is always
stored; where it equals the embedding it is kept once. Reading YAML needs PyYAML.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, ForeignModel, Settings, StateDictReader
from logitd.model.convert.hf.rope import half_split
from logitd.model.convert.pt_file import read_pt
from logitd.model.convert.source_file import source_text
from logitd.model.extras import installation
from logitd.model.files import CONFIG_BYTES
from logitd.model.transformer.config import ConfigError, GPTConfig, gpt2_shape

WEIGHTS, CONFIG = "lit_model.pth", "model_config.yaml"

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "shared_attention_norm": (False,),
    "post_attention_norm": (False,),
    "post_mlp_norm": (False,),
    "norm_1": (True,),
    "norm_2": (True,),
    "norm_qk_type": ("default",),
    "scale_embeddings": (False,),
    "rope_condense_ratio": (1,),
    "rope_interleave": (False,),
    "rope_adjustments": (),
    "rope_local_base_freq": (),
    "rope_indices": (),
    "attention_scores_scalar": (),
    "attention_logit_softcapping": (),
    "final_logit_softcapping": (),
    "latent_attention": (),
    "n_expert": (0,),
}
"""Keys that change what is computed, each with the values that do not (besides null)."""

READ = {
    "name", "hf_config", "block_size", "n_layer", "n_embd", "vocab_size", "padding_multiple",
    "padded_vocab_size", "norm_class_name", "norm_eps", "norm_qk", "n_head", "head_size",
    "n_query_groups", "attn_bias", "sliding_window_size", "sliding_window_indices", "rope_base",
    "rotary_percentage", "intermediate_size", "bias", "mlp_class_name", "gelu_approximate",
    "rope_n_elem", "parallel_residual", "lm_head_bias",
}  # fmt: skip
"""Keys that are read, or say nothing about the computation."""


def read_litgpt(folder: Path, *, context_length: int | None) -> ForeignModel:
    """Read a checkpoint folder of LitGPT. Raises ConvertError."""
    where = str(folder / CONFIG)
    values = _read_yaml(folder / CONFIG)
    settings = Settings(where, values)
    _reject_unknown(settings, values)
    loaded = read_pt(folder / WEIGHTS, keep='{"model": state_dict}')
    state = loaded["model"] if isinstance(loaded.get("model"), dict) else loaded
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise ConvertError(f"{folder / WEIGHTS}: {name!r} is not the name of a tensor")
    tensors = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    reader = StateDictReader(str(folder / WEIGHTS), tensors, tensors.__getitem__)
    try:
        config = _config(settings, context_length)
    except ConfigError as error:
        raise ConvertError(f"{where}: {error}") from error
    weights = _weights(reader, config, settings)
    reader.finish()
    if torch.equal(weights["head.weight"], weights["token_embedding.weight"]):
        del weights["head.weight"]
        config = replace(config, tied_head=True)
    return ForeignModel(
        kind="LitGPT",
        config=config,
        weights=weights,
        dtype=reader.dtype(),
        contents={"config": values},
        facts={"name": settings.get("name", "")},
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConvertError(
            f"reading {path.name} needs PyYAML, which is not installed: {installation('litgpt')}"
        ) from error
    if not path.exists():
        raise ConvertError(f"{path} does not exist; it says what {WEIGHTS} is")
    try:
        values = yaml.safe_load(source_text(path, CONFIG_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConvertError(f"{path} is not a mapping of keys to values")
    return values


def _reject_unknown(settings: Settings, values: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        settings.reject_unless(name, neutral, "not supported here")
    for name in sorted(set(values) - READ - set(NEUTRAL)):
        settings.reject_unless(name, (False, 0), "unknown key")


def _config(settings: Settings, context_length: int | None) -> GPTConfig:
    settings.reject_unless("norm_class_name", ("RMSNorm", "LayerNorm"), "unknown norm")
    settings.reject_unless("mlp_class_name", ("LLaMAMLP", "GptNeoxMLP"), "unknown MLP")
    settings.reject_unless("gelu_approximate", ("none", "tanh"), "unknown GELU")
    layer_norm = settings.get("norm_class_name", "LayerNorm") == "LayerNorm"
    gated = settings.get("mlp_class_name", "GptNeoxMLP") == "LLaMAMLP"
    exact = settings.get("gelu_approximate", "none") == "none"
    width, n_head = settings.integer("n_embd"), settings.integer("n_head")
    context, head_dim = (
        settings.integer("block_size"),
        settings.integer("head_size", default=max(1, width // n_head)),
    )
    window = settings.integer("sliding_window_size", default=context)
    if window < min(context, context_length or context):
        raise ConvertError(
            f"sliding_window_size is {window}; every position sees all before it here. Within the "
            f"window both are the same: import it with --context-length {window}"
        )
    norm_qk = settings.flag("norm_qk", False)
    if norm_qk and layer_norm:
        raise ConvertError("norm_qk with LayerNorm; queries and keys are RMS-normalised here")
    biased = settings.flag("bias", True)
    vocab_size = settings.integer("vocab_size")
    multiple = settings.integer("padding_multiple", default=512)
    return gpt2_shape(
        vocab_size=settings.integer(
            "padded_vocab_size", default=-(-vocab_size // multiple) * multiple
        ),
        context_length=context,
        n_layer=settings.integer("n_layer"),
        n_head=n_head,
        n_kv_head=settings.integer("n_query_groups", default=n_head),
        d_model=width,
        head_dim=head_dim,
        d_ff=settings.integer("intermediate_size", default=4 * width),
        norm="layernorm" if layer_norm else "rmsnorm",
        norm_eps=settings.number("norm_eps", 1e-5),
        residual="parallel" if settings.flag("parallel_residual", True) else "sequential",
        positions="rotary",
        rope_theta=settings.number("rope_base", 10_000),
        rotary_dim=int(head_dim * settings.number("rotary_percentage", 0.25)),
        activation="swiglu" if gated else "gelu" if exact else "gelu_tanh",
        bias=biased or layer_norm,  # LitGPT's LayerNorm always has one
        qkv_bias=biased or settings.flag("attn_bias", False),
        qk_norm=norm_qk,
        tied_head=False,
        head_bias=settings.flag("lm_head_bias", False),
    )


def _weights(reader: StateDictReader, config: GPTConfig, settings: Settings) -> dict[str, Tensor]:
    width, rows, wide = config.d_model, config.vocab_size, config.n_head * config.head_dim
    biased = settings.flag("bias", True)
    weights = {
        "token_embedding.weight": reader.take("transformer.wte.weight", rows, width),
        "head.weight": reader.take("lm_head.weight", rows, width),
    }
    if config.head_bias:
        weights["head.bias"] = reader.take("lm_head.bias", rows)

    def linear(ours: str, theirs: list[str], inside: int, outside: int, bias: bool) -> None:
        """One matrix of ours from one of theirs, or from several of the same size."""
        weights[f"{ours}.weight"] = torch.cat(
            [reader.take(f"{name}.weight", outside, inside) for name in theirs]
        )
        if bias:
            weights[f"{ours}.bias"] = torch.cat(
                [reader.take(f"{name}.bias", outside) for name in theirs]
            )

    def norm(ours: str, theirs: str, size: int = width) -> None:
        weights[f"{ours}.weight"] = reader.take(f"{theirs}.weight", size)
        if config.norm == "layernorm":
            weights[f"{ours}.bias"] = reader.take(f"{theirs}.bias", size)

    norm("final_norm", "transformer.ln_f")
    up = ["fc_1", "fc_2"] if config.activation == "swiglu" else ["fc"]
    for layer in reader.layers(config.n_layer):
        source, here = f"transformer.h.{layer}", f"blocks.{layer}"
        norm(f"{here}.attention_norm", f"{source}.norm_1")
        norm(f"{here}.mlp_norm", f"{source}.norm_2")
        old = f"{source}.attn.attn.weight" in reader
        fused = f"{source}.attn.attn" if old else f"{source}.attn.qkv"
        linear(f"{here}.qkv", [fused], width, config.qkv_width, config.qkv_bias)
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            name = f"{here}.qkv.{kind}"
            apart = _ungrouped(weights[name], config) if old else weights[name]
            weights[name] = _half_split(apart, config)
        linear(f"{here}.attention_out", [f"{source}.attn.proj"], wide, width, biased)
        linear(f"{here}.mlp_up", [f"{source}.mlp.{n}" for n in up], width, config.d_ff, biased)
        linear(f"{here}.mlp_down", [f"{source}.mlp.proj"], config.d_ff, width, biased)
        if config.qk_norm:
            norm(f"{here}.query_norm", f"{source}.attn.norm_q", config.head_dim)
            norm(f"{here}.key_norm", f"{source}.attn.norm_k", config.head_dim)
            order = half_split(config.head_dim, config.rotary_dim)
            for name in (f"{here}.query_norm.weight", f"{here}.key_norm.weight"):
                weights[name] = weights[name][order]
    return weights


def _half_split(rows: Tensor, config: GPTConfig) -> Tensor:
    """Rows (qkv_width, ...) with the channels of queries and keys in the order that they have
    here."""
    heads = rows.view(-1, config.head_dim, *rows.shape[1:])  # (H + 2K, D, ...)
    turned = config.n_head + config.n_kv_head
    order = half_split(config.head_dim, config.rotary_dim)
    return torch.cat((heads[:turned, order], heads[turned:])).reshape(rows.shape)


def _ungrouped(rows: Tensor, config: GPTConfig) -> Tensor:
    """From [q .. q, k, v] per group to all queries, all keys, all values: (qkv_width, ...)."""
    per_group = config.n_head // config.n_kv_head
    # (K, H / K + 2, D, ...)
    groups = rows.reshape(config.n_kv_head, per_group + 2, config.head_dim, *rows.shape[1:])
    parts = groups.split([per_group, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])
