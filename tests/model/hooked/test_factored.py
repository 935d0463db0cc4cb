"""FactoredMatrix, compared with the product of its factors. `test_against_transformer_lens.py`
compares it with TransformerLens' class."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.hooked.factored import FactoredMatrix

SIZES = st.integers(1, 6)


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(found: Any, expected: Tensor) -> None:
    dense = found.AB if isinstance(found, FactoredMatrix) else found
    assert found.shape == expected.shape
    assert_close(dense, expected, rtol=0, atol=1e-9)


@given(st.lists(SIZES, max_size=2), SIZES, SIZES, SIZES, SIZES)
def test_products_and_decomposition_are_those_of_the_product(
    leading: list[int], left: int, middle: int, right: int, further: int
) -> None:
    matrix = FactoredMatrix(random(*leading, left, middle), random(middle, right))
    dense = matrix.A @ matrix.B
    same(matrix, dense)
    same(matrix.T, dense.mT)
    same(2 * matrix, 2 * dense)
    same(matrix @ random(right, further), dense @ random(right, further))
    same(random(further, left) @ matrix, random(further, left) @ dense)
    other = FactoredMatrix(random(right, middle), random(middle, further))
    same(matrix @ other, dense @ other.AB)
    same(matrix @ random(right), dense @ random(right))
    same(random(left) @ matrix, (random(left) @ dense))
    U, S, V = matrix.svd()
    same(U * S[..., None, :] @ V.mT, dense)
    same(matrix.make_even(), dense)
    assert_close(matrix.norm(), torch.linalg.matrix_norm(dense))


def test_eigenvalues_are_those_of_the_product() -> None:
    matrix = FactoredMatrix(random(5, 2), random(2, 5))
    found = sorted(matrix.eigenvalues.tolist(), key=abs)
    expected = sorted(torch.linalg.eigvals(matrix.AB).tolist(), key=abs)[-2:]
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="2 rows and 3 columns"):
        _ = FactoredMatrix(random(2, 2), random(2, 3)).eigenvalues
    with pytest.raises(ValueError, match="A has 2 columns and B has 3 rows"):
        FactoredMatrix(random(2, 2), random(3, 2))


def test_an_index_chooses_matrices_rows_and_columns() -> None:
    matrix = FactoredMatrix(random(2, 3, 5, 2), random(2, 3, 2, 4))
    dense, rows = matrix.AB, torch.tensor([4, 0])
    same(matrix[1], dense[1])
    same(matrix[:, -1], dense[:, -1])
    same(matrix[0, 1, 2], dense[0, 1, 2:3])
    same(matrix[..., -1], dense[..., -1:])
    same(matrix[1, ..., :2, -2], dense[1, :, :2, -2:-1])
    same(matrix[:, :, rows], dense[:, :, rows])
    same(matrix[None, 1], dense[None, 1])
    same(matrix.unsqueeze(0), dense[None])
    with pytest.raises(IndexError, match=r"\[2, 3, 5, 4\]"):
        matrix[0, 0, 0, 0, 0]
