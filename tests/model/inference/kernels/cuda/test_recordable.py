"""Recorded work reads no number of a GPU and computes nothing on the host: both raise on torch's
meta device, whose tensors have no numbers. Indices on the CPU, and branches for CUDA (`is_cuda`),
are not covered."""

import pytest
import torch
from torch import Tensor

from logitd.model.inference.kernels.base import PrefillInput
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import Compute, Download, Integers
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
    """A stream that runs each recording twice and downloads zeros."""

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


@pytest.mark.parametrize(
    ("family", "dtype", "batch_invariant"), values(list(FAMILIES), DTYPES, (False, True))
)
@torch.inference_mode()
def test_nothing_is_read_back(family: str, dtype: torch.dtype, batch_invariant: bool) -> None:
    shape = {**FAMILIES[family], "n_layer": 2, "context_length": 256}
    gpt = GPT(tiny_config(**shape)).to(META).to(dtype).eval()
    cache = KVCache(gpt.config, SLOTS, device=META, dtype=dtype)
    decoder = GraphDecoder(gpt, cache, batch_invariant=batch_invariant, stream=Nowhere())
    # Keys are gathered, or read in place.
    for rows, how in ((1, GREEDY), (2, FILTERED), (SLOTS, PLAIN)):
        slots, sampling = list(range(rows)), sampling_rows([how] * rows)
        logits = decoder.decode([1] * rows, slots, [5] * rows)
        assert (logits.device, logits.dtype) == (META, torch.float32)
        first = decoder.launch([1] * rows, slots, [6] * rows, sampling)
        decoder.launch_next(slots, slots, [7] * rows, sampling)
        assert first() == decoder.sample(logits, logits, sampling) == [0] * rows
    decoder.decode([1, 2, 3], [0, 0, 1], [5, 6, 5])  # a draft's rows
    for start, end in ((0, 32), (32, 40)):
        (done,) = decoder.prefill([PrefillInput([1] * (end - start), 0, start)])
        assert done.hidden.shape[0] == end - start
    assert decoder.head(done.hidden[-1:]).dtype == torch.float32
