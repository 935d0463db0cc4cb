"""Hugging Face folders: `config.json` and weights of GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen2
and Qwen3.

Says in this project's terms what shape a configuration has, in its old and its new form, and
refuses what no `GPTConfig` says; then takes the tensors by name. Knows the ways of storing:
`model.safetensors`, or else `pytorch_model.bin`, each in one file or in shards with an index.
GPT-NeoX and OPT are in `neox.py` and `opt.py`. Does not read tokenizers (`hf/tokenizer.py`).

Layouts: GPT-2's Conv1D matrices are (in, out) and are transposed; rotary heads are halves, as
here; query, key and value rows are one matrix here, and so are gate and up.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, ForeignModel, Settings, StateDictReader
from logitd.model.convert.hf.activation import read_activation
from logitd.model.convert.hf.neox import read_neox
from logitd.model.convert.hf.opt import read_opt
from logitd.model.convert.hf.rope import read_rope, reject_part_of_a_head
from logitd.model.convert.pt_file import read_pt
from logitd.model.convert.source_file import require_source, source_json
from logitd.model.transformer.config import ConfigError, GPTConfig, gpt2_shape

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""What the list of shards is called, behind the name of a single file."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the head's matrix; the second is GPT-NeoX's."""

ROTARY_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that are Llama's shape with a difference or two."""
MODEL_TYPES = ("gpt2", "gpt_neox", "opt", *ROTARY_TYPES)


def read_huggingface(folder: Path, *, context_length: int | None) -> ForeignModel:
    """Read a folder that `save_pretrained` wrote. `context_length`, where given, is the context
    that will be used: a sliding window at least as long is the same. Raises ConvertError."""
    where = str(folder / CONFIG)
    document = read_object(folder / CONFIG)
    settings = Settings(where, document)
    model_type = settings.get("model_type")
    settings.reject_unless(
        "quantization_config", (), "quantized weights cannot be imported; save them in full"
    )
    reader = open_state_dict(folder)
    try:
        if model_type == "gpt2":
            config, weights = _gpt2(settings, reader)
        elif model_type == "gpt_neox":
            config, weights = read_neox(settings, reader)
        elif model_type == "opt":
            config, weights = read_opt(settings, reader)
        elif model_type in ROTARY_TYPES:
            config, weights = _rotary(model_type, settings, reader, context_length)
        else:
            raise ConvertError(
                f"{where}: model_type is {model_type!r}; known are {', '.join(MODEL_TYPES)}. With "
                "--code or --check its tensors are recognised by their roles"
            )
        weights |= _head(reader, config, weights["token_embedding.weight"])
    except ConfigError as error:
        raise ConvertError(f"{where}: {error}") from error
    reader.finish()
    return ForeignModel(
        kind=f"Hugging Face {model_type}",
        config=config,
        weights=weights,
        dtype=reader.dtype(),
        contents={"config": document},
        facts={"architectures": _architectures(settings.get("architectures", []), where)},
    )


