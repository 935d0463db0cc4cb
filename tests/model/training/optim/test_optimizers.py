"""Initial weights, parameter groups and the learning rate."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Muon

from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.optim import muon
from logitd.model.training.optim.optimizers import Optimizers, initialize, kind_of
from logitd.model.training.optim.schedule import (
    HEAD_STEPS,
    Rewarming,
    head_scale,
    lr_scale,
    window_length,
)
from logitd.model.training.step.forward import native_bfloat16
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import MODERN, gpt2_shape
from tests.model.shapes import TOGETHER

RECIPE = PRESETS["tiny"].recipe


def _gpt(**overrides: Any) -> GPT:
    shape = {**MODERN, "n_kv_head": 1, **overrides}
    torch.manual_seed(0)
    config = gpt2_shape(vocab_size=100, context_length=16, n_layer=2, n_head=2, d_model=32, **shape)
    gpt = GPT(config)
    initialize(gpt, RECIPE, torch.Generator().manual_seed(1))
    return gpt


def _loss(gpt: GPT) -> Tensor:
    ids = torch.arange(32).view(2, 16)
    return F.cross_entropy(gpt(ids).logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("name", "tied", "expected"),
    [
        ("token_embedding.weight", False, "embedding"),
        ("token_embedding.weight", True, "head"),
        ("head.weight", False, "head"),
        ("position_embedding.weight", False, "embedding"),
        ("blocks.1.value_embedding.weight", False, "embedding"),
        ("blocks.1.value_gate.weight", False, "scalar"),
        ("blocks.1.value_embedding.map", False, "matrix"),
        ("blocks.0.qkv.weight", False, "matrix"),
        ("blocks.0.qkv.bias", False, "scalar"),
        ("blocks.0.mlp_down.weight", False, "matrix"),
        ("blocks.0.query_norm.weight", False, "scalar"),
        ("final_norm.weight", False, "scalar"),
        ("head.bias", False, "scalar"),
        ("head.bias", True, "scalar"),
        ("embedding_norm.weight", True, "scalar"),
        ("smear_gate.weight", False, "scalar"),
        ("smear_scale", False, "scalar"),
        ("residual_scales", False, "scalar"),
        ("embedding_scales", False, "scalar"),
        ("backout_scale", False, "scalar"),
    ],
)
def test_parameter_has_its_kind(name: str, tied: bool, expected: str) -> None:
    assert kind_of(_gpt(tied_head=tied, head_bias=True, **TOGETHER), name) == expected


def test_blocks_begin_as_the_identity_drawn_from_the_generator() -> None:
    before = torch.get_rng_state()
    gpt = GPT(_gpt().config)
    torch.set_rng_state(before)
    initialize(gpt, RECIPE, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    states = gpt(torch.arange(8)[None], hidden_states=True).hidden_states
    assert states is not None
    assert torch.equal(states[0], states[-1])
    again = _gpt()
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_muon_orthogonalizes_query_key_and_value_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fused matrix changes as if it were three matrices, each updated by torch's Muon.

    The bits are equal if the processor multiplies bfloat16. Otherwise our update is computed in
    float32, but torch's in bfloat16, and the two differ by a few hundredths of a step. If the fused
    matrix were orthogonalized as one matrix, they would differ by more than a tenth.
    """
    monkeypatch.setattr(muon, "ITERATIONS", ((3.4445, -4.7750, 2.0315),) * 5)  # torch's
    gpt = _gpt()
    torch.nn.init.normal_(gpt.blocks[0].attention_out.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    fused = gpt.get_parameter("blocks.0.qkv.weight")
    parts = [torch.nn.Parameter(rows.clone()) for rows in fused.detach().split([32, 16, 16])]
    oracle = Muon(parts, lr=RECIPE.matrix_lr, momentum=RECIPE.momentum, weight_decay=0.0)
    optimizers = Optimizers(gpt, RECIPE)
    for _ in range(2):
        _loss(gpt).backward()
        assert fused.grad is not None
        for part, rows in zip(parts, fused.grad.split([32, 16, 16]), strict=True):
            part.grad = rows.clone()
        oracle.step()
        optimizers.step(1.0)
        assert fused.grad is None
    same_bits = native_bfloat16(torch.device("cpu"))
    tolerance = 0.0 if same_bits else 0.05 * RECIPE.matrix_lr
    torch.testing.assert_close(fused, torch.cat([*parts]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"activation": "swiglu"},
        {"tied_head": True, "bias": True, "head_bias": True},
        {"residual": "parallel", "head_bias": True, "final_norm": False},
        {"value_embeddings": "all"},
        TOGETHER,
    ],
)
def test_every_parameter_is_trained_by_one_optimizer(optimizer: str, shape: dict[str, Any]) -> None:
    gpt = _gpt(**shape)
    optimizers = Optimizers(gpt, replace(RECIPE, optimizer=optimizer))  # type: ignore[arg-type]
    trained = sum(
        parameter.numel()
        for each in optimizers.all.values()
        for group in each.param_groups
        for parameter in group["params"]
    )
    assert trained == gpt.parameter_count()
    before = {name: value.clone() for name, value in gpt.state_dict().items()}
    for _ in range(3):  # zero-initialized projections pass gradients on from the second step
        _loss(gpt).backward()
        optimizers.step(1.0)
    for name, value in gpt.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_each_kind_has_its_scheduled_learning_rate() -> None:
    gpt = _gpt()
    optimizers = Optimizers(gpt, RECIPE)
    _loss(gpt).backward()
    optimizers.step(0.5, head_scale=0.25)
    rates = {
        group["kind"]: group["lr"]
        for each in optimizers.all.values()
        for group in each.param_groups
    }
    assert rates == {
        "matrix": RECIPE.matrix_lr / 2,
        "embedding": RECIPE.embedding_lr / 2,
        "head": RECIPE.head_lr / 8,
        "scalar": RECIPE.scalar_lr / 2,
    }


