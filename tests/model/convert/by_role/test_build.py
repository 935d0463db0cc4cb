"""The logits of imported GPTs are compared with the logits of textbook models with the same
weights, for every change that `model/convert/by_role/build.py` makes to weights. The comparison is
in float64, except for rotary positions, whose tables are float32 in this project. Every model is
also compared in float32."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitd.model.convert.by_role.build import Built, build, head_shape
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.gpt import GPT
from tests.model.convert.by_role.scheme import (
    Scheme,
    built_from,
    given_logits,
    largest_difference,
    mapped,
    our_logits,
    some_ids,
    state,
)
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.common import VOCAB, randomized
from tests.model.convert.by_role.textbook.nanogpt import Nano, NanoConfig


def logits_in_float64(built: Built, ids: Tensor) -> Tensor:
    """The logits of the built model in float64. The head's bias is added here, not by the model.
    Gradients stay enabled, because without them the model rounds activations to float32."""
    weights = {name: weight.double() for name, weight in built.weights.items()}
    bias = weights.pop("head.bias", torch.zeros(VOCAB, dtype=torch.float64))
    gpt = GPT(replace(built.config, head_bias=False)).double()
    gpt.load_state_dict(weights)
    return (gpt.eval()(ids).logits + bias).detach()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_built_model_gives_the_logits_of_its_source(scheme: Scheme) -> None:
    model, ids = scheme.model(), some_ids()
    built = built_from(scheme, model)
    difference = largest_difference(our_logits(built, ids), given_logits(scheme, model, ids))
    assert difference < 1e-5


@pytest.mark.parametrize(
    "name", [n for n, s in SCHEMES.items() if s.computation.positions != "rotary"]
)
def test_folds_are_exact_to_the_rounding_of_float64(name: str) -> None:
    scheme, ids = SCHEMES[name], some_ids()
    model = scheme.model(seed=1).double()
    built = built_from(scheme, model)
    assert {weight.dtype for weight in built.weights.values()} <= {torch.float64, torch.float32}
    theirs = given_logits(scheme, model, ids)
    assert theirs.dtype == torch.float64
    assert largest_difference(logits_in_float64(built, ids), theirs) < 1e-10


@pytest.mark.parametrize("name", ["book", "heads with biases", "no second matrix"])
def test_silu_without_a_gate_is_a_gate_of_ones(name: str) -> None:
    """No variant had it, so for a model with the SiLU a text could speak for GELU."""
    scheme = replace(SCHEMES[name], how={**SCHEMES[name].how, "activation": "silu"})
    model, ids = scheme.model(), some_ids()
    built = built_from(scheme, model)
    difference = largest_difference(our_logits(built, ids), given_logits(scheme, model, ids))
    assert difference < 1e-5
    assert any("a gate of ones" in fold for fold in built.folds)


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("book", {"activation": "gelu"}),
    ("book", {"activation": "relu"}),
    ("book", {"activation": "relu2"}),
    ("book", {"activation": "silu"}),
    ("book", {"norm_position": "post"}),
    ("book", {"final_norm": False}),
    ("book", {"score_scale": "d_model"}),
    ("book", {"score_scale": "none"}),
    ("book", {"n_head": 2}),
    ("book", {"norm_eps": 1e-2}),
    ("book", {"residual": "parallel"}),
    ("book", {"positions": "none"}),
    ("book", {"positions": "sinusoidal"}),
    ("book", {"embedding_scale": "sqrt_d_model"}),
    ("book", {"qk_norm": "unit"}),
    ("lecture", {"score_scale": "head_dim"}),
    ("nanoGPT", {"activation": "gelu_tanh"}),
    ("nanoGPT", {"qkv_layout": "kqv"}),
    ("nanoGPT", {"qkv_layout": "per_head"}),
    ("llama2.c", {"norm": "layernorm"}),
    ("llama2.c", {"rotary_layout": "half"}),
    ("llama2.c", {"rotary_direction": "backward"}),
    ("llama2.c", {"rope_theta": 9_000.0}),
    ("llama2.c", {"gate_order": "up_first"}),
    ("sines, then cosines", {"positions": "sinusoidal"}),
    ("llama, QK-norm without weights", {"qk_norm": "none"}),
    ("llama, QK-norm without weights", {"qk_norm_eps": 1e-6}),
    ("gate and up together, no positions", {"gate_order": "gate_first"}),
)


@pytest.mark.parametrize(("name", "wrong"), VARIANTS)
def test_wrong_computation_has_other_logits(name: str, wrong: dict[str, Any]) -> None:
    scheme, ids = SCHEMES[name], some_ids()
    model = scheme.model()
    built = built_from(scheme, model, **wrong)
    difference = largest_difference(our_logits(built, ids), given_logits(scheme, model, ids))
    assert difference > 1e-4


FOLDS = {
    "lecture": ("4 heads stacked", r"query rows scaled: .* by sqrt\(d_model\)"),
    "llama2.c": ("rows of query and key reordered: the source rotates adjacent channels",),
    "torch, post-LN": (r"the embedding times sqrt\(32\)",),
    "sines, then cosines": (r"sinusoidal table \(sines, then cosines\) stored as learned",),
    "fused, head by head": ("rows of the fused query, key and value reordered from per_head",),
    "fused, keys first": ("rows of the fused query, key and value reordered from kqv",),
    "llama, QK-norm without weights": ("ones as norms of query and key", "have eps 0.03 in the"),
    "llama, QK-norm, neighbors, backward": ("rotates adjacent", "rotates backward"),
    "modded-nanogpt": ("halves of the heads of query and key exchanged: .* rotates backward",),
    "llama, final norm without weights": ("ones as the norm behind the layers",),
    "one wide head": ("the identity as the output projection of attention",),
    "no second matrix": ("the identity as the second matrix of the feed-forward",),
    "one norm for both": ("one norm for attention and feed-forward: stored twice",),
    "gate and up together, no positions": (
        "zeros as positions", "query rows scaled: .* by nothing", "zeros for biases.*attention_out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_every_change_of_weights_is_reported(name: str) -> None:
    scheme = SCHEMES[name]
    folds = built_from(scheme, scheme.model()).folds
    for expected in FOLDS.get(name, ()):
        assert any(re.search(expected, fold) for fold in folds), (expected, folds)
    if name in ("book", "nanoGPT", "minGPT", "llama", "raw parameters"):
        assert folds == ()


def test_equal_weights_of_norms_commute_with_rotary_positions() -> None:
    """Norms after rotary positions were computed before, whatever their weights."""
    after = {**SCHEMES["llama, QK-norm"].how, "qk_norm_position": "after_rotary"}
    scheme = replace(SCHEMES["llama, QK-norm"], how=after)
    model, ids = scheme.model(), some_ids()
    with pytest.raises(ConvertError, match=r"qk_norm_position is after_rotary, .* --run-code"):
        built_from(scheme, model)
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            weight.fill_(1.5)
    difference = largest_difference(
        our_logits(built_from(scheme, model), ids), given_logits(scheme, model, ids)
    )
    assert difference < 1e-5


def test_biases_that_some_parts_have_are_zeros_elsewhere() -> None:
    """Only the first feed-forward matrix has a bias; the norms have none."""
    model = randomized(Nano(NanoConfig(bias=False)))
    scheme = SCHEMES["nanoGPT"]
    bias = {}
    for layer in range(2):
        linear = model.get_submodule(f"transformer.h.{layer}.mlp.c_fc")
        linear.bias = nn.Parameter(torch.linspace(-1, 1, 128), requires_grad=False)
        bias[layer] = linear.bias
    built = built_from(scheme, model)
    assert built.config.bias
    assert torch.equal(built.weights["blocks.1.mlp_up.bias"], bias[1])
    assert not built.weights["blocks.1.mlp_down.bias"].any()
    assert not built.weights["blocks.0.attention_norm.bias"].any()
    ids = some_ids()
    theirs = given_logits(scheme, model, ids)
    assert largest_difference(our_logits(built, ids), theirs) < 1e-5


def test_biases_of_some_of_query_key_and_value() -> None:
    """Whisper's attention has no key bias."""
    model = SCHEMES["post-LN and a final norm"].model()
    for layer in range(2):
        key = model.get_submodule(f"blocks.{layer}.attn.W_k")
        key.bias = None  # type: ignore[assignment]
    built = built_from(SCHEMES["post-LN and a final norm"], model)
    assert built.config.qkv_bias
    ids = some_ids()
    theirs = given_logits(SCHEMES["post-LN and a final norm"], model, ids)
    assert largest_difference(our_logits(built, ids), theirs) < 1e-5


