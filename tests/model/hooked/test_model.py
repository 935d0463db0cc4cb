"""HookedGPT compared with the plain stages, the engine's interventions and finite differences.
`test_against_transformer_lens.py` compares it with TransformerLens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.hooked.model import HookedGPT
from logitd.model.hooked.points import HookPoint
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.llm import LLM
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import lens_stages
from tests.model.factories import FAMILIES, byte_tokenizer, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages

TEXT = "The cat sat; the cat"


def hooked(gpt: GPT) -> HookedGPT:
    return HookedGPT(gpt, byte_tokenizer(), "tiny")


def family_gpt(family: str) -> GPT:
    """A GPT in float64, because with its large weights the errors of float32 would grow with depth.
    The tests leave gradients enabled, because without them activations are rounded to float32."""
    return tiny_gpt(tiny_config(**FAMILIES[family])).double()


@pytest.fixture(params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return family_gpt(request.param)


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Iterator[LLM]:
    with LLM(checkpoint_path, device="cpu", threads=1, slots=2) as opened:
        yield opened


def in_lens_order(name: str, value: Tensor) -> Tensor:
    """A stage (T, ...) in TransformerLens' order of axes."""
    return value.transpose(0, 1) if name.endswith(("attn_scores", "pattern")) else value


def test_points_are_the_stages_of_every_shape(gpt: GPT) -> None:
    ids = random_ids(40)
    stages = plain_stages(gpt, ids.tolist())
    model = hooked(gpt)
    model.set_use_attn_result(True)
    logits, cache = model.run_with_cache(ids)
    assert_close(logits[0], stages["logits"], rtol=0, atol=1e-9)
    compared = 0
    for name, stage in lens_stages(gpt.config).items():
        rotated = stage.kind.name.startswith(("attention.q", "attention.k"))
        capped = gpt.config.logit_softcap is not None and name == "unembed.hook_out"
        absent = name not in cache  # TransformerLens has no middle of a parallel block
        if absent or capped or (rotated and gpt.config.rotary_dim != gpt.config.head_dim):
            continue
        expected = in_lens_order(name, stages[stage.name])
        assert_close(cache[name][0], expected, rtol=0, atol=1e-9, msg=name)
        compared += 1
    assert compared > 13 * gpt.config.n_layer