@pytest.mark.parametrize(
    ("decay", "done", "expected"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.0, 1.0),
        ("linear", 0.4, 1.0),
        ("linear", 0.7, 0.55),
        ("linear", 1.0, 0.1),
        ("cosine", 0.0, 1.0),
        ("cosine", 0.5, 0.55),
        ("cosine", 1.0, 0.1),
    ],
)
def test_learning_rate_falls_as_configured(decay: Any, done: float, expected: float) -> None:
    recipe = replace(RECIPE, decay=decay, cooldown=0.6, final_lr=0.1, warmup=0)
    assert lr_scale(recipe, 100, done) == pytest.approx(expected)


def test_warmup_rises_to_the_peak() -> None:
    recipe = replace(RECIPE, decay="constant", warmup=4)
    shares = [lr_scale(recipe, step, 0.0) for step in range(6)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("context_length", "done", "expected"),
    [(2048, 0.0, 512), (2048, 0.59, 512), (2048, 0.6, 2048), (256, 0.0, 128), (100, 0.0, 100)],
)
def test_short_windows_have_a_quarter_of_the_context_but_no_fewer_than_128_positions(
    context_length: int, done: float, expected: int
) -> None:
    recipe = replace(RECIPE, short_windows=0.6)
    assert window_length(recipe, context_length, done) == expected


def test_windows_stay_long_where_they_are_not_short_at_first() -> None:
    """An extended run has completed a smaller share than before, but has seen long windows."""
    extended = Rewarming(done=0.2, scale=0.1, span=0.05)
    assert window_length(replace(RECIPE, short_windows=0.6), 2048, 0.2, extended) == 2048
    assert window_length(replace(RECIPE, short_windows=0.0), 2048, 0.0) == 2048


@pytest.mark.parametrize(
    ("optimizer", "decaying"),
    [("muon", {"matrix"}), ("adamw", {"matrix", "embedding", "head"})],
)
def test_norms_biases_and_scales_do_not_decay(optimizer: Any, decaying: set[str]) -> None:
    gpt = _gpt(bias=True, head_bias=True, **TOGETHER)
    optimizers = Optimizers(gpt, replace(RECIPE, optimizer=optimizer, weight_decay=0.5))
    for parameter in gpt.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(1.0)
    for name, parameter in gpt.named_parameters():
        assert bool((parameter < 1).all()) == (kind_of(gpt, name) in decaying), name


def test_learned_scales_begin_at_those_of_nanochat() -> None:
    state = _gpt(**TOGETHER, tied_head=True).state_dict()
    expected = {
        "residual_scales": [1.15, 1.05],
        "embedding_scales": [0.20, 0.05],
        "smear_scale": [0.0],
        "backout_scale": [0.2],
    }
    for name, values in expected.items():
        torch.testing.assert_close(state[name], torch.tensor(values))
    assert not state["smear_gate.weight"].any()


def test_gpt2_initialization_has_the_spread_of_gpt2() -> None:
    gpt = _gpt()
    initialize(gpt, replace(RECIPE, init="gpt2"), torch.Generator().manual_seed(1))
    assert float(gpt.token_embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    out = gpt.get_parameter("blocks.0.mlp_down.weight")
    assert float(out.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_rate_of_the_head_falls_to_half_with_muon_alone() -> None:
    shares = [head_scale(RECIPE, step) for step in (0, HEAD_STEPS, 100 * HEAD_STEPS)]
    assert shares == pytest.approx([1.0, (1 + math.exp(-1)) / 2, 0.5])
    assert head_scale(replace(RECIPE, optimizer="adamw"), 100 * HEAD_STEPS) == 1.0
