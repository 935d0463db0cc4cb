"""nanoGPT's `ckpt.pt`: GPT-2's shape, with or without biases, and exact GELU.

Names and shapes: `transformer.wte`, `.wpe`, `.h.N.ln_1`, `.attn.c_attn` (query, key and value rows
one after the other), `.attn.c_proj`, `.ln_2`, `.mlp.c_fc`, `.mlp.c_proj`, `.ln_f`, `lm_head`, as
plain Linear layers. The optimizer's state in the file is not read.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.foreign import ConvertError, ForeignModel, Settings, StateDictReader
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.transformer.config import ConfigError, GPTConfig, gpt2_shape

PREFIXES = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel prepend to names."""


def is_nanogpt(path: Path) -> bool:
    """Whether a file is a checkpoint as nanoGPT's train.py writes it, by its keys and the names of
    its tensors. Raises ConvertError for a file that cannot be read."""
    if path.suffix == ".safetensors":
        return False
    checkpoint = read_pt(path, keep="model.state_dict()")
    state, arguments = checkpoint.get("model"), checkpoint.get("model_args")
    if not isinstance(state, dict) or not isinstance(arguments, dict):
        return False
    known = {"n_layer", "n_head", "n_embd", "block_size"} <= arguments.keys()
    return known and any(str(name).endswith("transformer.h.0.ln_1.weight") for name in state)


def read_nanogpt(path: Path) -> ForeignModel:
    """Read a checkpoint file of nanoGPT. Raises ConvertError."""
    keep = '{"model": checkpoint["model"], "model_args": checkpoint["model_args"]}'
    checkpoint = read_pt(path, keep=keep)
    state, arguments = checkpoint.get("model"), checkpoint.get("model_args")
    if not isinstance(state, dict) or not isinstance(arguments, dict):
        raise ConvertError(
            f"{path} is not a checkpoint of nanoGPT: it holds {sorted(map(str, checkpoint))[:8]}, "
            "expected 'model' and 'model_args'"
        )
    settings = Settings(f"model_args of {path}", arguments)
    reader = _reader(str(path), state)
    tied = not _differ(state, reader)
    try:
        config = _config(settings, tied=tied)
    except ConfigError as error:
        raise ConvertError(f"model_args of {path}: {error}") from error
    weights = _weights(reader, config)
    reader.finish()
    training = checkpoint.get("config")
    training = training if isinstance(training, dict) else {}
    step = checkpoint.get("iter_num")
    step = step if type(step) is int and step > 0 else 0
    return ForeignModel(
        kind="nanoGPT",
        config=config,
        weights=weights,
        dtype=reader.dtype(),
        step=step,
        tokens=step * _tokens_per_step(training),
        val_loss=_loss(checkpoint.get("best_val_loss")),
        contents=without_tensors(checkpoint),
        facts={"dataset": training["dataset"]} if isinstance(training.get("dataset"), str) else {},
    )


def _reader(where: str, state: dict[Any, Any]) -> StateDictReader:
    """The state's tensors by their names without prefixes."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConvertError(f"{where}: {name!r} of 'model' is not a tensor")
        while name.startswith(PREFIXES):
            name = name[name.index(".") + 1 :]
        if name in tensors:
            raise ConvertError(f"{where} holds {name} twice, with and without a prefix")
        tensors[name] = tensor
    reader = StateDictReader(where, tensors, tensors.__getitem__)
    reader.ignore(".attn.bias")  # the causal mask, in old versions
    return reader


def _differ(state: dict[Any, Any], reader: StateDictReader) -> bool:
    """Whether the head is a matrix of its own: nanoGPT itself stores the tied one twice."""
    by_end = {str(name).rpartition("transformer.wte.")[2]: value for name, value in state.items()
              if str(name).endswith("transformer.wte.weight")}  # fmt: skip
    embedding = by_end.get("weight")
    head = next((t for name, t in state.items() if str(name).endswith("lm_head.weight")), None)
    if embedding is None or head is None:
        return False
    return head.shape != embedding.shape or not torch.equal(head, embedding)


def _config(settings: Settings, *, tied: bool) -> GPTConfig:
    bias = settings.flag("bias", True)
    return gpt2_shape(
        vocab_size=settings.integer("vocab_size"),
        context_length=settings.integer("block_size"),
        n_layer=settings.integer("n_layer"),
        n_head=settings.integer("n_head"),
        d_model=settings.integer("n_embd"),
        activation="gelu",
        bias=bias,
        qkv_bias=bias,
        tied_head=tied,
        dropout=settings.number("dropout", 0.0),
    )


def _weights(reader: StateDictReader, config: GPTConfig) -> dict[str, Tensor]:
    width, rows = config.d_model, config.vocab_size
    weights = {
        "token_embedding.weight": reader.take("transformer.wte.weight", rows, width),
        "position_embedding.weight": reader.take(
            "transformer.wpe.weight", config.context_length, width
        ),
    }
    modules: dict[str, tuple[str, tuple[int, ...]]] = {"transformer.ln_f": ("final_norm", (width,))}
    for layer in reader.layers(config.n_layer):
        theirs, here = f"transformer.h.{layer}", f"blocks.{layer}"
        modules |= {
            f"{theirs}.ln_1": (f"{here}.attention_norm", (width,)),
            f"{theirs}.attn.c_attn": (f"{here}.qkv", (3 * width, width)),
            f"{theirs}.attn.c_proj": (f"{here}.attention_out", (width, width)),
            f"{theirs}.ln_2": (f"{here}.mlp_norm", (width,)),
            f"{theirs}.mlp.c_fc": (f"{here}.mlp_up", (config.d_ff, width)),
            f"{theirs}.mlp.c_proj": (f"{here}.mlp_down", (width, config.d_ff)),
        }
    for theirs, (here, shape) in modules.items():
        weights[f"{here}.weight"] = reader.take(f"{theirs}.weight", *shape)
        if config.bias:
            weights[f"{here}.bias"] = reader.take(f"{theirs}.bias", shape[0])
    head = "lm_head.weight"
    if not config.tied_head:
        weights["head.weight"] = reader.take(head, rows, width)
    elif head in reader:
        reader.take(head, rows, width)  # the embedding once more
    return weights


def _tokens_per_step(training: dict[Any, Any]) -> int:
    """Tokens of a step in all processes together, 0 where the file does not say."""
    product = 1
    for name in ("gradient_accumulation_steps", "batch_size", "block_size"):
        value = training.get(name)
        if type(value) is not int or value < 1:
            return 0
        product *= value
    return product


def _loss(value: Any) -> float | None:
    """The last evaluation's loss; nanoGPT writes 1e9 for none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
    return float(value) if known else None
