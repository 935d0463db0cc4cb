"""The arena: every weight once, in order, with zeros between."""

import torch

from model.checkpoint import empty_gpt
from model.kernels.arena import LINE, Arena, room_for, settle, settle_empty
from model.large_pages import PAGE
from tests.model.factories import random_ids, tiny_config, tiny_gpt


def test_a_module_keeps_its_values_and_lives_in_the_arena() -> None:
    gpt = tiny_gpt()
    ids = random_ids(1, 20)
    before, state = gpt(ids).logits, {k: v.clone() for k, v in gpt.state_dict().items()}
    arena = settle(gpt)
    assert torch.equal(gpt(ids).logits, before)
    assert all(torch.equal(value, state[name]) for name, value in gpt.state_dict().items())
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert addresses == sorted(addresses)
    assert addresses[0] % PAGE == 0
    assert all(address % LINE == 0 for address in addresses)
    start, end = addresses[0], addresses[0] + arena._room.numel()
    assert all(start <= address < end for address in addresses)


def test_tied_weights_are_there_once() -> None:
    gpt = tiny_gpt(tiny_config(tied_head=True))
    settle(gpt)
    assert len({parameter.data_ptr() for parameter in gpt.parameters()}) == len(
        list(gpt.parameters())
    )


def test_there_are_zeros_behind_each_tensor() -> None:
    tensors = [torch.ones(size, dtype=torch.bfloat16) for size in (1, 31, 32, 33, 1000)]
    arena = Arena(sum(map(room_for, tensors)))
    placed = [arena.place(tensor) for tensor in tensors]
    for tensor in placed:
        offset = tensor.data_ptr() - arena._room.data_ptr() + 2 * tensor.numel()
        assert not arena._room[offset : offset + LINE].any()
        assert (tensor == 1).all()


def test_memory_for_a_module_is_where_settling_would_put_it() -> None:
    gpt = empty_gpt(tiny_config(), torch.device("meta")).to(torch.bfloat16)
    settle_empty(gpt)
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert not any(parameter.any() for parameter in gpt.parameters())
    settled = tiny_gpt().to(torch.bfloat16)
    settle(settled)
    assert [address - addresses[0] for address in addresses] == [
        parameter.data_ptr() - next(settled.parameters()).data_ptr()
        for parameter in settled.parameters()
    ]


def test_what_lies_in_an_arena_stays_and_what_moved_out_moves_in() -> None:
    gpt = tiny_gpt()
    first = settle(gpt)
    addresses = [parameter.data_ptr() for parameter in gpt.parameters()]
    again = settle(gpt)
    assert [parameter.data_ptr() for parameter in gpt.parameters()] == addresses
    assert again._room.data_ptr() == first._room.data_ptr()
    assert again._room.numel() == first._room.numel()
    outside = gpt.token_embedding.weight
    outside.data = outside.data.clone()
    settle(gpt)
    moved = [parameter.data_ptr() for parameter in gpt.parameters()]
    assert not set(moved) & set(addresses)
    assert moved[0] % PAGE == 0


def test_its_memory_lives_as_long_as_a_tensor_in_it() -> None:
    tensor = Arena(4096).place(torch.arange(100))
    Arena(4096).place(torch.zeros(100))
    assert torch.equal(tensor, torch.arange(100))
