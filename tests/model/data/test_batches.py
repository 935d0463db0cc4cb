"""Batches: the tokens of each step, a function of seed and number."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.batches import Batches, noise_seed, rank_batch
from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard


def _shard(count: int) -> Shard:
    return Shard(Path("memory"), np.arange(count, dtype=np.uint16), count)


def test_targets_are_the_shifted_inputs() -> None:
    inputs, targets = Batches(_shard(1000), window=16, seed=1).batch(0, 8)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_batch_depends_on_seed_and_number_alone() -> None:
    first = Batches(_shard(5000), window=16, seed=1)
    again = Batches(_shard(5000), window=16, seed=1)
    torch.manual_seed(0)
    np.random.default_rng(0)
    before = torch.get_rng_state()
    for number in (900, 0, 317, 900):  # any order, across passes
        assert torch.equal(first.batch(number, 4)[0], again.batch(number, 4)[0])
    assert torch.equal(torch.get_rng_state(), before)
    other = Batches(_shard(5000), window=16, seed=2)
    assert not torch.equal(first.batch(0, 4)[0], other.batch(0, 4)[0])


def test_accumulated_batches_are_rows_of_the_large_batch() -> None:
    batches = Batches(_shard(5000), window=16, seed=1)
    big = batches.batch(64, 8)[0]
    parts = [batches.batch(64 + start, 2)[0] for start in range(0, 8, 2)]
    assert torch.equal(big, torch.cat(parts))


@given(st.integers(17, 400), st.integers(0, 5))
def test_pass_visits_distinct_windows_within_the_text(count: int, epoch: int) -> None:
    batches = Batches(_shard(count), window=16, seed=3)
    inputs, targets = batches.batch(epoch * batches.windows, batches.windows)
    assert int(targets.max()) < count
    starts = inputs[:, 0].tolist()
    assert len(set(starts)) == batches.windows


def test_passes_differ_in_order_and_offset() -> None:
    batches = Batches(_shard(5000), window=16, seed=3)
    passes = [
        tuple(batches.batch(epoch * batches.windows, batches.windows)[0][:, 0].tolist())
        for epoch in range(6)
    ]
    assert len(set(passes)) == 6
    assert len({frozenset(starts) for starts in passes}) > 3


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="16 tokens do not fill a window"):
        Batches(_shard(16), window=16, seed=0)
    assert Batches(_shard(17), window=16, seed=0).batch(0, 3)[0].shape == (3, 16)


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
