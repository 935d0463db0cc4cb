"""Sampling on a device against its twin, `sampling/sample.py`: on a CPU the same tokens, row
by row."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.kernels.cuda.sample import (
    NO_TOKEN,
    SamplingKind,
    filtered_rows,
    kind_of,
    pack,
    pick,
    sample_rows,
)
from logitd.model.inference.sampling.sample import (
    SamplingRow,
    filtered,
    sample_tokens,
    sampling_rows,
)
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN, ways
from tests.profiles import examples

WIDTHS = (1, 7, 64, 65, 1000)


def sampled(logits: Tensor, computed: Tensor, several: list[SamplingRow]) -> list[int | None]:
    sampling = sampling_rows(several)
    packed = torch.from_numpy(pack(sampling)).to(logits.device)
    token_ids = sample_rows(logits, computed, packed, kind_of(sampling)).tolist()
    return [None if token_id == NO_TOKEN else token_id for token_id in token_ids]


def rows(count: int, width: int, seed: int, steps: int) -> Tensor:
    """Logits of which a fifth is -inf; on a grid, with many equals, unless `steps` is 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, width, generator=generator)
    if steps:
        logits = (logits * steps).round() / steps
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -math.inf
    logits[:, 0] = 0.5  # something is left
    return logits


@settings(max_examples=examples(300))
@given(
    width=st.sampled_from(WIDTHS),
    several=st.lists(ways(), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([0, 1, 4, 1024]),
)
def test_samples_what_its_twin_samples(
    width: int, several: list[SamplingRow], seed: int, steps: int
) -> None:
    logits = rows(len(several), width, seed, steps)
    computed = torch.zeros_like(logits)
    computed[::5, -1] = math.nan
    assert sampled(logits, computed, several) == sample_tokens(
        logits, computed, sampling_rows(several)
    )


@settings(max_examples=examples(100))
@given(
    several=st.lists(ways(), min_size=1, max_size=6),
    others=st.lists(ways(), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_company_and_a_wider_kind_change_no_token(
    several: list[SamplingRow], others: list[SamplingRow], seed: int
) -> None:
    """Rows without filters among rows with them, and greedy ones among random ones."""
    logits = rows(len(several) + len(others), 65, seed, 4)
    own, computed = logits[: len(several)], torch.zeros_like(logits)
    alone = sampled(own, computed[: len(several)], several)
    assert sampled(logits, computed, [*several, *others])[: len(several)] == alone
    packed = torch.from_numpy(pack(sampling_rows(several)))
    for kind in SamplingKind:
        if kind >= kind_of(sampling_rows(several)):
            assert sample_rows(own, computed[: len(several)], packed, kind).tolist() == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e30, -2e30])
def test_rows_that_are_not_finite_have_no_token(bad: float) -> None:
    computed = torch.zeros(3, 65)
    computed[1, 64] = bad
    logits = torch.zeros(3, 65)
    first, second, third = sampled(logits, computed, [GREEDY, PLAIN, PLAIN])
    assert (first, second) == (0, None)
    assert third is not None


def test_row_whose_every_id_is_forbidden_ends_in_bounds() -> None:
    logits, computed = torch.full((3, 65), -math.inf), torch.zeros(3, 65)
    several = [GREEDY, PLAIN, dataclasses.replace(PLAIN, top_k=3, top_p=0.5)]
    assert sampled(logits, computed, several) == [0, 0, 0]


def test_dropped_ids_are_not_sampled_at_the_edges_of_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uniform draws of 0 and next to 1 find the first and the last id of any weight."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for number, expected in ((0.0, 1), (0.5, 3), (1 - 2**-53, 3), (1.0, 3)):
        monkeypatch.setattr(
            "logitd.model.inference.kernels.cuda.sample.uniforms",
            lambda *_, number=number: torch.tensor([number], dtype=torch.float64),
        )
        assert sampled(logits, torch.zeros(1, 5), [PLAIN]) == [expected]


def test_sums_that_fall_by_a_rounding_take_no_dropped_id() -> None:
    """Sums of a GPU are made of pieces and may fall by a rounding."""
    hair = 2**-53
    probs = torch.tensor([[0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    cumulated = torch.tensor([[0.5, 0.5 + 2 * hair, 1.0, 1.0]], dtype=torch.float64)
    for number, expected in ((0.49, 0), (0.5, 2), (0.9, 2)):
        assert pick(probs, cumulated, torch.tensor([number])).tolist() == [expected]


def test_top_p_of_1_drops_nothing_that_rounding_has_left_no_room_for() -> None:
    logits = torch.tensor([[0.0, -40.0, -45.0, -50.0]])  # the first one's share rounds to 1
    top_k, top_p = torch.tensor([3]), torch.tensor([1.0], dtype=torch.float64)
    left = filtered_rows(logits, top_k, top_p, torch.tensor([-math.inf]))
    expected = filtered(logits, sampling_rows([dataclasses.replace(PLAIN, top_k=3)]))
    assert torch.equal(left, expected)
    assert left.isfinite().tolist() == [[True, True, True, False]]
