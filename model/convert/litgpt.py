"""LitGPT's `lit_model.pth` with `model_config.yaml`: the shapes of Llama, GPT-NeoX and Pythia.

Old versions store query, key and value group by group, under `attn.attn`. The head is always
stored; if it equals the embedding, the imported head is tied. Reading the YAML needs PyYAML.
Recognition by role (`by_role/`) cannot replace this reader: it reads no YAML, supports only
rotation of whole heads, and does not know the old order of rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import (
    ConvertError,
    ForeignModel,
    Settings,
    StateDictReader,
    naming,
)
from logitd.model.convert.layouts import (
    LITGPT,
    MATRICES,
    Layout,
    read_sizes,
    read_weights,
    tie_if_equal,
)
from logitd.model.convert.pt_file import read_pt
from logitd.model.convert.source_file import source_text
from logitd.model.convert.state_file import named_tensors
from logitd.model.extras import installation
from logitd.model.files import CONFIG_BYTES
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.shapes import gpt2_shape

WEIGHTS, CONFIG = "lit_model.pth", "model_config.yaml"

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("shared_attention_norm", "post_attention_norm", "post_mlp_norm"), (False,)),
    **dict.fromkeys(("scale_embeddings", "rope_interleave"), (False,)),
    **dict.fromkeys(("norm_1", "norm_2"), (True,)),
    **dict.fromkeys(("rope_adjustments", "rope_local_base_freq", "rope_indices"), ()),
    **dict.fromkeys(("attention_scores_scalar", "latent_attention"), ()),
    **dict.fromkeys(("attention_logit_softcapping", "final_logit_softcapping"), ()),
    "norm_qk_type": ("default",),
    **dict.fromkeys(("rope_condense_ratio", "routed_scaling_factor"), (1,)),
    "n_expert": (0,),
}
"""Keys that may change the computation, with the values that do not change it. Null does not change
it either."""

UNUSED = ("name", "hf_config", "rope_n_elem", "sliding_window_indices")
"""Keys that are not read, because they do not change the computation on their own."""


def read_litgpt(folder: Path) -> ForeignModel:
    """Read a checkpoint folder of LitGPT. Raises ConvertError."""
    where, path = str(folder / CONFIG), folder / WEIGHTS
    values = _read_yaml(folder / CONFIG)
    settings = Settings(where, values)
    for name, neutral in NEUTRAL.items():
        settings.reject_unless(name, neutral, "not supported here")
    loaded = read_pt(path)
    state = loaded["model"] if isinstance(loaded.get("model"), dict) else loaded
    reader = StateDictReader(str(path), named_tensors(str(path), state))
    reader.require_layers(settings.integer(LITGPT.sizes["n_layer"]))
    with naming(where):
        config = _config(settings)
    unbiased = () if settings.flag("bias", True) else MATRICES
    config, weights = tie_if_equal(
        config, read_weights(reader, config, _layout(reader, config), unbiased=unbiased)
    )
    return ForeignModel(
        kind="LitGPT",
        config=config,
        weights=weights,
        dtype=reader.finish(),
        contents={"config": values},
        unknown={k: value for k, value in settings.unread().items() if value and k not in UNUSED},
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
        raise ConvertError(f"{path} does not exist, but {WEIGHTS} cannot be read without it")
    text = source_text(path, CONFIG_BYTES)
    try:
        # Aliases of aliases can stand for billions of values in a few lines.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ConvertError(f"{path} has an alias (*NAME): write the value itself")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConvertError(f"{path} is not a mapping of keys to values")
    return values


def _config(settings: Settings) -> GPTConfig:
    settings.reject_unless("norm_class_name", ("RMSNorm", "LayerNorm"), "unknown norm")
    settings.reject_unless("mlp_class_name", ("LLaMAMLP", "GptNeoxMLP"), "unknown MLP")
    settings.reject_unless("gelu_approximate", ("none", "tanh"), "unknown GELU")
    named = settings if settings.get("name") else settings.part("hf_config")  # as LitGPT does
    if "Gemma" in str(named.get("name", "")):
        named.reject_unless(
            "name", (), "LitGPT adds 1 to the weights of norms if the name contains Gemma"
        )
    layer_norm = settings.get("norm_class_name", "LayerNorm") == "LayerNorm"
    gated = settings.get("mlp_class_name", "GptNeoxMLP") == "LLaMAMLP"
    exact = settings.get("gelu_approximate", "none") == "none"
    width, n_head = settings.integer("n_embd"), settings.integer("n_head")
    sizes = read_sizes(
        settings, LITGPT, head_dim=max(1, width // n_head), n_kv_head=n_head, d_ff=4 * width
    )
    vocab_size = sizes["vocab_size"]
    norm_qk = settings.flag("norm_qk", False)
    if norm_qk and layer_norm:
        raise ConvertError(
            "norm_qk is true with LayerNorm, but logitd supports only RMS norms of queries and keys"
        )
    biased = settings.flag("bias", True)
    multiple = settings.integer("padding_multiple", default=512)
    padded = -(-vocab_size // multiple) * multiple
    sizes["vocab_size"] = settings.integer("padded_vocab_size", default=padded)
    return gpt2_shape(
        **sizes,
        norm="layernorm" if layer_norm else "rmsnorm",
        residual="parallel" if settings.flag("parallel_residual", True) else "sequential",
        positions="rotary",
        rope_theta=settings.number("rope_base", 10_000),
        rotary_dim=int(sizes["head_dim"] * settings.number("rotary_percentage", 0.25)),
        activation="swiglu" if gated else "gelu" if exact else "gelu_tanh",
        bias=biased or layer_norm,  # LitGPT's LayerNorm always has a bias
        qkv_bias=settings.flag("attn_bias", False) or biased,
        qk_norm=norm_qk,
        tied_head=False,
        head_bias=settings.flag("lm_head_bias", False),
        windows=_windows(settings, sizes["n_layer"]),
    )


def _windows(settings: Settings, n_layer: int) -> tuple[int | None, ...] | None:
    """The sliding window of each layer; None if the configuration has no window. All layers have
    the window unless the configuration lists the layers that have it."""
    if settings.get("sliding_window_size") is None:
        return None
    window, marks = settings.integer("sliding_window_size"), settings.get("sliding_window_indices")
    marks = [1] * n_layer if marks is None else marks
    if not isinstance(marks, list) or len(marks) < n_layer or set(marks) - {0, 1}:
        settings.reject_unless(
            "sliding_window_indices", (), f"expected 0 or 1 for {n_layer} layers"
        )
    return tuple(window if mark else None for mark in marks[:n_layer])


def _layout(reader: StateDictReader, config: GPTConfig) -> Layout:
    inside = dict(LITGPT.inside)
    if config.activation == "swiglu":
        inside["mlp_up"] = ("mlp.fc_1", "mlp.fc_2")
    if "transformer.h.0.attn.attn.weight" not in reader:
        return replace(LITGPT, inside=inside)
    return replace(LITGPT, inside={**inside, "qkv": ("attn.attn",)}, grouped=True)
