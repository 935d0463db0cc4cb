"""Footprint: what is subtracted is what a server says of itself. A real one is measured in
`tests/e2e/test_footprint.py`."""

import os

import pytest
import torch

from benchmarks.footprint import besides, peak, resident


@pytest.mark.parametrize(("dtype", "left"), [("float32", 560), ("bfloat16", 580)])
def test_weights_and_cache_are_subtracted(dtype: str, left: int) -> None:
    info = {"dtype": dtype, "parameters": 10, "kv_cache_bytes": 400}
    assert besides(1000, info) == left


def test_memory_that_is_touched_is_resident() -> None:
    before = resident(os.getpid())
    held = torch.ones(2**25)
    assert resident(os.getpid()) - before > 0.9 * held.nbytes


def test_memory_that_was_given_back_stays_in_the_peak() -> None:
    held = torch.ones(2**26)
    most = resident(os.getpid())
    del held
    assert resident(os.getpid()) < most - 2**27
    assert peak(os.getpid()) > 0.99 * most  # Linux counts roughly
