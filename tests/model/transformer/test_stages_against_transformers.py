"""Every stage against hooks on the GPT-2, Llama, Qwen3 and GPT-NeoX (Pythia) of `transformers`,
with random weights in float64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from logitd.model.transformer.attention import RecordingAttend
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import HEADS_FIRST, stages_of
from tests.model.factories import random_ids
from tests.model.transformer.test_against_transformers import (
    VOCAB_SIZE,
    Case,
    gpt2,
    llama,
    neox,
    qwen3,
)

LENGTH = 32

Read = Callable[[Tensor], Tensor]
"""Converts the input or output of a module (T, ...) to a stage (T, ...)."""
Place = tuple[str, str, Read]
"""A module, "input" or "output", and the conversion."""


def same(value: Tensor) -> Tensor:
    return value


def heads(value: Tensor) -> Tensor:
    return value.unflatten(-1, (-1, 8))  # (T, heads, head_dim)


def part(index: int, value: Tensor) -> Tensor:
    """Queries, keys or values of GPT-2's one projection."""
    return heads(value.chunk(3, dim=-1)[index])


def neox_values(value: Tensor) -> Tensor:
    """Values of a projection (T, heads * 3 * head_dim) that holds q, k and v head by head."""
    return value.unflatten(-1, (4, 3, 8))[..., 2, :]


GPT2: Mapping[str, Place] = {
    "attention.norm": ("transformer.h.N.ln_1", "output", same),
    "attention.q": ("transformer.h.N.attn.c_attn", "output", partial(part, 0)),
    "attention.k": ("transformer.h.N.attn.c_attn", "output", partial(part, 1)),
    "attention.v": ("transformer.h.N.attn.c_attn", "output", partial(part, 2)),
    "attention.heads": ("transformer.h.N.attn.c_proj", "input", heads),
    "attention.out": ("transformer.h.N.attn.c_proj", "output", same),
    "middle": ("transformer.h.N.ln_2", "input", same),
    "mlp.norm": ("transformer.h.N.ln_2", "output", same),
    "mlp.pre": ("transformer.h.N.mlp.c_fc", "output", same),
    "mlp.hidden": ("transformer.h.N.mlp.c_proj", "input", same),
    "mlp.out": ("transformer.h.N.mlp.c_proj", "output", same),
    "output": ("transformer.h.N", "output", same),
    "embedding": ("transformer.h.0", "input", same),
    "final_norm": ("transformer.ln_f", "output", same),
}
LLAMA: Mapping[str, Place] = {
    "attention.norm": ("model.layers.N.input_layernorm", "output", same),
    "attention.q_raw": ("model.layers.N.self_attn.q_proj", "output", heads),
    "attention.k_raw": ("model.layers.N.self_attn.k_proj", "output", heads),
    "attention.v": ("model.layers.N.self_attn.v_proj", "output", heads),
    "attention.heads": ("model.layers.N.self_attn.o_proj", "input", heads),
    "attention.out": ("model.layers.N.self_attn.o_proj", "output", same),
    "middle": ("model.layers.N.post_attention_layernorm", "input", same),
    "mlp.norm": ("model.layers.N.post_attention_layernorm", "output", same),
    "mlp.pre": ("model.layers.N.mlp.gate_proj", "output", same),
    "mlp.up": ("model.layers.N.mlp.up_proj", "output", same),
    "mlp.hidden": ("model.layers.N.mlp.down_proj", "input", same),
    "mlp.out": ("model.layers.N.mlp.down_proj", "output", same),
    "output": ("model.layers.N", "output", same),
    "embedding": ("model.layers.0", "input", same),
    "final_norm": ("model.norm", "output", same),
}
NEOX: Mapping[str, Place] = {
    "attention.norm": ("gpt_neox.layers.N.input_layernorm", "output", same),
    "attention.v": ("gpt_neox.layers.N.attention.query_key_value", "output", neox_values),
    "attention.heads": ("gpt_neox.layers.N.attention.dense", "input", heads),
    "attention.out": ("gpt_neox.layers.N.attention.dense", "output", same),
    "mlp.norm": ("gpt_neox.layers.N.post_attention_layernorm", "output", same),
    "mlp.pre": ("gpt_neox.layers.N.mlp.dense_h_to_4h", "output", same),
    "mlp.hidden": ("gpt_neox.layers.N.mlp.dense_4h_to_h", "input", same),
    "mlp.out": ("gpt_neox.layers.N.mlp.dense_4h_to_h", "output", same),
    "output": ("gpt_neox.layers.N", "output", same),
    "embedding": ("gpt_neox.layers.0", "input", same),
    "final_norm": ("gpt_neox.final_layer_norm", "output", same),
}


