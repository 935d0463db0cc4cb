"""Attention of the native kernels in bfloat16. A query has the same bits alone and in a prompt, for
any head width and any number of heads that share a key head. Attention weights match those of the
plain decoder. With AMX, attention uses tiles for most of these widths."""

import ctypes
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from logitd.model.inference.kernels.base import AttentionSelection, PrefillInput
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.transformer.gpt import GPT
from tests.model.factories import random_ids, tiny_config, tiny_gpt
from tests.model.inference.kernels.cpu.test_decoder import decoded_at, new_cache, prefilled
from tests.profiles import examples

LENGTH = 200
HEADS = {(32, 3, 3), (64, 2, 1), (64, 4, 1), (80, 2, 2), (96, 3, 1), (128, 2, 1), (256, 1, 1)}
"""Head width, number of heads, number of key heads."""


def gpt_of(width: int, heads: int, key_heads: int, **overrides: int) -> GPT:
    config = tiny_config(
        n_layer=2, n_head=heads, n_kv_head=key_heads, head_dim=width, context_length=LENGTH,
        **overrides,
    )  # fmt: skip
    return tiny_gpt(config).to(torch.bfloat16)


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    width=st.sampled_from([32, 64, 96, 128, 160, 256]),
    group=st.sampled_from([1, 1, 2, 3, 5, 16, 17, 35]),
    key_heads=st.integers(1, 2),
    length=st.integers(1, LENGTH),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_prompt_in_any_chunks_has_the_bits_of_its_steps(
    library: ctypes.CDLL,
    width: int,
    group: int,
    key_heads: int,
    length: int,
    threads: int,
    seed: int,
) -> None:
    """The queries of a prompt are computed together, but a decode step computes its query alone. If
    each key head has only one query head, a decode step uses other instructions."""
    gpt = gpt_of(width, group * key_heads, key_heads, d_model=32)
    rng, ids = random.Random(seed), random_ids(length).tolist()
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=threads)
    by_step = decoded_at(native, ids, 3, 0)
    cuts = sorted(rng.sample(range(1, length), min(rng.randint(0, 4), length - 1)))
    for slot, chunks in enumerate(([], cuts)):
        assert torch.equal(native.head(prefilled(native, slot, ids, chunks)), by_step), chunks
    native.close()


@pytest.mark.parametrize("heads", sorted(HEADS))
@pytest.mark.parametrize("length", [1, 31, 33, 129])
def test_attention_weights_match_the_twin(
    library: ctypes.CDLL, heads: tuple[int, int, int], length: int
) -> None:
    """The weights sum to one and are as accurate as the plain decoder's weights in bfloat16."""
    gpt, ids = gpt_of(*heads), random_ids(length).tolist()
    wanted = AttentionSelection((0, 1), tuple(range(heads[1])), length)
    piece = PrefillInput(ids, 1, 0, states=True, weights=wanted)
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    with torch.inference_mode():
        [ours] = native.prefill([piece])
        assert torch.equal(native.prefill([PrefillInput(ids, 2, 0)])[0].hidden, ours.hidden)
        native.close()
        [twins] = PlainDecoder(gpt, new_cache(gpt)).prefill([piece])
        exact = gpt.float()
        [expected] = PlainDecoder(exact, new_cache(exact)).prefill([piece])
    assert ours.weights is not None
    assert_close(ours.weights.sum(-1), torch.ones(ours.weights.shape[:-1]), atol=1e-5, rtol=0)
    for name in ("hidden", "states", "weights"):
        found, rounded, whole = (getattr(one, name).float() for one in (ours, twins, expected))
        scale = whole.square().mean().sqrt()
        ours_off = (found - whole).square().mean().sqrt() / scale
        assert ours_off < 1.3 * (rounded - whole).square().mean().sqrt() / scale + 0.005, name


@pytest.mark.parametrize("width", [32, 48, 64, 128])
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_token_that_is_not_finite_spoils_no_earlier_one(
    library: ctypes.CDLL, width: int, lost: float
) -> None:
    """A weight of 0 times a non-finite number is not 0. Tokens before such a token keep their bits,
    and all later ones become non-finite."""
    gpt, ids = gpt_of(width, 4, 2), random_ids(70).tolist()
    ids = [token if token != 5 else 6 for token in ids]
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    expected = prefilled(native, 0, ids, [])
    native.close()
    ids[40] = 5
    with torch.no_grad():
        gpt.token_embedding.weight[5, 3] = lost
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=2)
    found = prefilled(native, 0, ids, [])
    native.close()
    assert torch.equal(found[:40], expected[:40])
    assert not found[40:].isfinite().all(dim=-1).any()


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("scale", [1e-37, 1e30])
def test_subnormal_and_huge_values_keep_the_bits(
    library: ctypes.CDLL, width: int, scale: float
) -> None:
    """With the scale 1e-37, products are subnormal. AMX tiles flush subnormal numbers to zero;
    vector instructions do so only in a mode that must be enabled. The output matrix is divided by
    the scale, so a difference would show."""
    gpt, ids = gpt_of(width, 3, 3), random_ids(60).tolist()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if ".qkv." in name:
                parameter[2 * 3 * width :].mul_(scale)  # values
            elif name.endswith("attention_out.weight"):
                parameter.mul_(1 / scale)
    native = NativeDecoder(library, gpt, new_cache(gpt), threads=1)
    by_step = decoded_at(native, ids, 3, 0)
    assert by_step.isfinite().all()
    assert torch.equal(native.head(prefilled(native, 0, ids, [20])), by_step)
    native.close()
