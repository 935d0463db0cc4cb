"""Row groups: the measured group sizes keep a row's bits on any processor.

On AMD's processors, groups of a multiple of 4 rows keep the bits. On Intel processors with AVX-512,
plain torch gives a row of a float32 model different bits among 15 rows than among 16.
"""

import pytest
import torch
from torch import Tensor

from logitd.model.inference.kernels.eager.decoder import grouped_logits
from logitd.model.inference.kernels.eager.row_groups import (
    MULTIPLES,
    PREFILL_ROWS,
    RowGroups,
    decode_row_groups,
    prefill_rows,
)
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT, Block
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt

DTYPES = [torch.float32, torch.bfloat16]


def served_gpt(dtype: torch.dtype) -> GPT:
    """A model as wide as real small models. With tiny widths, the numbers of rows that give the
    same bits are different."""
    return tiny_gpt(
        tiny_config(d_model=256, head_dim=64, n_head=4, d_ff=1024, vocab_size=2048, n_layer=1)
    ).to(dtype)


@torch.inference_mode()
def bits_of_a_row(gpt: GPT, rows: int, place: int, row_groups: RowGroups) -> Tensor:
    """The logits of one row in a batch of `rows` random rows."""
    others = torch.randn(rows, gpt.config.d_model, generator=torch.Generator().manual_seed(rows))
    one = torch.randn(gpt.config.d_model, generator=torch.Generator().manual_seed(0))
    others[place] = one
    dtype = gpt.token_embedding.weight.dtype
    return grouped_logits(gpt, others.to(dtype), row_groups)[place]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    gpt = served_gpt(dtype)
    groups = decode_row_groups(gpt)
    alone = bits_of_a_row(gpt, 1, 0, groups)
    for rows in (2, 4, 5, 12, 15, 16, 17, 31, 32, 33, 40, 64, 70):
        for place in {0, rows // 2, rows - 1}:
            assert torch.equal(bits_of_a_row(gpt, rows, place, groups), alone), (rows, place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_blocks_that_share_a_product_change_no_row(dtype: torch.dtype) -> None:
    gpt = served_gpt(dtype)
    most, linear = prefill_rows(gpt), gpt.blocks[0]
    assert isinstance(linear, Block)
    one = torch.randn(1, BLOCK, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = linear.mlp_up(one)
    for count in range(2, most // BLOCK + 1):
        others = torch.randn(1, BLOCK * (count - 1), 256).to(dtype)
        assert torch.equal(linear.mlp_up(torch.cat([others, one], dim=1))[:, -BLOCK:], alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_groups(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    groups = decode_row_groups(gpt)
    assert groups.multiple in (1, *MULTIPLES)
    assert groups.most % groups.multiple == 0
    assert prefill_rows(gpt) in range(BLOCK, PREFILL_ROWS + 1, BLOCK)


class Stepwise:
    """A head that switches kernels at the given numbers of rows. If `by_place`, its results also
    depend on the index of a row."""

    def __init__(self, *borders: int, by_place: bool = False) -> None:
        self.borders, self.by_place = borders, by_place

    def __call__(self, x: Tensor) -> Tensor:
        kernel = sum(len(x) >= border for border in self.borders)
        places = torch.arange(len(x)) % 3 if self.by_place else torch.zeros(len(x))
        return x + kernel + places[:, None, None]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (Stepwise(), RowGroups(4, BLOCK)),
        (Stepwise(2, 4), RowGroups(4, BLOCK)),
        (Stepwise(5), RowGroups(8, BLOCK)),
        (Stepwise(16), RowGroups(16, BLOCK)),
        (Stepwise(17), RowGroups(BLOCK, BLOCK)),
        (Stepwise(33), RowGroups(4, BLOCK)),
        (Stepwise(by_place=True), RowGroups(1, 1)),
    ],
    ids=["one class", "AMD", "eight", "Intel", "seventeen", "behind a group", "by place"],
)
def test_cheapest_groups_are_chosen(
    head: Stepwise, expected: RowGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = tiny_gpt()
    monkeypatch.setattr(
        "logitd.model.inference.kernels.eager.row_groups._block_products", lambda gpt: iter(())
    )
    monkeypatch.setattr(gpt, "logits", head)
    assert decode_row_groups(gpt) == expected


def test_groups_divide_rows() -> None:
    groups = RowGroups(8, 32)
    assert [range(70)[part] for part in groups.parts(70)] == [
        range(32), range(32, 64), range(64, 70)
    ]  # fmt: skip
    assert [groups.padding(rows) for rows in (1, 8, 9, 32)] == [7, 0, 7, 0]
    assert [range(0)[part] for part in groups.parts(0)] == [range(0)], "a head of no rows"
