"""Recorded work asks a GPU for no number, and computes nothing on the host.

The check is on torch's meta device, whose tensors have shapes and no numbers: there `tolist`,
`item` and a branch on a value raise, and so does arithmetic with a tensor on the CPU. Not covered
are indices on the CPU, and what CUDA alone computes (`is_cuda`).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import AttentionSelection, PrefillInput
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import Compute, Download, Integers
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, sampling_rows
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
META = torch.device("meta")
SLOTS = 6
FILTERED = SamplingRow(1.0, 3, 0.9, 0.1, seed=1, position=6, index=0)


class Nowhere:
    """A stream to nowhere, which runs what it records twice: what comes back is zeros."""

    def record(self, compute: Compute) -> Compute:
        compute()
        compute()
        return compute

    def upload(self, values: Integers, target: Tensor) -> None:
        assert (values.shape, values.flags.c_contiguous) == (target.shape, True)
        assert target.device == META

    def download(self, source: Tensor) -> Download:
        assert source.device == META
        return lambda: [0] * len(source)


def on_meta(make: DecoderMaker, dtype: torch.dtype, family: str, **options: Any) -> Any:
    """A decoder of a model without numbers, whose tables of positions are there all the same."""
    shape = {**FAMILIES[family], "n_layer": 2, "context_length": 256}
    gpt = GPT(tiny_config(**shape)).to(META).to(dtype).eval()
    return make(gpt, KVCache(gpt.config, SLOTS, device=META, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("family", "dtype", "batch_invariant"), values(list(FAMILIES), DTYPES, (False, True))
)
def test_steps_and_sampling_read_nothing_back(
    family: str, dtype: torch.dtype, batch_invariant: bool
) -> None:
    options: Any = {"batch_invariant": batch_invariant, "stream": Nowhere()}
    decoder = on_meta(GraphDecoder, dtype, family, **options)
    # Keys are copied together, or read where they lie.
    for rows, how in ((1, GREEDY), (2, FILTERED), (SLOTS, PLAIN)):
        slots, sampling = list(range(rows)), sampling_rows([how] * rows)
        logits = decoder.decode([1] * rows, slots, [5] * rows)
        assert (logits.device, logits.dtype) == (META, torch.float32)
        first = decoder.launch([1] * rows, slots, [6] * rows, sampling)
        decoder.launch_next(slots, slots, [7] * rows, sampling)
        assert first() == decoder.sample(logits, logits, sampling) == [0] * rows
    decoder.decode([1, 2, 3], [0, 0, 1], [5, 6, 5])  # a draft's rows


@pytest.mark.parametrize(("family", "make"), values(list(FAMILIES), (GraphDecoder, PlainDecoder)))
def test_prompts_ask_for_no_number(make: DecoderMaker, family: str) -> None:
    options = {"stream": Nowhere()} if make is GraphDecoder else {}
    decoder = on_meta(make, torch.bfloat16, family, **options)
    selection = AttentionSelection((0, 1), (0, 1), 40)
    with torch.inference_mode():
        for slot, (states, weights) in enumerate([(False, None), (True, None), (False, selection)]):
            for start, end in ((0, 32), (32, 40)):
                piece = PrefillInput([1] * (end - start), slot, start, states, weights)
                hidden = decoder.prefill([piece])[0].hidden
                assert (len(hidden), hidden.device) == (end - start, META)
        assert decoder.head(hidden[-1:]).dtype == torch.float32


def test_meta_device_raises_when_read() -> None:
    """The tests above rest on this."""
    tensor = torch.zeros(3, device=META)
    asks = (
        tensor.tolist,
        lambda: bool((tensor > 0).any()),
        lambda: tensor + torch.zeros(3),
        lambda: torch.cat((tensor, torch.zeros(3))),
    )
    for ask in asks:
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()
