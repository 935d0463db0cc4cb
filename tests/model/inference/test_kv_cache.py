"""KV cache: every way of filling it results in the logits of a plain forward pass."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.constraints.heap import resident
from logitd.model.inference.kv_cache import KVCache, quantized_rows
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.shapes import PARTS

SHAPES: dict[str, dict[str, Any]] = {
    **{name: dict(overrides) for name, overrides in (*FAMILIES.items(), *PARTS.items())},
    # Whole blocks are computed even if the context ends within one.
    "context-16": {"context_length": 16},
    "context-50": {**FAMILIES["modern"], "context_length": 50},
    "context-97-sinusoidal": {**FAMILIES["original"], "context_length": 97},
    "odd-widths": {"d_model": 33, "n_head": 3, "d_ff": 37},
    "wide-heads": {**FAMILIES["llama"], "head_dim": 12, "n_layer": 1},
    "padded-vocabulary": {"vocab_size": 41, "tied_head": False},
}


@pytest.fixture(params=SHAPES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**SHAPES[request.param]))


@pytest.mark.skipif(not resident(), reason="the system does not report a process's size")
def test_cache_takes_memory_only_for_used_cells() -> None:
    """`torch.zeros` writes every zero, so 64 slots of GPT-2 once took 2.3 GiB before the first
    request."""
    config = tiny_config(n_layer=4, n_head=8, d_model=512, context_length=1024)
    before = resident()
    cache = KVCache(config, 32, device=torch.device("cpu"), dtype=torch.float32)
    assert cache.nbytes == 512 * 2**20
    assert resident() - before < 0.02 * cache.nbytes
    assert not cache.keys.any(), "the memory is still all zeros"
    cache.keys[:, 0] = 1.0
    cache.values[:, 0] = 1.0
    assert (resident() - before) / cache.nbytes > 0.9 / 32, "one slot of 32"


def new_cache(gpt: GPT, slots: int = 4) -> KVCache:
    return KVCache(gpt.config, slots, device=torch.device("cpu"), dtype=torch.float32)


def prefill(
    gpt: GPT, cache: KVCache, slot: int, ids: Tensor, start: int, end: int, *, at_once: bool = False
) -> Tensor:
    """Compute positions [start, end) of ids (T,). Returns their logits (end - start, V). The ids
    are padded to whole blocks."""
    padding = -(end - start) % BLOCK
    chunk = torch.cat((ids[start:end], torch.zeros(padding, dtype=ids.dtype)))
    positions = torch.arange(start, end + padding).clamp(max=gpt.config.context_length - 1)
    attend = cache.prefill_at_once if at_once else cache.prefill
    places = range(start, end + padding)
    previous = cache.put_token_ids(chunk.tolist(), [slot] * len(places), places)
    hidden = gpt.transform(
        chunk[None],
        positions[None],
        attend(slot, start),
        previous_ids=None if previous is None else previous[None],
    )
    return gpt.logits(hidden[0, : end - start])


def decode(
    gpt: GPT,
    cache: KVCache,
    slots: list[int],
    ids: list[int],
    positions: list[int],
    padding: int = 0,
) -> Tensor:
    """Compute one position of each slot; return the logits (B, V)."""
    extra = [0] * padding
    previous = cache.put_token_ids(ids, slots, positions)
    hidden = gpt.transform(
        torch.tensor([*ids, *extra])[:, None],
        torch.tensor([*positions, *extra])[:, None],
        cache.decode(slots, positions),
        previous_ids=None if previous is None else F.pad(previous, (0, padding))[:, None],
    )
    return gpt.logits(hidden[: len(slots), 0])


def close(actual: Tensor, expected: Tensor) -> None:
    """The tolerance suits logits with a magnitude of about 5 and sharp attention, which amplifies
    rounding errors."""
    assert_close(actual, expected, atol=2e-3, rtol=1e-3)


def test_chunks_match_the_forward(gpt: GPT) -> None:
    length = gpt.config.context_length
    ids = random_ids(length, vocab_size=gpt.config.vocab_size)
    cache = new_cache(gpt)
    logits = [
        prefill(gpt, cache, 1, ids, start, min(start + BLOCK, length))
        for start in range(0, length, BLOCK)
    ]
    close(torch.cat(logits), gpt(ids[None]).logits[0])


@pytest.mark.parametrize(
    ("prompt", "end"),
    [(1, 66), *(pytest.param(start, 128, marks=pytest.mark.slow) for start in (9, 32, 33))],
)
def test_decoded_positions_match_the_forward(gpt: GPT, prompt: int, end: int) -> None:
    length = min(end, gpt.config.context_length)
    prompt = min(prompt, length - 1)
    ids = random_ids(length, vocab_size=gpt.config.vocab_size)
    cache = new_cache(gpt)
    logits = [prefill(gpt, cache, 3, ids, 0, prompt)]
    for position in range(prompt, length):
        logits.append(decode(gpt, cache, [3], [int(ids[position])], [position]))
    close(torch.cat(logits), gpt(ids[None]).logits[0])


def test_slots_at_different_positions_decode_together(gpt: GPT) -> None:
    """The three sequences have unequal lengths, and their slots hold leftovers. The batch ends with
    two rows of padding."""
    count, steps = 3, 5
    longest = gpt.config.context_length - steps
    lengths = [min(length, longest) for length in (3, 40, 11)]
    ids = random_ids(count, longest + steps, vocab_size=gpt.config.vocab_size)
    cache = new_cache(gpt)
    torch.nn.init.normal_(cache.keys, std=3.0)
    torch.nn.init.normal_(cache.values, std=3.0)
    slots = [2, 0, 3]
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        prefill(gpt, cache, slot, ids[row], 0, length)
    expected = gpt(ids).logits
    for step in range(steps):
        positions = [length + step for length in lengths]
        tokens = [int(ids[row, position]) for row, position in enumerate(positions)]
        logits = decode(gpt, cache, slots, tokens, positions, padding=2)
        close(logits, expected[torch.arange(count), positions])


def test_copied_prefix_matches_the_forward(gpt: GPT) -> None:
    length = gpt.config.context_length
    shared = min(2, length // BLOCK) * BLOCK
    first, second = random_ids(2, length, vocab_size=gpt.config.vocab_size)
    second[:shared] = first[:shared]
    cache = new_cache(gpt)
    prefill(gpt, cache, 0, first, 0, length)
    cache.copy_prefix(0, 1, shared)
    cache.copy_prefix(1, 1, shared)  # onto itself: nothing happens
    expected = gpt(second[None]).logits[0, shared:]
    if shared < length:
        close(prefill(gpt, cache, 1, second, shared, length), expected)


def test_copy_changes_only_the_prefix() -> None:
    gpt = tiny_gpt()
    cache = new_cache(gpt)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.keys.clone(), cache.values.clone()
    cache.copy_prefix(1, 3, 64)
    for tensor, old in zip((cache.keys, cache.values), before, strict=True):
        assert torch.equal(tensor[:, 3, :, :64], old[:, 1, :, :64])
        assert torch.equal(tensor[:, 3, :, 64:], old[:, 3, :, 64:])
        assert torch.equal(tensor[:, :3], old[:, :3])


floats = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.lists(floats, min_size=4, max_size=4), min_size=1, max_size=5))
def test_int8_row_is_within_half_a_step(rows: list[list[float]]) -> None:
    given = torch.tensor(rows)
    numbers, scales = quantized_rows(given)
    assert numbers.dtype is torch.int8
    assert (numbers >= -127).all()
    error = (numbers.double() * scales.double()[:, None] - given.double()).abs()
    # 127 over a number that is nearly too small for a float has few bits left.
    usual = scales > 1e-35
    assert (error[usual] <= 0.501 * scales.double()[usual, None]).all()
    assert (numbers.abs().amax(-1)[usual] == 127).all(), "the largest has all of the steps"
    assert torch.equal(numbers[scales == 0], torch.zeros_like(numbers[scales == 0]))


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_int8_row_that_is_not_finite_has_such_a_scale(lost: float) -> None:
    numbers, scales = quantized_rows(torch.tensor([[1.0, lost, 2.0], [1.0, 0.0, 2.0]]))
    assert scales.isfinite().tolist() == [False, True]
    assert numbers[1].tolist() == [64, 0, 127]


def test_int8_cells_hold_rounded_values(gpt: GPT) -> None:
    """Only the first block is compared with exact values, because its keys and values do not depend
    on rounded cells. Prompts and single steps store the same values up to one step of rounding, and
    copying a prefix copies its scales."""
    length = min(40, gpt.config.context_length)
    ids = random_ids(length, vocab_size=gpt.config.vocab_size)
    exact = new_cache(gpt)
    kept = KVCache(gpt.config, 4, device=torch.device("cpu"), dtype=torch.float32, kept="int8")
    for cache in (exact, kept):
        prefill(gpt, cache, 1, ids, 0, length)
    for position in range(length):
        decode(gpt, kept, [2], [int(ids[position])], [position])
    assert kept.nbytes < 0.6 * exact.nbytes
    assert kept.key_scales is not None
    assert kept.value_scales is not None
    for ours, theirs, scales in zip(
        kept.read(0, 1, length), exact.read(0, 1, length),
        (kept.key_scales[0, 1, :, :length], kept.value_scales[0, 1, :, :length]), strict=True,
    ):  # fmt: skip
        assert ours.dtype is torch.float32
        assert ((ours - theirs).abs() <= 0.501 * scales[..., None]).all()
        assert not torch.equal(ours, theirs)
    for steps, prompts, scales in zip(
        kept.read(0, 2, length), kept.read(0, 1, length),
        (kept.key_scales[0, 1, :, :length], kept.value_scales[0, 1, :, :length]), strict=True,
    ):  # fmt: skip
        assert ((steps - prompts).abs() <= 1.01 * scales[..., None]).all(), "a step at most"
    kept.copy_prefix(1, 3, length)
    for layer in range(gpt.config.n_layer):
        pairs = zip(kept.read(layer, 3, length), kept.read(layer, 1, length), strict=True)
        assert all(torch.equal(copied, own) for copied, own in pairs)


def test_pieces_at_once_match_the_forward(gpt: GPT) -> None:
    """Covers the first chunk of a prompt, later chunks, and a chunk that follows a copied prefix.
    The cells after a chunk hold older numbers, which are not finite and must not be read."""
    length = min(100, gpt.config.context_length)
    ids = random_ids(length, vocab_size=gpt.config.vocab_size)
    expected = gpt(ids[None]).logits[0]
    cache = new_cache(gpt)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    edges = [*range(0, length, 2 * BLOCK), length]
    for start, end in pairwise(edges):
        found = prefill(gpt, cache, 1, ids, start, end, at_once=True)
        assert_close(found, expected[start:end], atol=2e-5, rtol=1e-4)
    if length > BLOCK:
        cache.copy_prefix(1, 2, BLOCK)
        found = prefill(gpt, cache, 2, ids, BLOCK, length, at_once=True)
        assert_close(found, expected[BLOCK:], atol=2e-5, rtol=1e-4)
