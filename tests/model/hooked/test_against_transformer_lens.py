"""HookedGPT compared with TransformerLens: the same random weights in the shapes of GPT-2 and
Pythia, and the calls of its demos. Needs the package transformer-lens, version 3 or 4; nothing is
downloaded."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from logitd.model.hooked.model import HookedGPT
from logitd.model.hooked.weights import OF_ATTENTION, OF_MLP
from tests.model.factories import byte_tokenizer
from tests.model.transformer.test_against_transformers import VOCAB_SIZE, Case, gpt2, neox

bridge = pytest.importorskip("transformer_lens.model_bridge", reason="it is not installed")
patching = pytest.importorskip("transformer_lens.patching")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

IDS = torch.randint(VOCAB_SIZE, (2, 14), generator=torch.Generator().manual_seed(1))
CORRUPTED = IDS.roll(3, dims=1)
CASES: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "neox": neox}
ATOL = 1e-5
SHARED_SETTINGS = (
    *("n_layers", "d_model", "n_ctx", "d_head", "n_heads", "d_vocab", "d_mlp", "act_fn", "eps"),
    *("normalization_type", "positional_embedding_type", "parallel_attn_mlp"),
)


@pytest.fixture(
    scope="module", params=[(name, mode) for name in CASES for mode in ("raw", "folded")]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HookedGPT, Any]]:
    """Our model and TransformerLens' model, as loaded and in compatibility mode."""
    name, mode = request.param
    gpt, theirs = CASES[name]()
    folder = tmp_path_factory.mktemp(name)
    assert isinstance(theirs, PreTrainedModel)
    theirs.config.architectures = [type(theirs).__name__]
    theirs.save_pretrained(folder)
    booted = boot(folder, theirs)
    model = HookedGPT(gpt, byte_tokenizer(), name)
    if mode == "folded":
        model.enable_compatibility_mode()
        booted.enable_compatibility_mode(disable_warnings=True)
    with torch.no_grad():
        yield model, booted


def boot(folder: Path, model: torch.nn.Module) -> Any:
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend(WordLevel(words, unk_token="w0")), eos_token="w0", unk_token="w0"
    )
    return bridge.TransformerBridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
    )