@pytest.mark.parametrize("family", ["gpt2", "original", "llama", "nanochat"])
def test_hook_changes_what_follows_as_the_definition_does(family: str) -> None:
    gpt = family_gpt(family)
    model, ids = hooked(gpt), random_ids(12)
    for name, stage in lens_stages(gpt.config).items():
        if not stage.kind.changes or name not in model.hook_dict or stage.layer in (0, 2):
            continue
        factor = 2.0 if name.endswith("pattern") else 0.5

        def scale(value: Tensor, *, hook: HookPoint, by: float = factor) -> Tensor:
            return value * by

        def change(own: str, value: Tensor, of: str = stage.name, by: float = factor) -> Tensor:
            return value * by if own == of else value

        changed = model.run_with_hooks(ids, fwd_hooks=[(name, scale)])
        expected = plain_stages(gpt, ids.tolist(), change)["logits"]
        assert_close(changed[0], expected, rtol=0, atol=1e-9, msg=name)
    assert_close(model(ids), hooked(gpt)(ids), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_hook_may_change_its_tensor_in_place(family: str) -> None:
    model, ids = hooked(family_gpt(family)), random_ids(12)

    def in_place(value: Tensor, *, hook: HookPoint) -> None:
        value[..., ::2] *= 0.5

    def elsewhere(value: Tensor, *, hook: HookPoint) -> Tensor:
        factors = torch.ones(value.shape[-1], dtype=value.dtype)
        factors[::2] = 0.5
        return value * factors

    for name, point in model.hook_dict.items():
        other = name.startswith(("blocks.0", "blocks.2")) or name.endswith("attn_scores")
        if other or not point.is_on():
            continue
        changed, expected = (
            model.run_with_hooks(ids, fwd_hooks=[(name, hook)]) for hook in (in_place, elsewhere)
        )
        assert_close(changed, expected, rtol=0, atol=1e-9, msg=name)
        assert not torch.equal(changed, model(ids)), name


def test_folded_weights_keep_the_probabilities(gpt: GPT) -> None:
    model, ids = hooked(gpt), random_ids(2, 20)
    if gpt.config.norm_position == "post":
        with pytest.raises(InvalidRequest, match="norms"):
            model.enable_compatibility_mode()
        return
    before = hooked(gpt)(ids)
    model.enable_compatibility_mode()
    assert_close(model(ids).log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-9)
    assert_close(hooked(gpt)(ids), before, rtol=0, atol=0)
    assert model.cfg.normalization_type.endswith("Pre")


def test_folded_weights_without_final_norm_keep_the_probabilities() -> None:
    """The head reads the mean of the stream, so the weights that write to it are not centered."""
    model, ids = hooked(tiny_gpt(tiny_config(final_norm=False)).double()), random_ids(2, 20)
    before = model(ids)
    model.enable_compatibility_mode()
    assert_close(model(ids).log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-9)


def test_head_result_hook_changes_one_head() -> None:
    model = hooked(tiny_gpt().double())

    def no_head(value: Tensor, *, hook: HookPoint) -> None:
        value[:, :, 1] = 0.0

    by_values = model.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.attn.hook_z", no_head)])
    with pytest.raises(InvalidRequest, match="set_use_attn_result"):
        model.add_hook("blocks.1.attn.hook_result", no_head)
    model.set_use_attn_result(True)
    by_results = model.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.attn.hook_result", no_head)])
    assert_close(by_results, by_values, rtol=0, atol=1e-9)


def test_cached_gradients_are_finite_differences() -> None:
    model = hooked(tiny_gpt().double())
    ids = model.to_tokens(TEXT)
    names = [
        name
        for name, point in model.hook_dict.items()
        if name.startswith("blocks.1.") and point.is_on() and not name.endswith("attn_scores")
    ]
    _, cache = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter=names)
    for name in names:
        value, gradient = cache[name], cache[name + "_grad"]
        direction = torch.randn(value.shape, dtype=value.dtype)

        def loss_at(step: float, at: str = name, along: Tensor = direction) -> float:
            def move(tensor: Tensor, *, hook: HookPoint) -> Tensor:
                return tensor + step * along

            moved: Tensor = model.run_with_hooks(ids, return_type="loss", fwd_hooks=[(at, move)])
            return moved.item()

        slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=1e-4, abs=1e-7), name


def test_hooks_run_in_order_and_end_with_their_context() -> None:
    model, calls = hooked(tiny_gpt()), list[str]()

    def note(text: str) -> Any:
        def hook(value: Tensor, *, hook: HookPoint) -> None:
            hook.ctx[text] = hook.layer()
            calls.append(text)

        return hook

    point = "blocks.2.hook_mlp_out"
    model.add_perma_hook(point, note("permanent"))
    with model.hooks(fwd_hooks=[(lambda name: name == point, note("outer"))]):
        model.run_with_hooks(TEXT, fwd_hooks=[("blocks.2.mlp.hook_out", note("inner"))])
        assert calls == ["permanent", "outer", "inner"]
        model(TEXT, stop_at_layer=2)
        assert len(calls) == 3
    model(TEXT)
    assert calls[3:] == ["permanent"]
    assert model.blocks[2].hook_mlp_out.ctx == {"permanent": 2, "outer": 2, "inner": 2}
    model.reset_hooks(including_permanent=True)
    model(TEXT)
    assert len(calls) == 4
    with pytest.raises(InvalidRequest, match=r"blocks\.3\.hook_mlp_out"):
        model.add_hook("blocks.3.hook_mlp_out", note("nowhere"))


