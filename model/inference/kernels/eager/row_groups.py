"""Row groups: numbers of rows in stock torch's products that keep the bits of each row.

Torch's libraries choose the kernel of a product by its number of rows, among other things, and
kernels add in different orders. The limits depend on the processor: on AMD's, multiples of 4 from 4
rows up are one class; on Intel's with AVX-512, float32 has another class from 16 rows up. So the
groups are found by trial, on the machine and for the model's shapes: a row is multiplied among
more or fewer copies of itself. The trials use sums that cancel. Only their rounding is left, so
another order of additions shows in bfloat16 too, in which it otherwise changes one of thousands of
results. Does not cover attention, which is computed per sequence, or GPUs, on which plain torch
does not promise this.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT, Block

MULTIPLES = (4, 8, 16, BLOCK)
"""Multiples of rows to try for decode steps, the cheapest first."""
PREFILL_ROWS = 256
"""The most positions of prompts that share a product."""
UNBOUNDED = 1 << 20

Product = Callable[[Tensor], Tensor]
"""A product of activations (rows, 1, width) or (1, rows, width)."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Compute at most `most` rows at a time, padded to a multiple of `multiple`."""

    multiple: int
    most: int

    def parts(self, rows: int) -> list[slice]:
        return [slice(first, first + self.most) for first in range(0, max(rows, 1), self.most)]

    def padding(self, rows: int) -> int:
        """Rows that fill up a multiple."""
        return -rows % self.multiple


def decode_row_groups(gpt: GPT) -> RowGroups:
    """The groups of a model's decode steps and head."""
    if not gpt.token_embedding.weight.is_cpu:
        return RowGroups(MULTIPLES[0], UNBOUNDED)
    products = [_Probed(product, row, (-1, 1)) for product, row in _products(gpt)]
    for multiple in MULTIPLES:
        if _constant_up_to(products, multiple, BLOCK) == BLOCK:
            return RowGroups(multiple, BLOCK)
    # No multiple works: always use BLOCK rows, or one if bits depend on a row's place.
    fixed = all(product.bits(BLOCK) is not None for product in products)
    return RowGroups(BLOCK, BLOCK) if fixed else RowGroups(1, 1)


def prefill_rows(gpt: GPT) -> int:
    """The most positions of prompts that share the products of a model's blocks: whole blocks up to
    `PREFILL_ROWS`."""
    if not gpt.token_embedding.weight.is_cpu:
        return UNBOUNDED
    products = [_Probed(product, row, (1, -1)) for product, row in _block_products(gpt)]
    return max(BLOCK, _constant_up_to(products, BLOCK, PREFILL_ROWS))


class _Probed:
    """A product of equal rows."""

    def __init__(self, product: Product, row: Tensor, shape: tuple[int, int]) -> None:
        self._product = product
        self._row = row
        self._shape = shape
        self._found: dict[int, Tensor | None] = {}

    def bits(self, rows: int) -> Tensor | None:
        """The result of a row among this many; None if it depends on the row's place."""
        if rows not in self._found:
            width = len(self._row)
            given = self._row.expand(rows, width).reshape(*self._shape, width)
            result = self._product(given.contiguous()).flatten(0, 1)  # (rows, ...)
            same = torch.equal(result, result[:1].expand_as(result))
            self._found[rows] = result[0].clone() if same else None
        return self._found[rows]


@torch.inference_mode()
def _constant_up_to(products: list[_Probed], multiple: int, limit: int) -> int:
    """The largest multiple up to `limit` such that a row has the same bits among this many rows and
    among any smaller multiple."""
    for rows in range(multiple, limit + 1, multiple):
        for product in products:
            one, other = product.bits(multiple), product.bits(rows)
            if one is None or other is None or not torch.equal(one, other):
                return rows - multiple
    return limit


def _products(gpt: GPT) -> Iterator[tuple[Product, Tensor]]:
    """The products of a step, each with a row for it."""
    yield from _block_products(gpt)
    yield gpt.logits, _row(gpt, gpt.config.d_model)


def _block_products(gpt: GPT) -> Iterator[tuple[Product, Tensor]]:
    """The products of a block, with other weights. All blocks are alike."""
    block = gpt.blocks[0]
    assert isinstance(block, Block)
    shapes = {
        (linear.weight.shape, linear.bias is not None): linear
        for linear in (block.qkv, block.attention_out, block.mlp_up, block.mlp_down)
    }
    for linear in shapes.values():
        rows, width = linear.weight.shape
        weight, row = _that_cancel(rows, width, _row(gpt, width))
        bias = None if linear.bias is None else torch.zeros_like(weight[:, 0])
        yield partial(F.linear, weight=weight, bias=bias), row


def _that_cancel(rows: int, width: int, row: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (rows, width) and a row (width) whose products are zero up to rounding: each has half
    its terms negated in another order."""
    generator = torch.Generator().manual_seed(rows)
    first, second = torch.randperm(width, generator=generator)[: width // 2 * 2].chunk(2)
    weight = torch.zeros(rows, width).to(row)
    weight[:, first] = torch.randn(rows, width // 2, generator=generator).to(row)
    weight[:, second] = -weight[:, first]
    row = row.clone()
    row[second] = row[first]
    return weight, row


def _row(gpt: GPT, width: int) -> Tensor:
    weight = gpt.token_embedding.weight
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator).to(weight)
