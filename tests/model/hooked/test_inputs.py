"""Inputs of a hooked GPT: padding, and the separate copies of the residual stream that heads and
MLPs read."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.hooked.model import HookedGPT
from logitd.model.inference.errors import InvalidRequest
from tests.model.covering import SOME_FAMILIES
from tests.model.factories import FAMILIES, byte_tokenizer, random_ids, tiny_config, tiny_gpt

TEXTS = ["The cat sat; the cat", "abcde", "x"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> HookedGPT:
    gpt = tiny_gpt(tiny_config(**FAMILIES[request.param])).double()
    return HookedGPT(gpt, byte_tokenizer(), "tiny")


few = pytest.mark.parametrize("model", SOME_FAMILIES, indirect=True)
"""Mark of a test that needs only a few families in the quick set."""


@few
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_text(model: HookedGPT, side: Any) -> None:
    logits, cache = model.run_with_cache(TEXTS, padding_side=side)
    losses = model(TEXTS, return_type="loss", loss_per_token=True, padding_side=side)
    total = 0.0
    for row, text in enumerate(TEXTS):
        alone, own = model.run_with_cache(text)
        length = alone.shape[1]
        where = slice(-length, None) if side == "left" else slice(length)
        assert_close(logits[row, where], alone[0], rtol=0, atol=1e-9)
        for name in ("blocks.1.attn.hook_z", "blocks.2.hook_resid_post"):
            assert_close(cache[name][row, where], own[name][0], rtol=0, atol=1e-9)
        pattern = cache["pattern", 2][row, :, where, where]
        assert_close(pattern, own["pattern", 2][0], rtol=0, atol=1e-9)
        assert losses[row].count_nonzero() == length - 1
        total += model(text, return_type="loss") * (length - 1)
    mean = model(TEXTS, return_type="loss", padding_side=side)
    assert_close(mean, total / sum(map(len, TEXTS)))


@few
def test_leading_padding_of_ids_is_hidden_except_the_beginning_of_the_text(
    model: HookedGPT,
) -> None:
    padded = model.to_tokens(TEXTS, padding_side="left")
    expected = model(TEXTS, padding_side="left")
    assert_close(model(padded, padding_side="left"), expected, rtol=0, atol=1e-9)
    model.cfg.default_padding_side = "left"
    assert_close(model(padded), expected, rtol=0, atol=1e-9)
    mask = torch.ones_like(padded)
    assert_close(
        model(padded, attention_mask=mask), model(padded, padding_side="right"), rtol=0, atol=1e-9
    )
    with pytest.raises(InvalidRequest, match="attention_mask"):
        model(padded, attention_mask=mask[:, 1:])
    side: Any = "middle"
    with pytest.raises(InvalidRequest, match="'middle'"):
        model(TEXTS, padding_side=side)


def test_padded_texts_have_finite_gradients(model: HookedGPT) -> None:
    _, cache = model.run_with_cache(
        TEXTS, return_type="loss", incl_bwd=True, padding_side="left", names_filter="hook_embed"
    )
    gradient = cache["hook_embed_grad"]
    assert gradient.isfinite().all()
    assert not gradient[2, :-2].any()


@few
def test_texts_of_different_lengths_are_continued_as_alone(model: HookedGPT) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False}
    together = model.generate(TEXTS, **options)
    assert together == [model.generate(text, **options) for text in TEXTS]


def test_changed_inputs_of_all_heads_are_a_change_of_what_attention_reads(
    model: HookedGPT,
) -> None:
    ids, cfg = random_ids(12), model.cfg
    if cfg.parallel_attn_mlp or model.hook_dict.get("blocks.1.hook_mlp_in") is None:
        pytest.skip("the stream before the MLP is not the sum of the block's input and attention")
    change = torch.linspace(-1, 1, cfg.d_model, dtype=torch.float64)

    def plus(value: Tensor, hook: Any) -> Tensor:
        return value + change

    def minus(value: Tensor, hook: Any) -> Tensor:
        return value - change

    expected = model.run_with_hooks(
        ids, fwd_hooks=[("blocks.1.hook_resid_pre", plus), ("blocks.1.hook_resid_mid", minus)]
    )
    model.set_use_split_qkv_input(True)
    split = [(f"blocks.1.hook_{part}_input", plus) for part in "qkv"]
    assert_close(model.run_with_hooks(ids, fwd_hooks=split), expected, rtol=0, atol=1e-9)
    model.set_use_split_qkv_input(False)
    if cfg.n_key_value_heads is None:
        model.set_use_attn_in(True)
        shared = [("blocks.1.hook_attn_in", plus)]
        assert_close(model.run_with_hooks(ids, fwd_hooks=shared), expected, rtol=0, atol=1e-9)


def test_changed_input_of_one_head_changes_that_head_alone(model: HookedGPT) -> None:
    ids = random_ids(12)
    model.set_use_split_qkv_input(True)

    def first_head(value: Tensor, hook: Any) -> None:
        value[:, :, 0] += torch.linspace(-1, 1, value.shape[-1])

    plain = model.run_with_cache(ids)[1]
    for part in "qkv":
        with model.hooks(fwd_hooks=[(f"blocks.1.hook_{part}_input", first_head)]):
            changed = model.run_with_cache(ids)[1]
        for each in "qkv":
            difference = (changed[each, 1] - plain[each, 1]).abs().amax(dim=(0, 1, 3)) > 1e-6
            expected = [part == each, *[False] * (len(difference) - 1)]
            assert difference.tolist() == expected


def test_changed_input_of_the_mlp_leaves_the_stream(model: HookedGPT) -> None:
    if model.hook_dict.get("blocks.1.hook_mlp_in") is None:
        with pytest.raises(InvalidRequest, match="hook_mlp_in"):
            model.set_use_hook_mlp_in(True)
        return
    ids = random_ids(12)

    def nothing(value: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(value)

    with pytest.raises(InvalidRequest, match=r"set_use_hook_mlp_in\(True\)"):
        model.add_hook("blocks.1.hook_mlp_in", nothing)
    model.set_use_hook_mlp_in(True)
    plain = model.run_with_cache(ids)[1]
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_in", nothing)]):
        changed = model.run_with_cache(ids)[1]
    moved = changed["mlp_out", 1] - plain["mlp_out", 1]
    assert moved.abs().max() > 0.01
    assert_close(changed["resid_post", 1], plain["resid_post", 1] + moved, rtol=0, atol=1e-9)


def test_settings_of_inputs_exclude_each_other() -> None:
    model = HookedGPT(tiny_gpt(), byte_tokenizer(), "tiny")
    model.set_use_split_qkv_input(True)
    with pytest.raises(InvalidRequest, match=r"set_use_split_qkv_input\(False\)"):
        model.set_use_attn_in(True)
    shared = HookedGPT(tiny_gpt(tiny_config(n_kv_head=2)), byte_tokenizer(), "tiny")
    with pytest.raises(InvalidRequest, match="share"):
        shared.set_use_attn_in(True)
