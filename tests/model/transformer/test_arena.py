"""The arena holds every weight once, in order, with zeros in between."""

import re
from pathlib import Path

import pytest
import torch

from logitd.model.checkpoint.load import empty_gpt
from logitd.model.transformer.arena import (
    GAP,
    LINE,
    PAGE,
    Arena,
    allocate_in_arena,
    move_to_arena,
    room_for,
)
from tests.model.factories import random_ids, tiny_config, tiny_gpt

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_moved_module_keeps_its_values() -> None:
    gpt = tiny_gpt()
    ids = random_ids(1, 20)
    before, state = gpt(ids).logits, {k: v.clone() for k, v in gpt.state_dict().items()}
    arena = move_to_arena(gpt)
    assert torch.equal(gpt(ids).logits, before)
    assert all(torch.equal(value, state[name]) for name, value in gpt.state_dict().items())
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert addresses == sorted(addresses)
    assert addresses[0] % PAGE == 0
    assert all(address % LINE == 0 for address in addresses)
    start, end = addresses[0], addresses[0] + arena._room.numel()
    assert all(start <= address < end for address in addresses)


def test_arena_has_zeros_after_each_tensor() -> None:
    tensors = [torch.ones(size, dtype=torch.bfloat16) for size in (1, 31, 32, 33, 1000)]
    arena = Arena(sum(map(room_for, tensors)))
    placed = [arena.place(tensor) for tensor in tensors]
    for tensor in placed:
        offset = tensor.data_ptr() - arena._room.data_ptr() + 2 * tensor.numel()
        assert not arena._room[offset : offset + LINE].any()
        assert (tensor == 1).all()


def test_allocated_parameters_have_the_places_of_moved_ones() -> None:
    gpt = empty_gpt(tiny_config(), torch.device("meta")).to(torch.bfloat16)
    allocate_in_arena(gpt)
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert not any(parameter.any() for parameter in gpt.parameters())
    moved = tiny_gpt().to(torch.bfloat16)
    move_to_arena(moved)
    assert [address - addresses[0] for address in addresses] == [
        parameter.data_ptr() - next(moved.parameters()).data_ptr()
        for parameter in moved.parameters()
    ]


def test_moving_twice_keeps_the_arena_until_a_tensor_leaves() -> None:
    gpt = tiny_gpt()
    first = move_to_arena(gpt)
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    again = move_to_arena(gpt)
    assert [parameter.data_ptr() for parameter in gpt.parameters()] == addresses
    assert again._room.data_ptr() == first._room.data_ptr()
    assert again._room.numel() == first._room.numel()
    outside = gpt.token_embedding.weight
    outside.data = outside.data.clone()
    move_to_arena(gpt)
    moved = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert not set(moved) & set(addresses)
    assert moved[0] % PAGE == 0


def test_arena_lives_as_long_as_a_tensor_in_it() -> None:
    tensor = Arena(4096).place(torch.arange(100))
    Arena(4096).place(torch.zeros(100))
    assert torch.equal(tensor, torch.arange(100))


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="no large pages here"
)
def test_arena_is_on_large_pages() -> None:
    """For shared memory, Linux uses only small pages, so the arena's memory is not shared."""
    arena = Arena(8 * PAGE)
    arena.place(torch.ones(8 * PAGE // 8 - GAP, dtype=torch.float64))
    address = arena._room.data_ptr()
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    (ours,) = (mapping for mapping in maps if holds(mapping, address))
    huge = re.search(r"AnonHugePages:\s+(\d+) kB", ours)
    assert huge is not None
    assert int(huge[1]) * 1024 >= 6 * PAGE


def holds(mapping: str, address: int) -> bool:
    """True if an entry of smaps covers an address."""
    span = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", mapping, re.MULTILINE)
    return span is not None and int(span[1], 16) <= address < int(span[2], 16)
