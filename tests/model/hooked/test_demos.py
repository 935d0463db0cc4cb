"""The core cells of TransformerLens' demos, written anew with the same calls. Each result is
checked against a sum or value that it must equal; `test_against_transformer_lens.py` compares the
calls with TransformerLens."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.hooked.cache import ActivationCache
from logitd.model.hooked.model import HookedGPT
from logitd.model.inference.errors import InvalidRequest
from tests.model.factories import FAMILIES, byte_tokenizer, tiny_config, tiny_gpt

CLEAN, CORRUPTED = ["Tom sees Sid", "Dan met Amy"], ["Sid sees Tom", "Amy met Dan"]
ANSWERS = torch.tensor([[83, 84], [65, 68]])


@pytest.fixture
def model() -> HookedGPT:
    loaded = HookedGPT(tiny_gpt().double(), byte_tokenizer(), "tiny")
    loaded.enable_compatibility_mode(disable_warnings=True)
    return loaded


def difference(logits: Tensor) -> Tensor:
    last = logits[:, -1].gather(-1, ANSWERS)
    return (last[:, 0] - last[:, 1]).mean()


def cells_with(model: HookedGPT, texts: list[str]) -> tuple[Tensor, ActivationCache]:
    """Return the logits and the cache for texts of several lengths. They are padded on the left, so
    that each row ends with the text's last token."""
    logits, cache = model.run_with_cache(texts, padding_side="left")
    return logits, cache


def test_exploratory_analysis_attributes_the_difference_to_parts(model: HookedGPT) -> None:
    logits, cache = cells_with(model, CLEAN)
    directions = model.tokens_to_residual_directions(ANSWERS)
    direction = directions[:, 0] - directions[:, 1]
    assert_close(direction, (model.unembed.W_U[:, ANSWERS[:, 0]] - model.W_U[:, ANSWERS[:, 1]]).T)
    biases = (model.b_U[ANSWERS[:, 0]] - model.b_U[ANSWERS[:, 1]]).mean()

    def contributions(stack: Tensor) -> Tensor:
        scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        return (scaled * direction).sum(dim=-1).mean(dim=-1)

    expected = difference(logits) - biases
    assert_close(contributions(cache["resid_post", -1][None, :, -1])[0], expected)
    accumulated, labels = cache.accumulated_resid(
        layer=-1, incl_mid=True, pos_slice=-1, return_labels=True
    )
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    assert_close(contributions(accumulated)[-1], expected)
    assert_close(contributions(cache.decompose_resid(layer=-1, pos_slice=-1)).sum(), expected)
    heads, labels = cache.stack_head_results(
        layer=-1, pos_slice=-1, incl_remainder=True, return_labels=True
    )
    assert labels == [*model.all_head_labels, "remainder"]
    assert_close(contributions(heads).sum(), expected)


def test_direct_logit_attribution_projects_every_unit(model: HookedGPT) -> None:
    logits, cache = cells_with(model, CLEAN)
    directions = model.tokens_to_residual_directions(ANSWERS[0]).T  # (C, 2)
    options: dict[str, Any] = {"layer": -1, "pos_slice": -1, "apply_ln": True}
    projected, labels = cache.get_full_resid_decomposition(
        **options, project_output_onto=directions, return_labels=True
    )
    full = cache.get_full_resid_decomposition(**options)
    assert_close(projected, full @ directions)
    assert projected.shape == (len(labels), 2, 2)
    assert labels[:2] == ["L0H0", "L0H1"]
    assert labels[-4:] == ["L2N127", "embed", "pos_embed", "bias"]
    assert_close(projected.sum(dim=0), logits[:, -1, ANSWERS[0]] - model.b_U[ANSWERS[0]])
    one = cache.get_full_resid_decomposition(**options, project_output_onto=directions[:, 0])
    assert_close(one, projected[..., 0])


def test_attribution_patching_is_the_slope_of_activation_patching(model: HookedGPT) -> None:
    def forward_and_backward(texts: list[str]) -> tuple[ActivationCache, ActivationCache]:
        gradients: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            gradients[hook.name] = value.detach()

        model.reset_hooks()
        model.add_hook(lambda name: "_input" not in name, keep, "bwd")
        logits, cache = cells_with(model, texts)
        difference(logits).backward()
        model.reset_hooks()
        return cache, ActivationCache(gradients, model)

    clean = cells_with(model, CLEAN)[1]
    corrupted, gradients = forward_and_backward(CORRUPTED)
    clean_heads, corrupted_heads, slopes = (
        cache.stack_activation("z") for cache in (clean, corrupted, gradients)
    )
    attributions = (slopes * (clean_heads - corrupted_heads)).sum(dim=(1, 2, 4))  # layer, head

    def patch_head(value: Tensor, hook: Any, head: int, share: float) -> Tensor:
        value[:, :, head] += share * (clean[hook.name] - value)[:, :, head]
        return value

    for layer, head in ((0, 1), (2, 3)):
        found = [
            difference(
                model.run_with_hooks(
                    CORRUPTED,
                    padding_side="left",
                    fwd_hooks=[
                        (
                            f"blocks.{layer}.attn.hook_z",
                            partial(patch_head, head=head, share=share),
                        )
                    ],
                )
            )
            for share in (1e-4, -1e-4)
        ]
        assert attributions[layer, head] == pytest.approx(
            ((found[0] - found[1]) / 2e-4).item(), rel=1e-4
        )


def test_copying_scores_come_from_the_eigenvalues_of_ov_circuits(model: HookedGPT) -> None:
    circuit = model.embed.W_E @ model.OV @ model.unembed.W_U
    found = circuit.eigenvalues
    scores = found.sum(dim=-1).real / found.abs().sum(dim=-1)
    assert scores.shape == (3, 4)
    dense = model.W_E @ model.W_V[1, 2] @ model.W_O[1, 2] @ model.W_U
    assert_close(found[1, 2].sum().real, dense.trace())
    assert model.all_composition_scores("K").shape == (3, 4, 3, 4)


def test_refactored_circuits_are_the_same_matrices() -> None:
    gpt = tiny_gpt().double()
    plain, even = (HookedGPT(gpt, byte_tokenizer(), "tiny") for _ in range(2))
    plain.enable_compatibility_mode()
    even.enable_compatibility_mode(refactor_factored_attn_matrices=True)
    assert_close(even(CLEAN), plain(CLEAN))
    assert_close(even.OV.AB, plain.OV.AB)
    assert_close(even.QK.AB, plain.QK.AB)
    unit = torch.eye(8, dtype=torch.float64).expand(3, 4, 8, 8)
    assert_close(even.W_O @ even.W_O.mT, unit)
    rotated = HookedGPT(tiny_gpt(tiny_config(**FAMILIES["neox"])), byte_tokenizer(), "tiny")
    with pytest.raises(InvalidRequest, match="refactor_factored_attn_matrices"):
        rotated.enable_compatibility_mode(refactor_factored_attn_matrices=True)


def test_parameters_are_listed_by_full_names(model: HookedGPT) -> None:
    shapes = {name: tuple(value.shape) for name, value in model.tl_named_parameters()}
    assert shapes["blocks.0.attn.W_Q"] == (4, 32, 8)
    assert shapes["unembed.W_U"] == (32, 257)
    assert "pos_embed.W_pos" in shapes
