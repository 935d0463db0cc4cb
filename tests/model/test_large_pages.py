"""Large pages: zeros, where they begin, and that Linux really gives such pages."""

import re
from pathlib import Path

import pytest
import torch

from model.kv_cache import KVCache
from model.large_pages import PAGE, zeroed_bytes, zeros
from tests.model.factories import tiny_config

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 0, 5), (7,), (3, 1000, 1001)])
def test_they_are_zeros_of_the_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = zeros(shape, dtype)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype))
    assert found.is_contiguous()
    found += 1  # it can be written
    assert (found == 1).all()


def test_what_fills_a_page_begins_with_one() -> None:
    assert zeros((PAGE // 4,), torch.float32).data_ptr() % PAGE == 0
    assert zeroed_bytes(1).data_ptr() % PAGE == 0


def test_keys_and_values_begin_with_one() -> None:
    config = tiny_config(context_length=4096)
    cache = KVCache(config, 16, device=torch.device("cpu"), dtype=torch.float32)
    assert cache.keys.nbytes >= PAGE
    assert cache.keys.data_ptr() % PAGE == cache.values.data_ptr() % PAGE == 0


def test_memory_lives_as_long_as_a_part_of_it() -> None:
    part = zeros((PAGE,), torch.int8)[-100:]
    zeros((PAGE,), torch.int8).fill_(1)
    assert not part.any()


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="no large pages here"
)
def test_linux_gives_large_pages() -> None:
    """To memory that processes could share it gives small ones."""
    held = zeroed_bytes(8 * PAGE).fill_(1)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (ours,) = (one for one in maps if holds(one, held.data_ptr()))
    found = re.search(r"AnonHugePages:\s+(\d+) kB", ours)
    assert found is not None
    assert int(found[1]) * 1024 >= 6 * PAGE


def holds(mapping: str, address: int) -> bool:
    """Whether an entry of smaps is of the memory around an address."""
    span = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", mapping, re.MULTILINE)
    return span is not None and int(span[1], 16) <= address < int(span[2], 16)