class Recorder:
    """A tap that keeps every value, positions first."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def wants(self, layer: int | None, stage: str) -> bool:
        return True

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        name = stage if layer is None else f"blocks.{layer}.{stage}"
        self.values[name] = value[0].transpose(0, 1) if stage in HEADS_FIRST else value[0]
        return value


def our_stages(gpt: GPT, ids: Tensor) -> dict[str, Tensor]:
    recorder, attend = Recorder(), RecordingAttend()
    positions = torch.arange(ids.shape[1])[None]
    final = gpt.transform(ids, positions, attend, tap=recorder)
    for layer, probs in enumerate(attend.probs):
        recorder(layer, "attention.probs", probs)
    return recorder.values | {"logits": gpt.logits(final)[0]}


def their_stages(theirs: Any, ids: Tensor, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Stages by our names, with the attention weights and rotated keys that their models return."""
    seen: dict[str, Tensor] = {}
    handles = []
    for kind, (path, side, read) in places.items():
        for layer in range(3) if "N" in path else [None]:
            name = kind if layer is None else f"blocks.{layer}.{kind}"
            module: nn.Module = theirs.get_submodule(path.replace("N", str(layer)))

            def take(
                module: nn.Module, given: Any, gave: Any,
                name: str = name, side: str = side, read: Read = read,
            ) -> None:  # fmt: skip
                value = given if side == "input" else gave
                seen[name] = read((value[0] if isinstance(value, tuple) else value)[0])

            handles.append(module.register_forward_hook(take))
    output = theirs(ids, output_attentions=True, use_cache=True)
    for handle in handles:
        handle.remove()
    for layer, probs in enumerate(output.attentions):
        seen[f"blocks.{layer}.attention.probs"] = probs[0].transpose(0, 1)
    if "attention.k_raw" in places:
        for layer, cached in enumerate(output.past_key_values.layers):
            seen[f"blocks.{layer}.attention.k"] = cached.keys[0].transpose(0, 1)
    return seen | {"logits": output.logits[0]}


@pytest.mark.parametrize(
    ("make", "places", "without"),
    [
        (gpt2, GPT2, {"scores", "head_out"}),
        (llama, LLAMA, {"scores", "head_out", "q"}),
        (qwen3, LLAMA, {"scores", "head_out", "q"}),
        (partial(neox, share=0.5), NEOX, {"scores", "head_out", "q", "k", "q_raw", "k_raw",
                                          "middle"}),
        (partial(neox, use_parallel_residual=False),
         {**NEOX, "middle": ("gpt_neox.layers.N.post_attention_layernorm", "input", same)},
         {"scores", "head_out", "q", "k", "q_raw", "k_raw"}),
    ],
    ids=["gpt2", "llama", "qwen3", "pythia", "neox-sequential"],
)  # fmt: skip
def test_every_stage_equals_a_hooks_input(
    make: Callable[[], Case], places: Mapping[str, Place], without: set[str]
) -> None:
    """`without` names stages that are no input or output of a module: scores, each head's part of
    the output, rotated queries (the weights contain their products with the keys)."""
    gpt, theirs = make()
    gpt, theirs = gpt.double(), theirs.double()
    ids = random_ids(1, LENGTH, vocab_size=VOCAB_SIZE)
    ours, expected = our_stages(gpt, ids), their_stages(theirs, ids, places)
    for name, value in expected.items():
        assert_close(ours[name], value, atol=1e-6, rtol=1e-6, msg=partial("{}: {}".format, name))
    missed = {stage.kind.name for stage in stages_of(gpt.config) if stage.name not in expected}
    assert {name.removeprefix("attention.") for name in missed} == without
