"""nanoGPT's `ckpt.pt`: GPT-2's shape, with or without biases, and exact GELU.

The optimizer's state in the file is not read. Recognition by role (`by_role/`) cannot replace this
reader: it would have to ask for the activation and the position of the norms, and does not check
shapes against `model_args`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from logitd.model.convert.containers import container_of
from logitd.model.convert.foreign import ForeignModel, Settings, StateDictReader, naming
from logitd.model.convert.layouts import NANOGPT, read_sizes, read_weights, tie_if_equal
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.convert.state_file import collect_settings, named_tensors
from logitd.model.convert.unknown_settings import unknown_settings
from logitd.model.transformer.shapes import gpt2_shape


def read_nanogpt(path: Path) -> ForeignModel | None:
    """Read a file of nanoGPT's train.py; None if its keys or names are not nanoGPT's. Raises
    ConvertError."""
    if container_of(path) != "torch":
        return None
    checkpoint = read_pt(path, keep="model.state_dict()")
    state, arguments = checkpoint.get("model"), checkpoint.get("model_args")
    if not isinstance(state, dict) or not isinstance(arguments, dict):
        return None
    known = {"n_layer", "n_head", "n_embd", "block_size"} <= arguments.keys()
    if not known or not any(str(n).endswith("transformer.h.0.ln_1.weight") for n in state):
        return None
    settings = Settings(f"model_args of {path}", arguments)
    reader = StateDictReader(str(path), named_tensors(str(path), state))
    reader.ignore(".attn.bias")  # the causal mask, in old versions
    bias = settings.flag("bias", True)
    with naming(f"model_args of {path}"):
        config = gpt2_shape(
            **read_sizes(settings, NANOGPT),
            activation="gelu",
            bias=bias,
            qkv_bias=bias,
            tied_head="lm_head.weight" not in reader,
            dropout=settings.number("dropout", 0.0),
        )
    config, weights = tie_if_equal(config, read_weights(reader, config, NANOGPT))
    training, step = checkpoint.get("config"), checkpoint.get("iter_num")
    training = training if isinstance(training, dict) else {}
    step = step if type(step) is int and step > 0 else 0
    contents = without_tensors(checkpoint)
    return ForeignModel(
        kind="nanoGPT",
        config=config,
        weights=weights,
        dtype=reader.finish(),
        step=step,
        tokens=step * _tokens_per_step(training),
        val_loss=_loss(checkpoint.get("best_val_loss")),
        contents=contents,
        unknown=unknown_settings(collect_settings(contents)),
        facts={"dataset": training["dataset"]} if isinstance(training.get("dataset"), str) else {},
    )


def _tokens_per_step(training: Mapping[Any, Any]) -> int:
    product = 1
    for name in ("gradient_accumulation_steps", "batch_size", "block_size"):
        value = training.get(name)
        if type(value) is not int or value < 1:
            return 0
        product *= value
    return product


def _loss(value: Any) -> float | None:
    """The loss of the best evaluation; None for 1e9, which nanoGPT stores before the first one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
    return float(value) if known else None
