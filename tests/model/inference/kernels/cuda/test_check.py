"""The self-check: a decoder that computes something else, raises or mixes rows does not serve."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Collect, Prefilled, PrefillInput
from logitd.model.inference.kernels.cuda.check import find_fault
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import Compute, DirectStream
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.select import KernelError, cuda_path
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.kernels.cuda.test_decoder import DEVICES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype", "batch_invariant"), values(list(FAMILIES), DTYPES, (False, True))
)
def test_graph_decoder_passes(
    device: str, family: str, dtype: torch.dtype, batch_invariant: bool
) -> None:
    gpt = tiny_gpt(tiny_config(**{"n_layer": 2, **FAMILIES[family]})).to(dtype).to(device)
    path = cuda_path(gpt, "auto", batch_invariant=batch_invariant)
    assert path.name == "CUDA graphs" + ", batch-invariant" * batch_invariant
    assert path.note is None


class Refusing(DirectStream):
    def record(self, compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nhint")


class Stale(DirectStream):
    """Replays nothing after the first time."""

    def record(self, compute: Compute) -> Compute:
        compute()
        return lambda: None


class BadPrefill(GraphDecoder):
    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        return super().prefill([PrefillInput(p.token_ids[::-1], p.slot, p.start) for p in pieces])


class BadStep(GraphDecoder):
    """Wrong from 128 keys on."""

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        logits = super().decode(token_ids, slots, positions)
        return logits.roll(1, 0) if max(positions) >= 128 and len(slots) > 1 else logits


class NotFinite(GraphDecoder):
    def decode(self, *rows: Any) -> Tensor:
        logits = super().decode(*rows)
        logits[-1, 3] = torch.nan
        return logits


class BadSample(GraphDecoder):
    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        sampled = super().sample(logits, computed, sampling)
        return sampled if sampling["divisor"][0] == 0 else [0] * len(sampled)


class BadLaunch(GraphDecoder):
    def launch_next(self, rows: Sequence[int], *others: Any) -> Collect:
        return super().launch_next(rows[::-1], *others)


class Mixing(GraphDecoder):
    """A row's bits depend on the batch, by less than any tolerance."""

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        logits = super().decode(token_ids, slots, positions)
        return logits if len(slots) == 1 else logits.mul_(1 + 2**-20)


def refusing(gpt: GPT, cache: KVCache, **options: Any) -> GraphDecoder:
    return GraphDecoder(gpt, cache, stream=Refusing(), **options)


def stale(gpt: GPT, cache: KVCache, **options: Any) -> GraphDecoder:
    return GraphDecoder(gpt, cache, stream=Stale(), **options)


def raising(gpt: GPT, cache: KVCache, **options: Any) -> GraphDecoder:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (raising, "OutOfMemoryError: CUDA out of memory$"),
        (refusing, "RuntimeError: operation not permitted when stream is capturing$"),
        (stale, r"step \d"),
        (BadPrefill, r"prompts: logits [\d.]+ .* allowed"),
        (BadStep, r"step \d: logits [\d.]+ .* allowed"),
        (NotFinite, "step 0: logits nan"),
        (BadSample, r"step 0: sampling \(1.0"),
        (BadLaunch, "launched ahead"),
    ],
)
def test_faulty_decoder_leaves_serving_to_plain_torch(make: Any, fault: str) -> None:
    config = tiny_config(n_layer=2, context_length=256, vocab_size=300)
    gpt = tiny_gpt(config)
    path = cuda_path(gpt, "auto", batch_invariant=False, make=make)
    assert (path.make_decoder, path.make_owner, path.name) == (PlainDecoder, PlainDecoder, "torch")
    assert re.search(fault, path.note or ""), path.note
    with pytest.raises(KernelError, match="batch_invariant"):
        cuda_path(gpt, "auto", batch_invariant=True, make=make)


def test_bits_that_depend_on_the_batch_are_a_fault_if_invariance_is_asked_for() -> None:
    gpt = tiny_gpt()
    assert cuda_path(gpt, "auto", batch_invariant=False, make=Mixing).note is None
    with pytest.raises(KernelError, match=r"other bits.*batch_invariant.*cpu"):
        cuda_path(gpt, "auto", batch_invariant=True, make=Mixing)


def test_context_too_short_for_the_check_is_a_fault() -> None:
    gpt = tiny_gpt(tiny_config(context_length=6))
    assert "context_length of 7" in (find_fault(gpt, GraphDecoder, batch_invariant=False) or "")
    gpt = tiny_gpt(tiny_config(context_length=7))
    assert find_fault(gpt, GraphDecoder, batch_invariant=False) is None


def test_device_that_the_check_broke_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    with pytest.raises(KernelError, match=r"out of memory.*kernels.*torch"):
        cuda_path(tiny_gpt(), "auto", batch_invariant=False, make=raising)
