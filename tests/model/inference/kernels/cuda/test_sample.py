"""Sampling on a device against its twin, `sampling/sample.py`: uploaded parameters and filters."""

import math
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.kernels.cuda.sample import NO_TOKEN, has_filters, pack
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, sample_tokens, sampling_rows
from tests.model.factories import tiny_gpt
from tests.model.inference.kernels.cpu.test_native_sample import ways
from tests.model.inference.kernels.graphs import TorchForward
from tests.profiles import examples


def sampled(logits: Tensor, computed: Tensor, several: list[SamplingRow]) -> list[int | None]:
    """The sampled tokens. If no row has a filter, sampling without filters must give the same
    tokens."""
    sampling, gpt = sampling_rows(several), tiny_gpt()
    cache = KVCache(gpt.config, 1, device=torch.device("cpu"), dtype=torch.float32)
    packed = torch.from_numpy(pack(sampling))
    out = torch.empty_like(packed[:, 0])
    sample = partial(TorchForward(gpt, cache).sample, logits, computed, packed, out)
    sample(filtered=True)
    filtered = out.tolist()
    if not has_filters(sampling):
        sample(filtered=False)
        assert out.tolist() == filtered
    return [None if token_id == NO_TOKEN else token_id for token_id in filtered]


@settings(max_examples=examples(300))
@given(
    width=st.sampled_from((1, 7, 64, 65, 1000)),
    several=st.lists(ways(), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([0, 1, 4, 1024]),
)
def test_token_is_the_twins(width: int, several: list[SamplingRow], seed: int, steps: int) -> None:
    """A fifth of the logits is -inf. If `steps` is not 0, the logits are rounded to multiples of
    1 / `steps`, so that many are equal. Each row's token does not depend on the other rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(several), width, generator=generator)
    if steps:
        logits = (logits * steps).round() / steps
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -math.inf
    logits[:, 0] = 0.5  # something is left
    computed = torch.zeros_like(logits)
    computed[::5, -1] = math.nan
    expected = sample_tokens(logits, computed, sampling_rows(several))
    assert sampled(logits, computed, several) == expected
    assert sampled(logits[:1], computed[:1], several[:1]) == expected[:1]
