"""Configurations of Hugging Face folders: GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen2, Qwen3,
nanochat.

Configurations written by transformers 5 or by earlier versions are translated to a `GPTConfig`. A
value that a `GPTConfig` cannot express is refused. `layouts.py` has the names of tensors, `rope.py`
reads rotary positions, and `hf/tokenizer.py` reads tokenizers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from logitd.model.convert.by_role.names import ACTIVATIONS
from logitd.model.convert.foreign import (
    ConvertError,
    ForeignModel,
    Settings,
    StateDictReader,
    naming,
)
from logitd.model.convert.hf.folder import CONFIG, WEIGHTS, open_state_dict
from logitd.model.convert.hf.rope import read_rope, reject_part_of_a_head
from logitd.model.convert.layouts import (
    GPT2,
    LLAMA,
    NANOCHAT,
    NEOX,
    OPT,
    Layout,
    read_sizes,
    read_weights,
)
from logitd.model.convert.source_file import member, source_object
from logitd.model.convert.unknown_settings import unknown_settings
from logitd.model.transformer.config import Activation, GPTConfig
from logitd.model.transformer.shapes import gpt2_shape

FULL, SLIDING = "full_attention", "sliding_attention"
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
           ".rotary_emb.inv_freq")  # fmt: skip
"""Suffixes of the names of masks and tables."""

NEUTRAL = (
    *("return_dict", "pretraining_tp", "max_window_layers", "length_penalty", "num_beams"),
    *("num_beam_groups", "repetition_penalty", "typical_p", "max_length", "encoder_hidden_size"),
    *("chunk_size_feed_forward", "n_special", "afn", "predict_special_tokens", "hidden_dropout"),
    *("model_max_length", "is_llama_config", "unsloth_fixed", "_flash_attn_2_enabled"),
    *("_attn_implementation_autoset", "use_bfloat16"),
)
"""Keys that do not change the logits of any architecture."""

Shape = tuple[GPTConfig, set[str]]
"""A shape, and the parts that have no biases in the source (see `unbiased` in `read_weights`)."""


def read_huggingface(folder: Path, *, named: str = WEIGHTS) -> ForeignModel:
    """Read a folder written by `save_pretrained`. If the folder has several weight files, the one
    called `named` is read. Raises ConvertError."""
    where, document = str(folder / CONFIG), source_object(folder / CONFIG)
    settings = Settings(where, document)
    settings.reject_unless(
        "quantization_config", (), "quantized weights cannot be imported; save them in full"
    )
    reader = open_state_dict(folder, named)
    with naming(where):
        config, weights = read_model(settings, reader)
    return ForeignModel(
        kind=f"Hugging Face {settings.get('model_type')}",
        config=config,
        weights=weights,
        dtype=reader.finish(),
        contents={"config": document},
        # Keys that transformers' classes do not know may belong to the model's own code.
        unknown={
            name: value
            for name, value in unknown_settings(settings.unread()).items()
            if value is not False and name not in NEUTRAL
        }
        | _own_code(document, where),
        facts={"architectures": _architectures(settings.get("architectures", []), where)},
    )


def read_model(settings: Settings, reader: StateDictReader) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Read the shape and weights of a model. Raises ConvertError and ConfigError."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        settings.reject_unless(
            "model_type",
            (),
            f"expected one of {', '.join(FAMILIES)}. With --code or --check its tensors are "
            "recognized by their roles",
        )
        raise ConvertError("config.json lacks model_type")
    settings.reject_unless("is_causal", (True,), "then positions attend to later ones")
    layout, read_shape = FAMILIES[model_type]
    reader.require_layers(settings.integer(*layout.sizes["n_layer"].split()))
    config, unbiased = read_shape(settings)
    reader.ignore(*BUFFERS)
    return config, read_weights(reader, config, layout, unbiased=unbiased)


def _own_code(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`auto_map` if it names a model class of its own, and `architectures` if it names a class that
    transformers lacks: such a class may compute other logits than the class of `model_type`."""
    named = member(document, "auto_map", dict, where)
    classes = _architectures(document.get("architectures", []), where)
    own = [name for name in classes if CLASS.fullmatch(name) is None]
    return {
        **({"auto_map": named} if any(name.startswith("AutoModel") for name in named) else {}),
        **({"architectures": own} if own else {}),
    }