def test_head_equal_to_the_embedding_is_tied() -> None:
    """nanoGPT's file has the same matrix twice. If one value differs, the head is untied."""
    model = SCHEMES["nanoGPT"].model()
    assert built_from(SCHEMES["nanoGPT"], model).config.tied_head
    tensors = state(model)
    tensors["lm_head.weight"][0, 0] += 1
    own = MappedTensors("model.pt", tensors, mapped(model).map)
    built = build(own, SCHEMES["nanoGPT"].computation)
    assert not built.config.tied_head
    assert torch.equal(built.weights["head.weight"], tensors["lm_head.weight"])


def test_context_can_be_shortened_but_not_extended() -> None:
    model = SCHEMES["nanoGPT"].model()
    built = built_from(SCHEMES["nanoGPT"], model, context_length=9)
    assert built.config.context_length == 9
    assert built.weights["position_embedding.weight"].shape == (9, 32)
    with pytest.raises(ConvertError, match=r"context_length is 17, .* 16 rows"):
        built_from(SCHEMES["nanoGPT"], model, context_length=17)


def test_dropout_is_kept_for_resuming() -> None:
    tensors = mapped(SCHEMES["book"].model())
    assert build(tensors, SCHEMES["book"].computation, dropout=0.25).config.dropout == 0.25


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, None), (2, 1), (4, 2), (8, 4)])
def test_heads_divide_queries_and_keys_alike(heads: int, kv_heads: int | None) -> None:
    tensors = mapped(SCHEMES["llama2.c"].model())  # 32 rows of queries, 16 of keys
    if kv_heads is None:
        with pytest.raises(ConvertError, match="32 query rows and 16 key rows cannot be"):
            head_shape(tensors, heads)
    else:
        shape = head_shape(tensors, heads)
        assert (shape.n_kv_head, shape.head_dim) == (kv_heads, 32 // heads)


@pytest.mark.parametrize("heads", [0, 3, 64])
def test_heads_that_do_not_divide_are_refused(heads: int) -> None:
    with pytest.raises(ConvertError, match=f"cannot be divided among {heads} heads"):
        head_shape(mapped(SCHEMES["book"].model()), heads)


def changed(tensors: MappedTensors, **shapes: tuple[int, ...]) -> MappedTensors:
    """The tensors, with the weights of the given roles replaced by tensors of new shapes."""
    new = dict(tensors.tensors)
    for role, shape in shapes.items():
        for layer in range(2):
            new[tensors.map.of(role, "weight", layer)[0]] = torch.ones(shape)  # type: ignore[arg-type]
    return MappedTensors(tensors.where, new, tensors.map)


def test_impossible_folds_are_refused_with_numbers() -> None:
    fused = mapped(SCHEMES["fused, head by head"].model())
    how = SCHEMES["fused, head by head"].computation
    with pytest.raises(ConvertError, match="has 95 rows, but attention's output has 32"):
        build(changed(fused, qkv=(95, 32)), how)
    with pytest.raises(
        ConvertError, match=r"4 query heads and 2 key heads; .* only if the two numbers are equal"
    ):
        build(changed(fused, qkv=(64, 32)), how)
    bare = SCHEMES["no second matrix"]
    with pytest.raises(ConvertError, match="one matrix of 48 rows, but the residual stream is 32"):
        build(changed(mapped(bare.model()), mlp_up=(48, 32)), bare.computation)
    head = mapped(SCHEMES["book"].model())
    with pytest.raises(
        ConvertError, match=r"the head has shape \[30, 32\] and the token embedding"
    ):
        build(changed(head, head=(30, 32)), SCHEMES["book"].computation)
    normed = mapped(SCHEMES["llama, QK-norm"].model())
    with pytest.raises(
        ConvertError, match="has 32 elements; norms of queries and keys must be RMS"
    ):
        build(changed(normed, query_norm=(32,)), SCHEMES["llama, QK-norm"].computation)
