"""LoRA: adapters are compared with the matrices that they are merged into."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import (
    LoraError,
    LoraShape,
    adapt,
    is_adapted,
    load_trained_weights,
    merge_into,
    trained_weights,
)
from logitd.model.transformer.size import parameter_count
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.profiles import examples

SHAPE = LoraShape(rank=3, alpha=6.0, targets=TARGETS)


def adapted(gpt: GPT, shape: LoraShape = SHAPE, *, b: float = 0.0) -> GPT:
    """A GPT with adapters. If `b` is not 0, it is the standard deviation of the matrices that would
    otherwise start as zero."""
    draw = torch.Generator().manual_seed(1)
    adapt(gpt, shape, draw)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if b and name.endswith("lora_b"):
                parameter.normal_(std=b, generator=draw)
    return gpt


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_no_bit(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    ids = random_ids(2, 20)
    before = tiny_gpt(config)(ids).logits
    assert torch.equal(adapted(tiny_gpt(config))(ids).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_model_matches_the_adapted_one(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    ids = random_ids(2, 20)
    gpt = adapted(tiny_gpt(config), b=0.05)
    merged = tiny_gpt(config)
    plain = merged(ids).logits
    merge_into(merged, SHAPE, trained_weights(gpt))
    logits = gpt(ids).logits
    assert (logits - plain).abs().max() > 0.05, "the adapters do something"
    # These weights are so large that attention amplifies the rounding.
    error = (merged(ids).logits - logits).abs().max() / logits.abs().max()
    assert error < 1e-5


@settings(max_examples=examples(15))
@given(
    rank=st.integers(1, 8),
    alpha=st.floats(0.5, 20),
    targets=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
)
def test_any_rank_alpha_and_targets_merge(rank: int, alpha: float, targets: list[Any]) -> None:
    """Each map of a fused matrix has its own low-rank product, computed here row by row."""
    shape = LoraShape(rank, alpha, tuple(targets))
    config = tiny_config(n_layer=1, n_kv_head=2, activation="swiglu")
    weights = trained_weights(adapted(tiny_gpt(config), shape, b=0.05))
    merged, plain = tiny_gpt(config), tiny_gpt(config)
    merge_into(merged, shape, weights)
    heights = {"qkv": [32, 16, 16], "attention_out": [32], "mlp_up": [128, 128], "mlp_down": [32]}
    for target in TARGETS:
        matrix = getattr(plain.blocks[0], target).weight.clone()
        if target in targets:
            a, b = (weights[f"blocks.0.{target}.lora_{matrix}"] for matrix in "ab")
            row = 0
            for number, height in enumerate(heights[target]):
                for _ in range(height):
                    matrix[row] += alpha / rank * (b[row] @ a[number])
                    row += 1
        torch.testing.assert_close(getattr(merged.blocks[0], target).weight, matrix)


def test_only_adapters_get_gradients() -> None:
    gpt = adapted(tiny_gpt(), LoraShape(2, 2.0, ("qkv", "mlp_down")), b=0.1)
    gpt(random_ids(2, 8)).logits.square().mean().backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.requires_grad == name.endswith(("lora_a", "lora_b"))
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert {name.split(".")[2] for name in trained_weights(gpt)} == {"qkv", "mlp_down"}


def test_trained_weights_are_saved_and_loaded() -> None:
    plain, adapted_once, other = tiny_gpt(), adapted(tiny_gpt(), b=0.1), adapted(tiny_gpt())
    assert not is_adapted(plain)
    assert set(trained_weights(plain)) == set(plain.state_dict())
    assert (
        parameter_count(adapted_once.config)
        == plain.parameter_count()
        < adapted_once.parameter_count()
    )
    ids = random_ids(1, 8)
    load_trained_weights(other, trained_weights(adapted_once))
    assert torch.equal(other(ids).logits, adapted_once(ids).logits)
    with pytest.raises(RuntimeError, match="missing or unknown"):
        load_trained_weights(plain, trained_weights(adapted_once))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "rank.*0"),
        ({"alpha": 0.0}, "alpha.*0"),
        ({"targets": ()}, "targets"),
        ({"targets": ("qkv", "qkv")}, "once"),
        ({"targets": ("query",)}, "query.*qkv"),
    ],
)
def test_impossible_adapters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LoraError, match=message):
        replace(SHAPE, **wrong)


def test_rank_above_the_full_rank_is_refused() -> None:
    config = tiny_config(n_kv_head=1)  # keys of 8 rows
    adapt(tiny_gpt(config), LoraShape(8, 1.0, TARGETS), torch.Generator())
    with pytest.raises(LoraError, match=r"rank.*9.*qkv.*8 rows"):
        adapt(tiny_gpt(config), LoraShape(9, 1.0, TARGETS), torch.Generator())


def test_adapters_of_another_shape_are_refused() -> None:
    weights = trained_weights(adapted(tiny_gpt()))
    with pytest.raises(LoraError, match=r"blocks\.0\.qkv.*rank 2.*\(3, 2, 32\)"):
        merge_into(tiny_gpt(), replace(SHAPE, rank=2), weights)
    with pytest.raises(LoraError, match="18 tensors"):
        merge_into(tiny_gpt(), replace(SHAPE, targets=("qkv",)), weights)
    del weights["blocks.2.mlp_up.lora_b"]
    with pytest.raises(LoraError, match=r"blocks\.2\.mlp_up.*None"):
        merge_into(tiny_gpt(), SHAPE, weights)
