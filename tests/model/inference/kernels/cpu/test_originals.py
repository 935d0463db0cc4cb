"""Matrices that a decoder holds in another form are removed from memory, and later restored bit for
bit. Nothing computes with them in between."""

import copy
import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.engine.requests import Activations, AttributionRequest, Request
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.describe import matrices
from logitd.model.inference.options import Quantization
from logitd.model.transformer.arena import move_to_arena
from logitd.model.transformer.gpt import GPT, Block
from tests.model.factories import tiny_gpt
from tests.model.inference.engine.harness import Driven, generation, outputs_request, run
from tests.model.inference.kernels.cpu.test_decoder import decoded, native_config, new_cache

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
IDS = torch.tensor([[5, 9, 2, 14, 3, 3, 8], [1, 1, 4, 0, 7, 12, 6]])


def bfloat16_gpt(seed: int = 0) -> GPT:
    """A model with an untied head, whose matrices each take several pages of memory."""
    torch.manual_seed(seed)
    config = native_config("llama", d_model=128, d_ff=256, vocab_size=64, tied_head=False)
    return tiny_gpt(config).bfloat16()


def in_other_form(gpt: GPT, library: ctypes.CDLL, quantize: Quantization) -> int:
    """Number of a GPT's matrices that its decoder holds in another form."""
    compresses = quantize == "none" and bool(library.logitd_has_tiles())
    return len(list(matrices(gpt))) if compresses or quantize != "none" else 0


def is_gone(matrix: Tensor) -> bool:
    return matrix.numel() == 0


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_matrices_leave_memory_and_come_back(library: ctypes.CDLL, quantize: Quantization) -> None:
    kept, gpt = bfloat16_gpt(), bfloat16_gpt()
    make = partial(NativeDecoder, library, threads=1, quantize=quantize)
    twin = make(kept, new_cache(kept))
    logits, expected = torch.cat(decoded(twin, IDS, [0, 1])), kept(IDS).logits
    move_to_arena(gpt)
    places = [matrix.data for matrix in matrices(gpt)]
    decoder = make(gpt, new_cache(gpt), owns_weights=True)
    gone = [is_gone(matrix) for matrix in matrices(gpt)]
    assert sum(gone) == in_other_form(gpt, library, quantize)
    for place, left in zip(places, gone, strict=True):
        inner = place.flatten()[2048:-2048]  # whole pages at any address
        assert bool((inner == 0).all()) == left
    assert torch.equal(torch.cat(decoded(decoder, IDS, [2, 3])), logits)
    if any(gone):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            gpt(IDS)
    decoder.restore_weights()
    for matrix, place, was in zip(matrices(gpt), places, matrices(kept), strict=True):
        assert matrix.data_ptr() == place.data_ptr()
        assert torch.equal(matrix, was)
    assert torch.equal(gpt(IDS).logits, expected)
    assert torch.equal(torch.cat(decoded(decoder, IDS, [0, 1])), logits)
    for one in (decoder, twin):
        one.close()


def test_embedding_that_is_the_head_stays(library: ctypes.CDLL) -> None:
    """With a tied head, the token embedding is read from the rows of the head matrix."""
    gpt = tiny_gpt(native_config("gpt2", d_model=128, d_ff=256)).bfloat16()
    NativeDecoder(
        library, gpt, new_cache(gpt), threads=1, quantize="int8", owns_weights=True
    ).close()
    assert not is_gone(gpt.token_embedding.weight)
    block = gpt.blocks[0]
    assert isinstance(block, Block)
    assert is_gone(block.qkv.weight)


def test_matrices_stay_if_torch_computes_prompts(library: ctypes.CDLL) -> None:
    gpt = bfloat16_gpt()
    NativeDecoder(
        library,
        gpt,
        new_cache(gpt),
        threads=1,
        quantize="int8",
        prefills=False,
        owns_weights=True,
    ).close()
    assert not any(is_gone(matrix) for matrix in matrices(gpt))


def requests() -> list[Request]:
    prompt = list(range(1, 41))
    stages = Activations(stages=("blocks.0.mlp.hidden", "blocks.1.output"))
    return [
        generation("first", prompt, max_tokens=5),
        replace(outputs_request("recorded", prompt), output=stages),
        AttributionRequest(
            request_id="why", token_ids=tuple(prompt), task=AttributionTask(position=39)
        ),
        generation("last", prompt[::-1], max_tokens=5),
    ]


def given(outcomes: Mapping[tuple[str, int], Any]) -> Any:
    return {
        key: (
            outcome.token_ids,
            [(event.positions, event.rows.tobytes()) for event in outcome.rows],
            outcome.attribution,
        )
        for key, outcome in outcomes.items()
    }


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_engine_that_owns_its_weights_gives_the_same_bits(
    library: ctypes.CDLL, quantize: Quantization
) -> None:
    """Matrices are restored before torch computes with them."""
    gpt, make = bfloat16_gpt(), partial(NativeDecoder, library, threads=1, quantize=quantize)
    kept = given(run(copy.deepcopy(gpt), *requests(), make_decoder=make))
    owner = partial(make, owns_weights=True)
    released = given(run(gpt, *requests(), make_decoder=owner))
    assert released == kept
    assert not any(is_gone(matrix) for matrix in matrices(gpt))


def test_reloaded_weights_leave_memory_too(library: ctypes.CDLL) -> None:
    old, new = bfloat16_gpt(0), bfloat16_gpt(1)
    make = partial(NativeDecoder, library, threads=1, quantize="int8")
    expected = given(run(copy.deepcopy(new), *requests(), make_decoder=make))
    driven = Driven(old, make_decoder=partial(make, owns_weights=True))
    driven.swap_weights(new)
    assert in_other_form(new, library, "int8") == sum(is_gone(matrix) for matrix in matrices(new))
    for request in requests():
        driven.add(request, weights=1)
    assert given(driven.drain()) == expected
