"""nanoGPT's `ckpt.pt`: GPT-2's shape, with or without biases, and GELU: the exact one, or the tanh
approximation if the checkpoint is older than the setting `bias`.

The optimizer's state is not imported. Recognition by role (`by_role/`) cannot replace this reader:
it would have to ask the user for the activation and the position of the norms, and it does not
check shapes against `model_args`. A changed copy of nanoGPT is recognized by role if it has other
tensors, or if its settings state another computation: `model_args`, or `config`, which has all
settings of the training.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.stated import (
    is_off,
    may_be_optimizers,
    setting,
    settings_of,
    states_rms,
)
from logitd.model.convert.collected_settings import collect_settings
from logitd.model.convert.containers import container_of
from logitd.model.convert.foreign import (
    ForeignModel,
    Settings,
    StateDictReader,
    count_or_zero,
    naming,
    plausible_loss,
)
from logitd.model.convert.layouts import NANOGPT, read_sizes, read_weights, tie_if_equal
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.convert.state_file import named_tensors, tensors_left_out
from logitd.model.convert.unknown_settings import FLAGS, unknown_settings
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.shapes import gpt2_shape

OWN_COMPUTATION: Mapping[str, Any] = {
    "activation": "gelu",
    "norm_first": True,
    "norm_eps": 1e-5,
    "qk_norm": False,
}
"""nanoGPT's values of the fields whose effect the tensors do not show."""
EXACT_GELU = (
    "assumed: the exact GELU; nanoGPT of 27 January to 17 May 2023 computed its tanh "
    "approximation, and its files look the same (--activation gelu_tanh)"
)
_TENSORS = re.compile(
    r"transformer\.((wte|wpe)\.weight|(ln_f|h\.\d+\.(ln_[12]|(attn\.c_attn|(attn|mlp)\.c_proj|"
    r"mlp\.c_fc)))\.(weight|bias)|h\.\d+\.attn\.bias)|lm_head\.weight"
)
"""Names of nanoGPT's tensors, and of the causal mask in old versions."""
_NAMES_OF_OWN = frozenset(name for field in OWN_COMPUTATION for name in words.SETTINGS[field])


def read_nanogpt(path: Path) -> ForeignModel | None:
    """Read a checkpoint that nanoGPT's train.py saved; None if the file lacks nanoGPT's keys, has
    other tensors, or states another computation. Raises ConvertError."""
    if container_of(path) != "torch":
        return None
    checkpoint = read_pt(path)
    state, arguments = checkpoint.get("model"), checkpoint.get("model_args")
    if not isinstance(state, dict) or not isinstance(arguments, dict):
        return None
    known = {"n_layer", "n_head", "n_embd", "block_size"} <= arguments.keys()
    if not known or not any(str(n).endswith("transformer.h.0.ln_1.weight") for n in state):
        return None
    stated = collect_settings(checkpoint)
    others = [name for name in _others_of(stated) if not may_be_optimizers(name, stated)]
    if others or any(_others_of(arguments)) or states_rms(stated):
        return None
    settings = Settings(f"model_args of {path}", arguments)
    tensors = named_tensors(str(path), state)
    usual = "transformer.wpe.weight" in tensors and all(map(_TENSORS.fullmatch, tensors))
    if not usual or not ("bias" in arguments or "transformer.h.0.ln_1.bias" in tensors):
        return None
    bias = settings.flag("bias", True)
    reader = StateDictReader(str(path), tensors)
    reader.ignore(".attn.bias")  # the causal mask, in old versions
    # nanoGPT has had `bias` since 2023-01-27, and the exact GELU since 2023-05-17.
    assumed = setting(stated, "activation")[0] is None
    approximate = assumed and "bias" not in arguments
    with naming(f"model_args of {path}"):
        config = gpt2_shape(
            **read_sizes(settings, NANOGPT),
            activation="gelu_tanh" if approximate else "gelu",
            bias=bias,
            qkv_bias=bias,
            tied_head="lm_head.weight" not in reader,
            dropout=settings.number("dropout", 0.0),
        )
    config, weights = tie_if_equal(config, read_weights(reader, config, NANOGPT))
    unread = {
        name: value
        for name, value in settings.unread().items()
        if name.lower() not in _NAMES_OF_OWN
    }
    training, step = checkpoint.get("config"), count_or_zero(checkpoint.get("iter_num"))
    training = training if isinstance(training, dict) else {}
    per_step = ("gradient_accumulation_steps", "batch_size", "block_size")
    contents = without_tensors(checkpoint)
    return ForeignModel(
        kind="nanoGPT",
        config=config,
        weights=weights,
        dtype=reader.finish(),
        step=step,
        tokens=step * math.prod(count_or_zero(training.get(name)) for name in per_step),
        val_loss=plausible_loss(checkpoint.get("best_val_loss")),
        contents=contents,
        unknown=_unknown_outside(checkpoint, arguments, config)
        | unknown_settings(unread)
        | _other_computation(unread, config.context_length),
        facts={"dataset": training["dataset"]} if isinstance(training.get("dataset"), str) else {},
        notes=[
            *tensors_left_out(path, checkpoint, "model"),
            *([EXACT_GELU] if assumed and not approximate else []),
        ],
    )


def _others_of(
    settings: Mapping[str, Any], own: Mapping[str, Any] = OWN_COMPUTATION
) -> Iterator[str]:
    """The names of settings whose values differ from `own`, the values of fields."""
    for field, value in own.items():
        yield from (name for name, stated in settings_of(field, settings) if stated != value)


def _unknown_outside(
    checkpoint: Mapping[str, Any], arguments: Mapping[str, Any], config: GPTConfig
) -> dict[str, Any]:
    """The settings outside `model_args` that are not understood."""
    settings = collect_settings(checkpoint, of_model_alone=True)
    heads = {"n_head": config.n_head, "n_kv_head": config.n_head, "head_dim": config.head_dim}
    own = {**OWN_COMPUTATION, **heads}
    others = set(_others_of(settings, own))
    agreed = {name for field in own for name, _ in settings_of(field, settings)} - others
    outside = {
        name: value
        for name, value in settings.items()
        if name not in arguments and name not in agreed
        if not (is_off(value) and any(flag.fullmatch(name.lower()) for flag in FLAGS))
    }
    positions = {
        name: value
        for name, value in outside.items()
        if isinstance(value, str) and words.matches(words.POSITIONS, name)
        if value.lower() not in ("learned", "absolute")
    }
    return unknown_settings(outside) | positions


def _other_computation(unread: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """The settings of a changed copy that may name another computation: nanoGPT's model_args have
    no text, and one length."""
    return {
        name: value
        for name, value in unread.items()
        if isinstance(value, str)
        or (name.lower() in words.SETTINGS["context_length"] and value != context_length)
    }