def _architectures(names: Any, where: str) -> list[str]:
    """The names of their classes, which a checkpoint keeps for its readers. Raises ConvertError."""
    names = [] if names is None else names
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.isprintable() for name in names
    ):
        raise ConvertError(f"{where}: architectures is not a list of names")
    return names


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ConvertError."""
    document = source_json(path)
    if not isinstance(document, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return document


def open_state_dict(folder: Path) -> StateDictReader:
    """The tensors of `model.safetensors`, or of the shards that its index names; else those of
    `pytorch_model.bin`, in the same way."""
    single = next(
        (name for name in (WEIGHTS, PICKLE)
         if any((folder / f"{name}{end}").is_file() for end in ("", INDEX))),
        None,
    )  # fmt: skip
    if single is None:
        raise ConvertError(
            f"{folder} holds neither {WEIGHTS} nor {PICKLE}, nor the {INDEX} of one; save the "
            "model with transformers: save_pretrained(folder)"
        )
    homes: dict[str, str] | None = None
    files = [single]
    if not (folder / single).is_file():
        homes = _shards(folder / f"{single}{INDEX}")
        files = list(dict.fromkeys(homes.values()))
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        opened = _safetensors(folder / file) if single == WEIGHTS else _pickled(folder / file)
        tensors |= {name: take for name, take in opened.items()
                    if homes is None or homes.get(name) == file}  # fmt: skip
    if homes is not None and (absent := sorted(set(homes) - set(tensors))):
        raise ConvertError(
            f"{folder / f'{single}{INDEX}'} names {len(absent)} tensors that their files do not "
            f"hold, the first is {absent[0]}"
        )
    return StateDictReader(str(folder), tensors, lambda name: tensors[name]())


def _shards(index: Path) -> dict[str, str]:
    """For each tensor the file that holds it."""
    homes = read_object(index).get("weight_map")
    if not isinstance(homes, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in homes.values()
    ):
        raise ConvertError(f"{index} has no weight_map from tensors to files beside it")
    return homes


def _safetensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    """What reads each tensor of a safetensors file."""
    require_source(path)
    try:
        opened: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConvertError(f"{path} is not a complete safetensors file: {error}") from error

    def read(name: str) -> Tensor:
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, ValueError, TypeError, AttributeError) as error:
            raise ConvertError(f"{path}: {name} cannot be read: {error}") from error
        return tensor

    return {name: partial(read, name) for name in opened.keys()}  # noqa: SIM118  # no iterator


def _pickled(path: Path) -> dict[str, Callable[[], Tensor]]:
    """The same of a file that `torch.save` wrote."""
    state = read_pt(path, keep="model.state_dict()")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConvertError(
                f"{path} holds {name!r}, a {type(tensor).__name__}; expected tensors by their names"
            )
    return {name: partial(state.__getitem__, name) for name in state}


def _gpt2(settings: Settings, reader: StateDictReader) -> tuple[GPTConfig, dict[str, Tensor]]:
    activation = read_activation(settings, "activation_function", "gelu_new")
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        settings.reject_unless(name, (False,), "not supported here")
    settings.reject_unless("scale_attn_weights", (True,), "attention is always scaled here")
    settings.reject_unless("add_cross_attention", (False,), "cross-attention is not supported")
    width = settings.integer("n_embd")
    reader.ignore(".attn.bias", ".attn.masked_bias")  # the causal mask
    config = gpt2_shape(
        vocab_size=settings.integer("vocab_size"),
        context_length=settings.integer("n_positions", "n_ctx"),
        n_layer=settings.integer("n_layer"),
        n_head=settings.integer("n_head"),
        d_model=width,
        d_ff=settings.integer("n_inner", default=4 * width),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        activation=activation,
        tied_head=settings.flag("tie_word_embeddings", True),
    )
    prefix = "transformer." if "transformer.wte.weight" in reader else ""
    return config, _gpt2_weights(reader, config, prefix)


def _gpt2_weights(reader: StateDictReader, config: GPTConfig, prefix: str) -> dict[str, Tensor]:
    width, rows = config.d_model, config.vocab_size
    weights = {
        "token_embedding.weight": reader.take(f"{prefix}wte.weight", rows, width),
        "position_embedding.weight": reader.take(
            f"{prefix}wpe.weight", config.context_length, width
        ),
    }
    norms = {f"{prefix}ln_f": "final_norm"}
    matrices: dict[str, tuple[str, int, int]] = {}  # in, out
    for layer in reader.layers(config.n_layer):
        theirs, here = f"{prefix}h.{layer}", f"blocks.{layer}"
        norms |= {f"{theirs}.ln_1": f"{here}.attention_norm", f"{theirs}.ln_2": f"{here}.mlp_norm"}
        matrices |= {
            f"{theirs}.attn.c_attn": (f"{here}.qkv", width, 3 * width),
            f"{theirs}.attn.c_proj": (f"{here}.attention_out", width, width),
            f"{theirs}.mlp.c_fc": (f"{here}.mlp_up", width, config.d_ff),
            f"{theirs}.mlp.c_proj": (f"{here}.mlp_down", config.d_ff, width),
        }
    for theirs, here in norms.items():
        weights[f"{here}.weight"] = reader.take(f"{theirs}.weight", width)
        weights[f"{here}.bias"] = reader.take(f"{theirs}.bias", width)
    for theirs, (here, inside, outside) in matrices.items():
        weights[f"{here}.weight"] = reader.take(f"{theirs}.weight", inside, outside).T
        weights[f"{here}.bias"] = reader.take(f"{theirs}.bias", outside)
    return weights


def _rotary(
    model_type: str, settings: Settings, reader: StateDictReader, context_length: int | None
) -> tuple[GPTConfig, dict[str, Tensor]]:
    settings.reject_unless(
        "hidden_act", ("silu", "swish"), "the gate of Llama's shape is SiLU here"
    )
    width, n_head = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    context = settings.integer("max_position_embeddings")
    _reject_window(model_type, settings, min(context, context_length or context))
    # attention_bias is on all four projections, in Qwen2 on three whatever it says.
    on_all = settings.flag("attention_bias", False) and model_type in ("llama", "qwen3")
    mlp_bias = settings.flag("mlp_bias", False) and model_type == "llama"
    reader.ignore(".rotary_emb.inv_freq")
    reject_part_of_a_head(settings)
    head_dim = settings.integer(
        "head_dim", default=128 if model_type == "qwen3" else max(1, width // n_head)
    )
    config = gpt2_shape(
        vocab_size=settings.integer("vocab_size"),
        context_length=context,
        n_layer=settings.integer("num_hidden_layers"),
        n_head=n_head,
        n_kv_head=settings.integer("num_key_value_heads", default=n_head),
        d_model=width,
        head_dim=head_dim,
        d_ff=settings.integer("intermediate_size"),
        norm="rmsnorm",
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        positions="rotary",
        activation="swiglu",
        bias=on_all or mlp_bias,
        qkv_bias=on_all or model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tied_head=settings.flag("tie_word_embeddings", False),
        **read_rope(settings, head_dim=head_dim, context_length=context),
    )
    prefix = "" if "embed_tokens.weight" in reader else "model."
    return config, _rotary_weights(reader, config, prefix, out_bias=on_all, mlp_bias=mlp_bias)


def _rotary_weights(
    reader: StateDictReader, config: GPTConfig, prefix: str, *, out_bias: bool, mlp_bias: bool
) -> dict[str, Tensor]:
    width, hidden = config.d_model, config.d_ff
    wide = config.n_head * config.head_dim
    weights = {
        "token_embedding.weight": reader.take(
            f"{prefix}embed_tokens.weight", config.vocab_size, width
        ),
        "final_norm.weight": reader.take(f"{prefix}norm.weight", width),
    }
    for layer in reader.layers(config.n_layer):
        theirs, here = f"{prefix}layers.{layer}", f"blocks.{layer}"
        sides = (("q_proj", wide), ("k_proj", config.kv_width), ("v_proj", config.kv_width))
        for ours, module, parts, inside, biased in (
            ("qkv", "self_attn", sides, width, config.qkv_bias),
            ("attention_out", "self_attn", (("o_proj", width),), wide, out_bias),
            ("mlp_up", "mlp", (("gate_proj", hidden), ("up_proj", hidden)), width, mlp_bias),
            ("mlp_down", "mlp", (("down_proj", width),), hidden, mlp_bias),
        ):
            names = [(f"{theirs}.{module}.{part}", rows) for part, rows in parts]
            weights[f"{here}.{ours}.weight"] = torch.cat(
                [reader.take(f"{name}.weight", rows, inside) for name, rows in names]
            )
            if biased:
                weights[f"{here}.{ours}.bias"] = torch.cat(
                    [reader.take(f"{name}.bias", rows) for name, rows in names]
                )
        weights |= {
            f"{here}.attention_norm.weight": reader.take(f"{theirs}.input_layernorm.weight", width),
            f"{here}.mlp_norm.weight": reader.take(
                f"{theirs}.post_attention_layernorm.weight", width
            ),
        }
        if config.qk_norm:
            for ours, part in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                weights[f"{here}.{ours}.weight"] = reader.take(
                    f"{theirs}.self_attn.{part}.weight", config.head_dim
                )
    return weights


def _head(reader: StateDictReader, config: GPTConfig, embedding: Tensor) -> dict[str, Tensor]:
    """The head's matrix; of a tied head, stored once more, that it is the same."""
    name = next((name for name in HEADS if name in reader), HEADS[0])
    if not config.tied_head:
        return {"head.weight": reader.take(name, config.vocab_size, config.d_model)}
    if name in reader:
        again = reader.take(name, config.vocab_size, config.d_model)
        if not torch.equal(again, embedding):
            raise ConvertError(
                f"{name} differs from the embedding, and tie_word_embeddings says that they are "
                "one; which is right cannot be told from here"
            )
    return {}


def _reject_window(model_type: str, settings: Settings, context_length: int) -> None:
    """Raise ConvertError where a layer would not see all that stands before a position."""
    if model_type == "llama" or (
        model_type != "mistral" and not settings.flag("use_sliding_window", False)
    ):
        return
    # Mistral's first configurations leave the key out and mean 4,096.
    kinds = settings.get("layer_types")
    if isinstance(kinds, list) and kinds and all(kind == "full_attention" for kind in kinds):
        return
    if settings.has("sliding_window") and settings.get("sliding_window") is None:
        return
    window = settings.integer("sliding_window", default=4096)
    if window < context_length:
        raise ConvertError(
            f"sliding_window is {window} and the context {context_length}; every position sees all "
            "before it here. Within the window both are the same: import it with "
            f"--context-length {window}"
        )
