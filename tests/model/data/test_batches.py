"""Batches: the tokens of each step depend only on the seed and the step number."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.batches import Batches, noise_seed, rank_batch
from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard

END = 0


def _shard(count: int) -> Shard:
    """One document whose tokens are 1, 2, 3 ..."""
    return Shard(Path("memory"), np.arange(1, count + 1, dtype=np.uint16), count)


def _batches(count: int, seed: int) -> Batches:
    return Batches(_shard(count), seed=seed, end_of_text=END)


def test_batch_depends_on_seed_and_number_alone() -> None:
    first = _batches(5000, seed=1)
    again = _batches(5000, seed=1)
    torch.manual_seed(0)
    np.random.default_rng(0)
    before = torch.get_rng_state()
    for number in (900, 0, 317, 900):  # any order, across passes
        assert torch.equal(first.batch(number, 4, 16)[0], again.batch(number, 4, 16)[0])
    assert torch.equal(torch.get_rng_state(), before)
    other = _batches(5000, seed=2)
    assert not torch.equal(first.batch(0, 4, 16)[0], other.batch(0, 4, 16)[0])


def test_accumulated_batches_are_rows_of_the_large_batch() -> None:
    batches = _batches(5000, seed=1)
    big = batches.batch(64, 8, 16)[0]
    parts = [batches.batch(64 + start, 2, 16)[0] for start in range(0, 8, 2)]
    assert torch.equal(big, torch.cat(parts))


def test_passes_differ_in_order_and_offset() -> None:
    batches = _batches(5000, seed=3)
    count = batches.in_pass(16)
    passes = [
        tuple(batches.batch(epoch * count, count, 16)[0][:, 0].tolist()) for epoch in range(6)
    ]
    assert len(set(passes)) == 6
    assert len({frozenset(starts) for starts in passes}) > 3


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from((4, 16))), min_size=1, max_size=3),
)
def test_windows_of_a_pass_equal_windows_of_the_shuffled_documents(
    lengths: list[int], unfinished: bool, passes: list[tuple[int, int]]
) -> None:
    """In each pass, the windows read from the shard equal the windows of a copy of the text with
    its documents in the order of that pass. Their length may change from pass to pass."""
    documents = [np.append(np.full(length - 1, 1 + i), END) for i, length in enumerate(lengths)]
    documents += [np.full(20, 100)] if unfinished or sum(lengths) < 17 else []
    tokens = np.concatenate(documents).astype(np.uint16)
    batches = Batches(Shard(Path("memory"), tokens, 0), seed=4, end_of_text=END)
    for epoch, width in passes:
        count = batches.in_pass(width)
        found = batches.batch(epoch * count, count, width)
        generator = np.random.Generator(np.random.Philox(key=[4, epoch]))
        offset, windows = int(generator.integers(width)), generator.permutation(count)
        text = np.concatenate([documents[i] for i in generator.permutation(len(documents))])
        for inputs, targets, index in zip(*found, windows, strict=True):
            start = (offset + index * width) % (len(text) - width)
            assert inputs.tolist() == text[start : start + width].tolist()
            assert targets.tolist() == text[start + 1 : start + width + 1].tolist()


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="16 tokens do not fill a window"):
        _batches(16, seed=0).batch(0, 3, 16)
    assert _batches(17, seed=0).batch(0, 3, 16)[0].shape == (3, 16)


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 24), st.integers(0, 3))
def test_step_has_the_same_sequences_for_any_number_of_processes(
    batch_size: int, accumulate: int, size: int, step: int
) -> None:
    total = batch_size * accumulate
    if total % size:
        with pytest.raises(DataError, match=rf"a step has {total} sequences .* {size} proc"):
            rank_batch(batch_size, accumulate, rank=0, size=size)
        return
    rank_batches = [
        rank_batch(batch_size, accumulate, rank=rank, size=size) for rank in range(size)
    ]
    numbers = [
        number
        for own in rank_batches
        for first in own.batches(step)
        for number in range(first, first + own.batch_size)
    ]
    assert numbers == list(range(step * total, (step + 1) * total))
    assert all(own.batch_size <= batch_size for own in rank_batches)
    assert {own.parts * own.batch_size for own in rank_batches} == {total}


def test_noise_seeds_are_distinct_and_repeatable() -> None:
    seeds = {noise_seed(seed, sequence) for seed in (0, 1, 2**62) for sequence in range(100)}
    assert len({seed % 2**32 for seed in seeds}) == 300, "torch's generator uses 32 bits"
    assert noise_seed(1, 5) == noise_seed(1, 5)