def near(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Compare tensors. Masked scores are -inf here, but -inf or the lowest finite number in
    TransformerLens."""
    masked = (ours < -1e30) & (theirs < -1e30)
    zero = torch.zeros(())
    ours, theirs = torch.where(masked, zero, ours), torch.where(masked, zero, theirs)
    assert_close(ours, theirs, rtol=0, atol=ATOL, msg=lambda text: f"{name}: {text}")


def test_every_point_has_their_value(pair: tuple[HookedGPT, Any]) -> None:
    model, theirs = pair
    logits, cache = model.run_with_cache(IDS)
    their_logits, their_cache = theirs.run_with_cache(IDS)
    near(logits, their_logits, "logits")
    near(model(IDS, return_type="loss"), theirs(IDS, return_type="loss"), "loss")
    absent = [name for name in cache if name not in their_cache]
    assert all(name.endswith(("hook_rot_q", "hook_rot_k")) for name in absent)
    for name, value in cache.items():
        if name not in absent:
            near(value, their_cache[name], name)


def test_weights_have_their_values_and_shapes(pair: tuple[HookedGPT, Any]) -> None:
    model, theirs = pair
    for name in ("W_E", "W_U", "b_U", *OF_ATTENTION, "W_in", "W_out", "b_in", "b_out"):
        near(getattr(model, name), getattr(theirs, name), name)
    near(model.blocks[1].attn.W_O, theirs.blocks[1].attn.W_O, "blocks[1].attn.W_O")


def ablate_head(value: Tensor, hook: Any) -> Tensor:
    value[:, :, 2, :] = 0.0
    return value


def move(value: Tensor, hook: Any) -> Tensor:
    return 0.9 * value + 0.01


def test_hooks_have_their_effect(pair: tuple[HookedGPT, Any]) -> None:
    model, theirs = pair
    for name, point in model.hook_dict.items():
        if not name.startswith("blocks.1.") or not point.is_on():
            continue
        # The bridge's `hook_resid_mid` changes only the input of the norm, its HookedTransformer's
        # the stream, as here.
        if name.endswith(("scale", "rot_q", "rot_k", "resid_mid")):
            continue
        hooks = [(name, move)]
        changed = theirs.run_with_hooks(IDS, fwd_hooks=hooks)
        near(model.run_with_hooks(IDS, fwd_hooks=hooks), changed, name)


def test_head_ablation_has_their_loss(pair: tuple[HookedGPT, Any]) -> None:
    ours, theirs = (
        each.run_with_hooks(
            IDS, return_type="loss", fwd_hooks=[("blocks.0.attn.hook_v", ablate_head)]
        )
        for each in pair
    )
    near(ours, theirs, "loss")


def test_induction_scores_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    repeated = torch.cat((IDS, IDS), dim=1)
    length = IDS.shape[1]
    found = []
    for model in pair:
        scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

        def score(pattern: Tensor, hook: Any, into: Tensor = scores) -> None:
            stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - length)
            into[hook.layer()] = stripe.mean(dim=(0, -1))

        def is_pattern(name: str) -> bool:
            return name.endswith("pattern")

        model.run_with_hooks(repeated, return_type=None, fwd_hooks=[(is_pattern, score)])
        found.append(scores)
    assert found[0].abs().max() > 0
    near(found[0], found[1], "scores")


def test_factored_circuits_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    ours, theirs = (
        (model.OV, model.QK, model.embed.W_E @ model.OV @ model.unembed.W_U, model.QK.T @ model.OV)
        for model in pair
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.shape, mine.mdim, mine.ndim) == (other.shape, other.mdim, other.ndim)
        near(mine.AB, other.AB, "AB")
        near(mine.S, other.S, "S")
        near(mine.norm(), other.norm(), "norm")
        near(mine.U * mine.S[..., None, :] @ mine.V.mT, other.AB, "svd")
        near(mine.make_even().A.norm(dim=-2), other.make_even().A.norm(dim=-2), "make_even")
        # Sums of powers, because rounding may turn an eigenvalue's order.
        for power in (1, 2, 3):
            sums = [each.eigenvalues.pow(power).sum(dim=-1).real for each in (mine, other)]
            near(sums[0], sums[1], "eigenvalues")
        vector = torch.linspace(-1, 1, mine.shape[-1])
        near(mine @ vector, other @ vector, "times vector")
        for index in (1, (1, 2), (0, slice(2)), (1, 1, 3), (-1, 2, slice(4), 5)):
            found, expected = mine[index], other[index]
            assert found.shape == expected.shape
            near(found.AB, expected.AB, f"[{index}]")
        near(mine.get_corner(2), other.get_corner(2), "corner")


def test_composition_scores_and_biases_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    for mode in ("Q", "K", "V"):
        ours, theirs = (model.all_composition_scores(mode) for model in pair)
        near(ours, getattr(theirs, "scores", theirs), mode)
    for arguments in ((0,), (2,), (1, True), (2, False, False)):
        ours, theirs = (model.accumulated_bias(*arguments) for model in pair)
        near(ours, theirs, "accumulated_bias")


def test_named_weights_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    ours, theirs = (dict(model.tl_named_parameters()) for model in pair)
    for name in ours.keys() & theirs.keys():
        near(ours[name], theirs[name], name)
    assert {name for name in theirs if ".ln" not in name and "ln_" not in name} <= set(ours)


def test_split_inputs_have_their_effect(pair: tuple[HookedGPT, Any]) -> None:
    def set_all(name: str, on: bool) -> None:
        for model in pair:
            getattr(model, f"set_{name}")(on)

    def one_head(value: Tensor, hook: Any) -> Tensor:
        value[:, 2:, 1] += torch.linspace(-2, 2, value.shape[-1])
        return value

    def turned(value: Tensor, hook: Any) -> Tensor:
        return value + torch.linspace(-1, 1, value.shape[-1])

    for setting, points in (
        ("use_split_qkv_input", ("q_input", "k_input", "v_input")),
        ("use_attn_in", ("attn_in",)),
        ("use_hook_mlp_in", ("mlp_in",)),
    ):
        set_all(setting, True)
        for point in points:
            name = f"blocks.1.hook_{point}"
            hook = turned if point == "mlp_in" else one_head
            ours, theirs = (model.run_with_hooks(IDS, fwd_hooks=[(name, hook)]) for model in pair)
            near(ours, theirs, name)
            assert not torch.allclose(ours, pair[0](IDS), atol=1e-3)
            ours, theirs = (model.run_with_cache(IDS)[1][name] for model in pair)
            near(ours, theirs, name)
        set_all(setting, False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_hides_what_theirs_hides(pair: tuple[HookedGPT, Any], side: str) -> None:
    lengths = torch.tensor([14, 9])[:, None]
    places = torch.arange(14)
    mask = places >= 14 - lengths if side == "left" else places < lengths
    ids = IDS.where(mask, 0)
    results = [model.run_with_cache(ids, attention_mask=mask.int()) for model in pair]
    for name in ("logits", "blocks.1.hook_resid_post", "blocks.0.attn.hook_pattern"):
        ours, theirs = (logits if name == "logits" else cache[name] for logits, cache in results)
        if "pattern" in name:
            ours, theirs = ours.movedim(1, 2), theirs.movedim(1, 2)
        near(ours[mask], theirs[mask], name)
    losses = [
        model(ids, return_type="loss", attention_mask=mask.int(), loss_per_token=True)
        for model in pair
    ]
    near(losses[0], losses[1], "losses")
    alone = pair[0](IDS[1:, 14 - 9 :] if side == "left" else IDS[1:, :9])
    near(results[0][0][1][mask[1]], alone[0], "alone")


def test_their_activation_patching_has_the_same_results(pair: tuple[HookedGPT, Any]) -> None:
    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, 5] - logits[:, -1, 7]).mean()

    results: list[list[Tensor]] = []
    for model in pair:
        _, clean = model.run_with_cache(IDS)
        results.append(
            [
                patch(model, CORRUPTED, clean, metric)
                for patch in (
                    patching.get_act_patch_resid_pre,
                    patching.get_act_patch_attn_head_out_all_pos,
                    patching.get_act_patch_mlp_out,
                    patching.get_act_patch_attn_head_pattern_all_pos,
                    patching.get_act_patch_block_every,
                    patching.get_act_patch_attn_head_all_pos_every,
                )
            ]
        )
    for index, (ours, theirs) in enumerate(zip(*results, strict=True)):
        near(ours, theirs, f"patch {index}")


def test_direct_logit_attribution_and_logit_lens_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    caches = [model.run_with_cache(IDS)[1] for model in pair]
    answers, others = torch.tensor([5, 9]), torch.tensor([7, 3])
    middle = not pair[0].cfg.parallel_attn_mlp
    stacks = [
        cache.accumulated_resid(incl_mid=middle, pos_slice=-1, apply_ln=True, return_labels=True)
        for cache in caches
    ]
    assert stacks[0][1] == stacks[1][1]
    near(stacks[0][0], stacks[1][0], "accumulated_resid")
    parts = [cache.decompose_resid(pos_slice=-1, return_labels=True) for cache in caches]
    assert parts[0][1] == parts[1][1]
    near(parts[0][0], parts[1][0], "decompose_resid")
    heads = [
        cache.stack_head_results(layer=-1, pos_slice=-1, incl_remainder=True, return_labels=True)
        for cache in caches
    ]
    assert heads[0][1] == heads[1][1]
    near(heads[0][0], heads[1][0], "stack_head_results")
    directions = pair[0].tokens_to_residual_directions(answers).T
    for options in (
        {},
        {"apply_ln": True},
        {"apply_ln": True, "project_output_onto": directions},
        {"project_output_onto": directions[:, 0], "expand_neurons": False},
        {"layer": 1, "apply_ln": True, "expand_neurons": False, "pos_slice": (2, 5)},
    ):
        full = [
            cache.get_full_resid_decomposition(
                **{"layer": -1, "pos_slice": -1, "return_labels": True, **options}
            )
            for cache in caches
        ]
        assert full[0][1] == full[1][1]
        near(full[0][0], full[1][0], f"get_full_resid_decomposition {options}")
    for options in (
        {"incl_remainder": True},
        {"neuron_slice": (0, 6, 2), "apply_ln": True},
        {"apply_ln": True, "incl_remainder": True, "project_output_onto": directions},
    ):
        neurons = [
            cache.stack_neuron_results(1, pos_slice=-1, return_labels=True, **options)
            for cache in caches
        ]
        assert neurons[0][1] == neurons[1][1]
        near(neurons[0][0], neurons[1][0], f"stack_neuron_results {options}")
    for stack in (parts[0][0], heads[0][0]):
        ours, theirs = (cache.logit_attrs(stack, answers, others, pos_slice=-1) for cache in caches)
        near(ours, theirs, "logit_attrs")
    before, after = (
        cache.apply_ln_to_stack(parts[0][0], layer=1, pos_slice=-1) for cache in caches
    )
    near(before, after, "apply_ln_to_stack")
    for short in (
        ("pattern", 1),
        ("resid_post", -1),
        ("normalized", 0, "ln1"),
        ("scale",),
        "embed",
    ):
        near(caches[0][short], caches[1][short], str(short))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_points_and_hooks_equal_those_of_version_3(case: str) -> None:
    """HookedTransformer also has two points that TransformerBridge lacks: `hook_rot_q` and
    `hook_result`."""
    transformer = pytest.importorskip("transformer_lens.HookedTransformer", reason="not in 4")
    gpt, config = CASES[case]()[0], importlib.import_module("transformer_lens.config")
    model = HookedGPT(gpt, byte_tokenizer(), case)
    model.enable_compatibility_mode()
    rotary = {"rotary_dim": gpt.config.rotary_dim, "rotary_base": int(gpt.config.rope_theta)}
    theirs = transformer.HookedTransformer(
        config.HookedTransformerConfig(
            **{name: getattr(model.cfg, name) for name in SHARED_SETTINGS},
            **(rotary if case == "neox" else {}),
            default_prepend_bos=False,
        )
    )
    weights = {"embed.W_E": model.W_E, "unembed.W_U": model.W_U, "unembed.b_U": model.b_U}
    if case == "gpt2":
        weights["pos_embed.W_pos"] = model.W_pos
    for layer, block in enumerate(model.blocks):
        for part, names in (("attn", OF_ATTENTION), ("mlp", OF_MLP)):
            for name in names:
                if (value := getattr(getattr(block, part), name, None)) is not None:
                    weights[f"blocks.{layer}.{part}.{name}"] = value
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    for split in (False, True):
        for each in (model, theirs):
            each.set_use_attn_result(True)
            each.set_use_split_qkv_input(split)
            each.set_use_hook_mlp_in(split)
        cache, their_cache = model.run_with_cache(IDS)[1], theirs.run_with_cache(IDS)[1]
        for name, value in their_cache.items():
            if split and ".ln1." in name:  # theirs shows the norm of one of the split inputs
                continue
            near(cache[name], value, name)
            hooks = [(name, move)]
            changed = theirs.run_with_hooks(IDS, fwd_hooks=hooks)
            near(model.run_with_hooks(IDS, fwd_hooks=hooks), changed, name)


def test_their_tools_run_on_the_model(pair: tuple[HookedGPT, Any]) -> None:
    """TransformerLens' own code detects heads and computes singular vectors and direct paths."""
    detector = importlib.import_module("transformer_lens.head_detector")
    caches = [model.run_with_cache(IDS[:1], remove_batch_dim=True)[1] for model in pair]
    pattern = torch.eye(14).roll(-1, dims=1).tril()
    for options in ({}, {"exclude_bos": True, "error_measure": "abs"}):
        scores = [
            detector.detect_head(Ids(model), "", pattern, cache=cache, **options)
            for model, cache in zip(pair, caches, strict=True)
        ]
        near(scores[0], scores[1], "detect_head")
    interpreter = importlib.import_module("transformer_lens.SVDInterpreter").SVDInterpreter
    for arguments in (("OV", 1, 3, 2), ("w_in", 0, 3), ("w_out", 2, 3)):
        ours, theirs = (interpreter(model).get_singular_vectors(*arguments) for model in pair)
        near(ours.abs(), theirs.abs(), arguments[0])  # the sign of a singular vector is free


class Ids:
    """A model that tokenizes every text as IDS, for the head detector."""

    def __init__(self, model: Any) -> None:
        self.cfg = model.cfg

    def to_tokens(self, text: str) -> Tensor:
        return IDS[:1]


def test_gradients_are_theirs(pair: tuple[HookedGPT, Any]) -> None:
    names = [
        f"blocks.1.{name}"
        for name in ("hook_resid_pre", "attn.hook_z", "mlp.hook_post", "hook_attn_out")
    ]
    with torch.enable_grad():
        caches = [
            model.run_with_cache(
                IDS, return_type="loss", incl_bwd=True, names_filter=lambda name: name in names
            )[1]
            for model in pair
        ]
    for name in names:
        near(caches[0][name + "_grad"], caches[1][name + "_grad"], name)
