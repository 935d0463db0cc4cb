"""Activations: both implementations agree, and inference keeps a row's bits in any batch."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from logitd.model.transformer.activation import activate
from logitd.model.transformer.config import Activation

KINDS: tuple[Activation, ...] = get_args(Activation)
WIDTHS = (2, 14, 24, 48, 100, 128, 1000)
ROWS = (1, 2, 3, 4, 5, 8, 17, 64, 257)


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs(width: int) -> torch.Tensor:
    return 3 * torch.randn(max(ROWS), width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_the_same_in_both_spellings(kind: Activation) -> None:
    h = inputs(128)
    torch.testing.assert_close(
        activate(h, kind, fused=False), activate(h, kind, fused=True), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        activate(h.bfloat16(), kind, fused=False),
        activate(h.bfloat16(), kind, fused=True),
        rtol=2e-2,
        atol=1e-3,
    )


def bits_that_depend_on_the_batch(kind: Activation, *, fused: bool) -> list[tuple[int, int]]:
    """The pairs (width, number of rows) for which a row's bits in the batch differ from its bits
    when it is computed alone."""
    results = []
    for width in WIDTHS:
        h = inputs(width)
        alone = torch.cat([activate(row[None].clone(), kind, fused=fused) for row in h])
        for rows in ROWS:
            if not torch.equal(activate(h[:rows].clone(), kind, fused=fused), alone[:rows]):
                results.append((width, rows))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_row_has_the_same_bits_in_any_batch(kind: Activation, threads: int) -> None:
    """With torch's sigmoid, the gate of a value embedding once had different bits with 28 sequences
    than with 4: the tokens were the same, but the logprobs were not."""
    assert bits_that_depend_on_the_batch(kind, fused=False) == []
