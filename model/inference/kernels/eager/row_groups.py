"""Row groups: find the numbers of rows for which torch's matrix products keep the bits of each row.

Torch's libraries choose the kernel of a product by its number of rows, among other things, and
kernels add in different orders. The numbers of rows at which the order changes depend on the
processor. On AMD, all multiples of 4 rows use the same order; on Intel with AVX-512, float32 uses a
different order from 16 rows on. So the groups are found by trial, on this machine and for the
model's shapes: a row is multiplied together with more or fewer copies of itself. The trials use
sums whose terms cancel. Only their rounding remains, so a different order of additions shows even
in bfloat16, where it usually changes only one result in thousands. Attention is not covered,
because it is computed per sequence; nor are GPUs, on which plain torch is not batch-invariant.
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
"""Candidates for the padding of decode steps, cheapest first: the number of rows is padded to a
multiple of the candidate."""
PREFILL_ROWS = 256
"""Maximum number of prompt positions in one matrix product."""
UNBOUNDED = 1 << 20

Product = Callable[[Tensor], Tensor]
"""A matrix product of activations (rows, 1, width) or (1, rows, width)."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """A rule for products: at most `most` rows each, padded to a multiple of `multiple`."""

    multiple: int
    most: int

    def parts(self, rows: int) -> list[slice]:
        return [slice(first, first + self.most) for first in range(0, max(rows, 1), self.most)]

    def padding(self, rows: int) -> int:
        """Number of rows to add to this many rows."""
        return -rows % self.multiple


def decode_row_groups(gpt: GPT) -> RowGroups:
    """The row groups of a model's decode steps and head."""
    if not gpt.token_embedding.weight.is_cpu:
        return RowGroups(MULTIPLES[0], UNBOUNDED)
    products = [_Probed(product, row, (-1, 1)) for product, row in _products(gpt)]
    for multiple in MULTIPLES:
        if _constant_up_to(products, multiple, BLOCK) == BLOCK:
            return RowGroups(multiple, BLOCK)
    # If no multiple works, always use BLOCK rows, or one if the bits depend on a row's index.
    fixed = all(product.bits(BLOCK) is not None for product in products)
    return RowGroups(BLOCK, BLOCK) if fixed else RowGroups(1, 1)


def prefill_rows(gpt: GPT) -> int:
    """Maximum number of prompt positions in one product of a model's blocks: a multiple of BLOCK up
    to PREFILL_ROWS."""
    if not gpt.token_embedding.weight.is_cpu:
        return UNBOUNDED
    products = [_Probed(product, row, (1, -1)) for product, row in _block_products(gpt)]
    return max(BLOCK, _constant_up_to(products, BLOCK, PREFILL_ROWS))


class _Probed:
    """A matrix product that is tested with different numbers of copies of one row."""

    def __init__(self, product: Product, row: Tensor, shape: tuple[int, int]) -> None:
        self._product = product
        self._row = row
        self._shape = shape
        self._found: dict[int, Tensor | None] = {}

    def bits(self, rows: int) -> Tensor | None:
        """The product's result for the row, with this number of copies; None if copies have
        different results."""
        if rows not in self._found:
            width = len(self._row)
            given = self._row.expand(rows, width).reshape(*self._shape, width)
            result = self._product(given.contiguous()).flatten(0, 1)  # (rows, ...)
            same = torch.equal(result, result[:1].expand_as(result))
            self._found[rows] = result[0].clone() if same else None
        return self._found[rows]


@torch.inference_mode()
def _constant_up_to(products: list[_Probed], multiple: int, limit: int) -> int:
    """The largest multiple of `multiple`, up to `limit`, such that a row has the same bits in
    products of this number of rows and of all smaller multiples."""
    for rows in range(multiple, limit + 1, multiple):
        for product in products:
            one, other = product.bits(multiple), product.bits(rows)
            if one is None or other is None or not torch.equal(one, other):
                return rows - multiple
    return limit


def _products(gpt: GPT) -> Iterator[tuple[Product, Tensor]]:
    """The matrix products of a decode step, each with a row to multiply."""
    yield from _block_products(gpt)
    yield gpt.logits, _row(gpt, gpt.config.d_model)


def _block_products(gpt: GPT) -> Iterator[tuple[Product, Tensor]]:
    """The matrix products of a block, with weights whose products cancel out. All blocks have the
    same shapes."""
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
    """Weights (rows, width) and a row (width,) whose products are zero except for rounding: half of
    the terms of each product are the negated other half, in a different order."""
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
