"""The Triton kernels in Triton's interpreter, against the plain decoder and `sample_tokens`.

    TRITON_INTERPRET=1 python -m tests.model.inference.kernels.cuda.interpreted FAMILY...

Triton reads the variable when it is imported, so the checks run in a separate process. The
interpreter cannot multiply bfloat16 matrices.
"""

import math
import sys

import torch
import triton.language as tl
from torch import Tensor

from logitd.model.inference.kernels.base import PrefillInput
from logitd.model.inference.kernels.cuda import forward, kernels
from logitd.model.inference.kernels.cuda.check import tolerance
from logitd.model.inference.kernels.cuda.sample import FIELDS, NO_TOKEN, has_filters, pack
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, sample_tokens, sampling_rows
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt

LENGTHS = (3, 31, 20, 40, 7, 33)
"""Number of computed positions of each slot: within one tile of keys, across several tiles, and at
the edge of a tile."""
STEPS: dict[str, list[tuple[int, int]]] = {
    "one row": [(1, 0)],
    "several slots": [(slot, 0) for slot in (0, 1, 3)],
    "drafts": [(0, 0), (0, 1), (3, 0), (3, 1)],
    "repeated": [(4, 0), (2, 0), (4, 0)],
}
"""The rows of each kind of step, as pairs (slot, number of positions after the slot's length).
Prompts are computed like drafts, as consecutive rows of a slot."""
QUICK = ("one row", "drafts")
"""Kinds of steps that use different kernels."""
WHOLE = 2
"""Number of families that are tested in full: two layers, all kinds of steps, and each row
alone."""


@torch.inference_mode()
def check_family(name: str, dtype: torch.dtype, *, whole: bool) -> None:
    gpt = tiny_gpt(tiny_config(**{**FAMILIES[name], "n_layer": 1 + whole})).to(dtype)
    for kind in STEPS if whole else QUICK:
        rows = STEPS[kind]
        # More than FEW_ROWS are computed alike, batch-invariant or not.
        ways = [(True, 0), (True, 8)] + [(False, 0)] * (kind == "one row")
        for batch_invariant, forward.JOINED_ROWS in ways:
            expected, cache = prepared(gpt), prepared(gpt)
            step = forward.StepForward(gpt, cache, batch_invariant=batch_invariant)
            given = uploaded(rows)
            columns = [given[:, column].tolist() for column in range(3)]
            wanted = PlainDecoder(gpt, expected).decode(*columns)
            found = logits_of(step, given, kind == "drafts")
            off = (found - wanted).square().mean(-1).sqrt() / wanted.std(-1)
            assert float(off.max()) <= tolerance(dtype), (name, dtype, kind, batch_invariant)
            for slot, ahead in rows:
                end = LENGTHS[slot] + ahead + 1
                for one, other in zip(
                    cache.read(0, slot, end), expected.read(0, slot, end), strict=True
                ):
                    assert torch.allclose(one.float(), other.float(), atol=1e-2, rtol=1e-2)
            if batch_invariant and whole:
                alone = [logits_of(step, row, False) for row in given.split(1)]
                assert torch.equal(torch.cat(alone), found), (name, dtype, kind)


def prepared(gpt: GPT) -> KVCache:
    """A cache with computed prompts. All other cells hold NaN or infinity, which would spoil any
    sum."""
    cache = KVCache(gpt.config, len(LENGTHS), device=torch.device("cpu"), dtype=gpt_dtype(gpt))
    decoder = PlainDecoder(gpt, cache)
    for slot, length in enumerate(LENGTHS):
        ids = [(7 * place + slot) % 40 for place in range(length)]
        decoder.prefill([PrefillInput(ids, slot, 0)])
        cache.keys[:, slot, :, length:], cache.values[:, slot, :, length:] = math.nan, math.inf
    return cache


def gpt_dtype(gpt: GPT) -> torch.dtype:
    return gpt.token_embedding.weight.dtype


def uploaded(rows: list[tuple[int, int]]) -> Tensor:
    """Rows (R, 4 + FIELDS) with known tokens."""
    given = torch.zeros(len(rows), 4 + FIELDS, dtype=torch.int64)
    for row, (slot, ahead) in zip(given, rows, strict=True):
        row[:4] = torch.tensor([5 + slot + ahead, slot, LENGTHS[slot] + ahead, -1])
    return given


def logits_of(step: forward.StepForward, given: Tensor, several: bool) -> Tensor:
    """Logits of a step whose input tokens are the last sampled tokens."""
    sampled, given = given[:, 0].clone(), given.clone()
    given[:, 0], given[:, 3] = 0, torch.arange(len(given))
    logits = torch.full((len(given), step._gpt.config.vocab_size), math.nan)
    step.logits(given, sampled, logits, keys=64, several=several)
    return logits


@torch.inference_mode()
def check_sampling(times: int) -> None:
    gpt = tiny_gpt()
    cache = KVCache(gpt.config, 1, device=torch.device("cpu"), dtype=torch.float32)
    step = forward.StepForward(gpt, cache, batch_invariant=False)
    generator = torch.Generator().manual_seed(0)
    for number in range(times):
        width = (1, 63, 64, 200)[number % 4]
        ways = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1e-3, 0, 1.0, 0.0)]
        if number % 3 == 0:
            ways += [(1.0, 3, 1.0, 0.0), (1.5, 0, 0.7, 0.0), (1.0, 0, 1.0, 0.2)]
        sampling = sampling_rows(
            SamplingRow(*way, seed=number, position=place, index=0)
            for place, way in enumerate(ways)
        )
        logits = 3 * torch.randn(len(ways), width, generator=generator)
        if number % 5 == 0:  # several are the likeliest
            logits = logits.round()
        logits[torch.rand(logits.shape, generator=generator) < 0.2] = -math.inf
        logits[:, 0] = 0.5
        computed = torch.zeros_like(logits)
        computed[number % len(ways), -1] = (0.0, math.nan, math.inf, -2e30)[number % 4]
        expected = sample_tokens(logits, computed, sampling)
        packed = torch.from_numpy(pack(sampling))
        found = torch.full((len(ways),), -2)
        step.sample(logits, computed, packed, found, filtered=has_filters(sampling))
        assert [None if one == NO_TOKEN else one for one in found.tolist()] == expected, number


if __name__ == "__main__":
    # Small sizes, so that tiny models have several parts and chunks.
    forward.PART_CELLS, forward.SURVEYED, forward.DEEP, forward.SPAN = 2**8, 64, 100, 64
    kernels.CHUNK, forward.TILES = tl.constexpr(32), ((0, 16, 32, 128, 3, 4),)
    families = sys.argv[1:]
    many = len(families) > 1
    check_sampling(20 if many else 6)
    for number, family in enumerate(families):
        check_family(family, torch.float32, whole=many and number < WHOLE)
    if many:
        check_family(families[0], torch.float16, whole=False)