def _architectures(names: Any, where: str) -> list[str]:
    names = [] if names is None else names
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.isprintable() for name in names
    ):
        raise ConvertError(f"{where}: architectures is not a list of names")
    return names


def _activation(settings: Settings, key: str, default: str) -> Activation:
    name = settings.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        settings.reject_unless(key, (), f"expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: Activation) -> str:
    """The name that an export writes for an activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def _gpt2(settings: Settings) -> Shape:
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        settings.reject_unless(name, (False,), "not supported here")
    settings.reject_unless("scale_attn_weights", (True,), "attention is always scaled here")
    settings.reject_unless("add_cross_attention", (False,), "cross-attention is not supported")
    config = gpt2_shape(
        **read_sizes(settings, GPT2, d_ff=4 * settings.integer("n_embd")),
        activation=_activation(settings, "activation_function", "gelu_new"),
        tied_head=settings.flag("tie_word_embeddings", True),
    )
    return config, set()


def _neox(settings: Settings) -> Shape:
    sizes = read_sizes(settings, NEOX, context_length=2048)
    width, n_head = sizes["d_model"], sizes["n_head"]
    if width % n_head:
        raise ConvertError(
            f"hidden_size {width} is not divisible by num_attention_heads {n_head}: the heads of "
            "GPT-NeoX share the width equally"
        )
    rope = read_rope(
        settings,
        head_dim=width // n_head,
        context_length=sizes["context_length"],
        theta="rotary_emb_base",
        share="rotary_pct",
        default_share=0.25,
    )
    attention_bias = settings.flag("attention_bias", True)
    config = gpt2_shape(
        **sizes,
        positions="rotary",
        activation=_activation(settings, "hidden_act", "gelu"),
        residual="parallel" if settings.flag("use_parallel_residual", True) else "sequential",
        qkv_bias=attention_bias,
        tied_head=settings.flag("tie_word_embeddings", False),
        **rope,
    )
    return config, set() if attention_bias else {"attention_out"}


def _opt(settings: Settings) -> Shape:
    """The shape of an OPT model. Embeddings must be as wide as the residual stream, all parts must
    have biases, and the activation must be ReLU; so opt-350m and Galactica are refused."""
    width = settings.integer("hidden_size")
    settings.reject_unless(
        "word_embed_proj_dim",
        (width,),
        f"hidden_size is {width}, but projections between both are not supported",
    )
    settings.reject_unless("activation_function", ("relu",), "OPT's own is relu")
    for name in ("enable_bias", "layer_norm_elementwise_affine"):
        settings.reject_unless(name, (True,), "not supported for OPT")
    before = settings.flag("do_layer_norm_before", True)
    config = gpt2_shape(
        **read_sizes(settings, OPT),
        norm_position="pre" if before else "post",
        final_norm=before and not settings.flag("_remove_final_layer_norm", False),
        activation="relu",
        tied_head=settings.flag("tie_word_embeddings", True),
    )
    return config, set()


def _llama(settings: Settings) -> Shape:
    model_type = settings.get("model_type")
    settings.reject_unless(
        "hidden_act", ("silu", "swish"), "the gate of Llama's shape is SiLU here"
    )
    width, n_head = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = 128 if model_type == "qwen3" else max(1, width // n_head)
    sizes = read_sizes(settings, LLAMA, n_kv_head=n_head, head_dim=head_dim)
    context = sizes["context_length"]
    # attention_bias applies to all four projections; Qwen2 ignores it and has biases on three.
    on_all = settings.flag("attention_bias", False) and model_type in ("llama", "qwen3")
    mlp_bias = settings.flag("mlp_bias", False) and model_type == "llama"
    reject_part_of_a_head(settings)
    config = gpt2_shape(
        **sizes,
        norm="rmsnorm",
        positions="rotary",
        activation="swiglu",
        bias=on_all or mlp_bias,
        qkv_bias=on_all or model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tied_head=settings.flag("tie_word_embeddings", False),
        windows=_windows(model_type, settings, sizes["n_layer"]),
        **read_rope(settings, head_dim=sizes["head_dim"], context_length=context),
    )
    unbiased = set() if on_all else {"attention_out"}
    return config, unbiased if mlp_bias else unbiased | {"mlp_up", "mlp_down"}


def _nanochat(settings: Settings) -> Shape:
    """The shape of a nanochat model from 2025, which lacks the parts that were added to nanochat
    later."""
    settings.reject_unless("attention_bias", (False,), "nanochat has no biases")
    reject_part_of_a_head(settings)
    n_head, width = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    sizes = read_sizes(settings, NANOCHAT, n_kv_head=n_head, head_dim=max(1, width // n_head))
    rope = read_rope(settings, head_dim=sizes["head_dim"], context_length=sizes["context_length"])
    key = "final_logit_softcapping"
    uncapped = settings.has(key) and settings.get(key) is None
    if (scaling := rope["rope_scaling"]) is not None and scaling.kind == "yarn":
        # transformers normalizes queries and keys after rotation, which removes yarn's factor.
        rope["rope_scaling"] = replace(scaling, attention_factor=1.0)
    config = gpt2_shape(
        **sizes,
        norm="rmsnorm",
        positions="rotary",
        activation=_activation(settings, "hidden_act", "relu2"),
        bias=False,
        qkv_bias=False,
        qk_norm=True,
        tied_head=settings.flag("tie_word_embeddings", False),
        embedding_norm=True,
        logit_softcap=None if uncapped else settings.number(key, 15.0),
        **rope,
    )
    return config, set()


def _windows(model_type: str, settings: Settings, n_layer: int) -> tuple[int | None, ...] | None:
    """The sliding window of each layer; None if no layer has a window. Mistral's first
    configurations omit `sliding_window`; their window is 4,096 positions."""
    own = model_type == "mistral" or (
        model_type != "llama" and settings.flag("use_sliding_window", False)
    )
    unlimited = settings.has("sliding_window") and settings.get("sliding_window") is None
    if not own or unlimited:
        return None
    if model_type == "mistral":
        settings.reject_unless(
            "layer_types",
            ([SLIDING] * n_layer,),
            "transformers ignores it for mistral and gives every layer the sliding window: remove "
            "layer_types, or set sliding_window to null if no layer has one",
        )
    first = 0 if model_type == "mistral" else settings.count("max_window_layers", 28)
    kinds = settings.get("layer_types") or [FULL] * min(n_layer, first)
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        settings.reject_unless("layer_types", (), f"expected a list of {FULL} and {SLIDING}")
    window = settings.integer("sliding_window", default=4096)
    return tuple(
        None if kind == FULL else window for kind in [*kinds, *[SLIDING] * n_layer][:n_layer]
    )


CLASS = re.compile(
    r"(gpt2|gptneox|opt|llama|mistral|qwen2|qwen3|nanochat)"
    r"((lmhead|doubleheads)?model|lmhead|for(causallm|(sequence|token)classification|"
    r"questionanswering))",
    re.IGNORECASE,
)
"""Names of transformers' classes for these families. Old files have LLaMAForCausalLM."""
FAMILIES: Mapping[str, tuple[Layout, Callable[[Settings], Shape]]] = {
    "gpt2": (GPT2, _gpt2),
    "gpt_neox": (NEOX, _neox),
    "opt": (OPT, _opt),
    "llama": (LLAMA, _llama),
    "mistral": (LLAMA, _llama),
    "qwen2": (LLAMA, _llama),
    "qwen3": (LLAMA, _llama),
    "nanochat": (NANOCHAT, _nanochat),
}
"""For each `model_type`, the layout of the tensors and the function that reads the shape."""
