"""Sampling on a device against its twin, `sampling/sample.py`: on a CPU the same tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.kernels.cuda import sample as on_device
from logitd.model.inference.kernels.cuda.sample import SamplingKind
from logitd.model.inference.sampling.sample import SamplingRow, sample_tokens, sampling_rows
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN, ways
from tests.profiles import examples


def sampled(logits: Tensor, computed: Tensor, several: list[SamplingRow]) -> list[int | None]:
    """The tokens, which all sufficient kinds choose alike."""
    sampling = sampling_rows(several)
    packed = torch.from_numpy(on_device.pack(sampling))
    kinds = [kind for kind in SamplingKind if kind >= on_device.kind_of(sampling)]
    given = [on_device.sample_rows(logits, computed, packed, kind).tolist() for kind in kinds]
    assert given == given[:1] * len(kinds)
    return [None if token_id == on_device.NO_TOKEN else token_id for token_id in given[0]]


@settings(max_examples=examples(300))
@given(
    width=st.sampled_from((1, 7, 64, 65, 1000)),
    several=st.lists(ways(), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([0, 1, 4, 1024]),
)
def test_token_is_the_twins(width: int, several: list[SamplingRow], seed: int, steps: int) -> None:
    """A fifth of the logits is -inf, and with `steps` many are equal. Other rows change no
    token."""
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e30, -2e30])
def test_row_that_is_not_finite_has_no_token(bad: float) -> None:
    computed = torch.zeros(3, 65)
    computed[1, 64] = bad
    first, second, third = sampled(torch.zeros(3, 65), computed, [GREEDY, PLAIN, PLAIN])
    assert (first, second, third is None) == (0, None, False)


@pytest.mark.parametrize(
    ("number", "expected"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3), (1.0, 3)]
)
def test_dropped_ids_are_not_sampled_at_the_edges_of_the_interval(
    number: float, expected: int
) -> None:
    """Sums on a GPU are made of pieces and may decrease by a rounding."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    cumulated = torch.tensor([[0.0, 0.5, 0.5 + 2**-52, 1.0, 1.0]], dtype=torch.float64)
    assert on_device.pick(probs, cumulated, torch.tensor([number]).double()).tolist() == [expected]
