"""Runner: a position's bits depend on its phase, its text and the weights, on nothing beside it."""

from collections.abc import Sequence as Many
from typing import get_args

import pytest
import torch
from torch import Tensor

from logitd.model.inference.engine.runner import Runner
from logitd.model.inference.engine.scheduler import PrefillChunk
from logitd.model.inference.engine.sequence import Group, Sequence, State
from logitd.model.inference.options import KVCacheDType
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    generation,
)

# In bfloat16 torch chooses the kernel of a very small product (rows * width * width up to 4096) by
# the number of rows: no model that is served is as narrow, but `tiny_config` is.
WIDTH = {"d_model": 48}
ODD = {"n_head": 3, "d_model": 54, "d_ff": 111}


@pytest.fixture(params=[*FAMILIES, "odd"])
def gpt(request: pytest.FixtureRequest) -> GPT:
    overrides = ODD if request.param == "odd" else {**FAMILIES[request.param], **WIDTH}
    return tiny_gpt(tiny_config(**overrides))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(params=get_args(KVCacheDType), ids=lambda kept: f"kept in {kept}")
def kept(request: pytest.FixtureRequest) -> KVCacheDType:
    kept: KVCacheDType = request.param
    return kept


def sequence(slot: int, prompt: Many[int]) -> Sequence:
    one = Sequence(Group(generation(str(slot), prompt)), 0, 0.0)
    one.slot, one.state = slot, State.PREFILL
    return one


@torch.inference_mode()
def prefill(runner: Runner, slot: int, prompt: Many[int], cuts: Many[int]) -> Tensor:
    """Hidden states of a prompt computed in chunks that end at `cuts` and at its end."""
    one = sequence(slot, prompt)
    ends = [*cuts, len(prompt)]
    return torch.cat(
        [
            hidden
            for start, end in zip([0, *cuts], ends, strict=True)
            for hidden in runner.prefill([PrefillChunk(one, start, end)])
        ]
    )


def test_chunks_do_not_change_a_prompts_bits(
    gpt: GPT, dtype: torch.dtype, kept: KVCacheDType
) -> None:
    runner = Runner(gpt.to(dtype), slots=3, kv_cache_dtype=kept)
    prompt = random_ids(117).tolist()
    whole = prefill(runner, 0, prompt, [])
    for cuts in ([32], [96], [32, 64, 96], [64, 96]):
        assert torch.equal(prefill(runner, 1, prompt, cuts), whole), cuts
    assert torch.equal(runner.cache.keys[:, 1, :, :117], runner.cache.keys[:, 0, :, :117])
    assert torch.equal(runner.cache.values[:, 1, :, :117], runner.cache.values[:, 0, :, :117])
    with torch.inference_mode():  # A shorter prompt, and one that copies.
        assert torch.equal(prefill(runner, 2, prompt[:70], []), whole[:70])
        [rest] = runner.prefill([PrefillChunk(sequence(1, prompt), 64, 117, copy_from=2)])
    assert torch.equal(rest, whole[64:])


def test_company_does_not_change_a_prompts_bits(
    gpt: GPT, dtype: torch.dtype, kept: KVCacheDType
) -> None:
    """Prompts that are computed in the same step share the products: some begin and some go on, one
    behind a prefix of another's, and none fills its last block."""
    runner = Runner(gpt.to(dtype), slots=10, kv_cache_dtype=kept)
    ids = random_ids(5, 117)
    prompts = [ids[i, :length].tolist() for i, length in enumerate((117, 1, 33, 70))]
    prompts.append(prompts[0][:32] + ids[4, :50].tolist())
    alone = [prefill(runner, slot, prompt, []) for slot, prompt in enumerate(prompts)]
    everybody = [sequence(5 + i, prompt) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        [begun] = runner.prefill([PrefillChunk(everybody[0], 0, 64)])
        chunks = [
            PrefillChunk(everybody[3], 0, 70),
            PrefillChunk(everybody[1], 0, 1),
            PrefillChunk(everybody[0], 64, 117),
            PrefillChunk(everybody[4], 32, 82, copy_from=5),
            PrefillChunk(everybody[2], 0, 33),
        ]
        found = runner.prefill(chunks)
    assert torch.equal(begun, alone[0][:64])
    for chunk, hidden in zip(chunks, found, strict=True):
        which = everybody.index(chunk.sequence)
        assert torch.equal(hidden, alone[which][chunk.start :]), which
        for cells in (runner.cache.keys, runner.cache.values):
            here, there = cells[:, 5 + which, :, : chunk.end], cells[:, which, :, : chunk.end]
            assert torch.equal(here, there), which


def test_company_does_not_change_a_decoded_rows_bits(
    gpt: GPT, dtype: torch.dtype, kept: KVCacheDType
) -> None:
    """One row of 1, 2, 3, ... 33 that decode together, first, last or in the middle."""
    slots = 33
    runner = Runner(gpt.to(dtype), slots, kv_cache_dtype=kept)
    ids = random_ids(slots, 60)
    everybody = []
    for slot in range(slots):
        prompt = ids[slot, : 20 + slot].tolist()
        prefill(runner, slot, prompt, [])
        one = sequence(slot, prompt)
        one.tokens.append(slot)
        one.computed = len(prompt)
        everybody.append(one)

    @torch.inference_mode()
    def logits(batch: Many[int]) -> Tensor:
        return runner.decode(tuple(everybody[i] for i in batch))

    alone = torch.cat([logits([i]) for i in range(slots)])
    for count in (2, 3, 4, 5, 7, 8, 12, 13, 31, 33):
        batch = torch.randperm(slots, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(logits(batch.tolist()), alone[batch]), count


def test_model_in_training_mode_is_refused() -> None:
    """It would apply its dropout to what it serves, and say nothing."""
    gpt = tiny_gpt(tiny_config(dropout=0.1)).train()
    with pytest.raises(ValueError, match="training mode"):
        Runner(gpt, 1)