def test_short_names_find_their_tensors() -> None:
    model = hooked(tiny_gpt())
    _, cache = model.run_with_cache(TEXT, remove_batch_dim=True)
    names = {
        ("pattern", 1): "blocks.1.attn.hook_pattern",
        ("resid_post", -1): "blocks.2.hook_resid_post",
        ("normalized", 0, "ln2"): "blocks.0.ln2.hook_normalized",
        ("k", 2, "a"): "blocks.2.attn.hook_k",
        "post1": "blocks.1.mlp.hook_post",
        "scale1ln1": "blocks.1.ln1.hook_scale",
        "embed": "hook_embed",
        "scale": "ln_final.hook_scale",
        "blocks.1.attn.o.hook_in": "blocks.1.attn.hook_z",
    }
    for short, name in names.items():
        assert cache[short] is cache.cache_dict[name]
    with pytest.raises(KeyError):
        cache["normalized", 0]


def test_texts_begin_with_the_end_of_a_document_and_are_padded_on_the_right() -> None:
    model = hooked(tiny_gpt())
    assert model.to_tokens("ab").tolist() == [[256, 97, 98]]
    assert model.to_tokens(["ab", "c"], prepend_bos=False).tolist() == [[97, 98], [99, 256]]
    assert model.to_str_tokens("ab") == ["<|endoftext|>", "a", "b"]
    assert model.to_string(torch.tensor([97, 98])) == "ab"
    assert model.to_single_token("a") == 97
    assert model.get_token_position("a", "banana", mode="last") == 6
    with pytest.raises(InvalidRequest, match="2 tokens"):
        model.to_single_token("ab")
    texts = ["abcdef", "xy"]
    losses = model(texts, return_type="loss", loss_per_token=True)
    real = torch.cat([losses[0, :6], losses[1, :2]])
    assert_close(model(texts, return_type="loss"), real.mean())
    alone = model("xy", return_type="loss", loss_per_token=True)
    assert_close(losses[1, :2], alone[0], rtol=0, atol=1e-5)


def test_impossible_input_is_refused() -> None:
    model = hooked(tiny_gpt())
    for value, error in (
        (torch.zeros(1, 129, dtype=torch.long), ContextLengthExceeded),
        (torch.tensor([[300]]), InvalidRequest),
        (torch.zeros(1, 0, dtype=torch.long), InvalidRequest),
    ):
        with pytest.raises(error):
            model(value)


def test_generation_continues_with_the_hooks_in_place() -> None:
    model = hooked(tiny_gpt())
    ids = model.to_tokens(TEXT)
    greedy = model.generate(ids, max_new_tokens=4, do_sample=False, stop_at_eos=False)
    for end in range(ids.shape[1], greedy.shape[1]):
        assert model(greedy[:, :end])[0, -1].argmax() == greedy[0, end]
    text = model.generate(TEXT, max_new_tokens=4, do_sample=False, stop_at_eos=False)
    assert text == model.to_string(greedy[0, 1:])


# Within an LLM


@torch.no_grad()
def test_llm_has_the_interface_beside_its_own(llm: LLM) -> None:
    ids = list(TEXT.encode())
    assert {"tokenize", "run_with_cache"} <= set(dir(llm))  # notebooks complete these names
    before = llm.logits(ids)
    logits, cache = llm.run_with_cache(
        TEXT, prepend_bos=False, names_filter="blocks.1.hook_mlp_out"
    )
    np.testing.assert_allclose(logits[0], before, rtol=0, atol=1e-4)
    own = llm.activations(ids, "blocks.1.hook_mlp_out")["blocks.1.mlp.out"]
    np.testing.assert_allclose(cache["mlp_out", 1][0], own, rtol=0, atol=1e-4)
    assert llm.cfg.n_layers == 3
    assert llm.W_Q.shape == (3, 4, 32, 8)

    def nothing(value: Tensor, *, hook: HookPoint) -> Tensor:
        return torch.zeros_like(value)

    ablated = llm.run_with_hooks(
        torch.tensor([ids]), fwd_hooks=[("blocks.0.hook_mlp_out", nothing)]
    )
    change = {"stage": "blocks.0.hook_mlp_out", "operation": "zero"}
    expected = llm.logits(ids, interventions=[change])
    np.testing.assert_allclose(ablated[0], expected, rtol=0, atol=1e-4)
    llm.enable_compatibility_mode()
    np.testing.assert_array_equal(llm.logits(ids), before)
