"""The self-check: a decoder that computes wrong results, raises or mixes rows is not used."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitd.model.inference.kernels.base import PrefillInput
from logitd.model.inference.kernels.cuda.check import find_fault
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import Compute, DirectStream
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.select import KernelError, cuda_path
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.kernels.graphs import graph_decoder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPT = tiny_gpt(tiny_config(n_layer=2, context_length=256, vocab_size=300))


@pytest.mark.parametrize(
    ("family", "dtype", "batch_invariant"), values(list(FAMILIES), DTYPES, (False, True))
)
def test_graph_decoder_passes(family: str, dtype: torch.dtype, batch_invariant: bool) -> None:
    gpt = tiny_gpt(tiny_config(**{"n_layer": 2, **FAMILIES[family]})).to(dtype)
    path = cuda_path(gpt, "auto", batch_invariant=batch_invariant, make=graph_decoder)
    assert path.name == "CUDA graphs" + ", batch-invariant" * batch_invariant
    assert path.note is None


class Refusing(DirectStream):
    def record(self, compute: Compute, undo: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nhint")


class Stale(DirectStream):
    """A stream whose recordings do nothing when they are replayed."""

    def record(self, compute: Compute, undo: Compute) -> Compute:
        compute()
        return lambda: None


def spoiled(name: str, spoil: Callable[..., Any]) -> Callable[..., GraphDecoder]:
    """A function that makes decoders in which `spoil` replaces the method `name`. `spoil` receives
    the original method and its arguments."""

    def make(*given: Any, **options: Any) -> GraphDecoder:
        decoder = graph_decoder(*given, **options)
        right = getattr(decoder, name)
        setattr(decoder, name, lambda *arguments: spoil(right, *arguments))
        return decoder

    return make


def raising(*_: Any, **__: Any) -> GraphDecoder:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def with_stream(stream: DirectStream) -> Callable[..., GraphDecoder]:
    return lambda *given, **options: graph_decoder(*given, stream=stream, **options)


def backwards(prefill: Any, pieces: list[PrefillInput]) -> Any:
    return prefill([PrefillInput(one.token_ids[::-1], one.slot, one.start) for one in pieces])


def swapped_from_128_keys(decode: Any, ids: Any, slots: Any, positions: Any) -> Any:
    logits = decode(ids, slots, positions)
    return logits.roll(1, 0) if max(positions) >= 128 and len(slots) > 1 else logits


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (raising, "OutOfMemoryError: CUDA out of memory$"),
        (with_stream(Refusing()), "RuntimeError: operation not permitted .* capturing$"),
        (with_stream(Stale()), r"step \d"),
        (spoiled("prefill", backwards), r"prompts: .* [\d.]+ .* limit"),
        (spoiled("decode", swapped_from_128_keys), r"step \d: .* [\d.]+ .* limit"),
        (spoiled("decode", lambda right, *rows: right(*rows) * torch.nan), "step 0: .* nan "),
        (spoiled("sample", lambda right, *rows: [0] * len(rows[0])), "step 0: sampling"),
        (spoiled("launch_next", lambda right, rows, *rest: right(rows[::-1], *rest)), "ahead"),
    ],
)
def test_faulty_decoder_is_replaced_by_plain_torch(make: Any, fault: str) -> None:
    path = cuda_path(GPT, "auto", batch_invariant=False, make=make)
    assert (path.make_decoder, path.make_owner, path.name) == (PlainDecoder, PlainDecoder, "torch")
    assert re.search(fault, path.note or ""), path.note
    with pytest.raises(KernelError, match="batch_invariant"):
        cuda_path(GPT, "auto", batch_invariant=True, make=make)


def test_bits_that_depend_on_the_batch_fail_batch_invariance() -> None:
    make = spoiled("decode", lambda right, *rows: right(*rows) * (1 + len(rows[0]) * 2**-20))
    assert cuda_path(GPT, "auto", batch_invariant=False, make=make).name == "CUDA graphs"
    with pytest.raises(KernelError, match=r"bit-identical.*batch_invariant.*cpu"):
        cuda_path(GPT, "auto", batch_invariant=True, make=make)


def test_check_needs_some_context() -> None:
    short, shorter = (tiny_gpt(tiny_config(context_length=length)) for length in (7, 6))
    assert find_fault(short, graph_decoder, batch_invariant=False) is None
    fault = find_fault(shorter, graph_decoder, batch_invariant=False)
    assert "context_length of at least 7" in (fault or "")


def test_device_broken_by_the_check_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    with pytest.raises(KernelError, match=r"out of memory.*kernels.*torch"):
        cuda_path(GPT, "auto", batch_invariant=False, make=raising)
