"""FactoredMatrix: a product of two matrices that is computed only on request.

The circuits of a head are such products: `W_Q W_K^T` (QK) and `W_V W_O` (OV) have d_model rows and
columns, but a rank of at most d_head. Names and results are the same as for TransformerLens' class:
eigenvalues, singular values and further products come from the factors.

Shapes: A (..., L, M), B (..., M, R), with leading axes that broadcast.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class FactoredMatrix:
    """The matrices `A @ B` (..., L, R)."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        if A.shape[-1] != B.shape[-2]:
            raise ValueError(f"A has {A.shape[-1]} columns and B has {B.shape[-2]} rows")
        leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        self.A = A.expand(*leading, *A.shape[-2:])
        self.B = B.expand(*leading, *B.shape[-2:])
        self.ldim, self.mdim = A.shape[-2:]
        self.rdim = B.shape[-1]
        self.shape = torch.Size((*leading, self.ldim, self.rdim))
        self.ndim = len(self.shape)
        self.has_leading_dims = self.ndim > 2
        self.pair = self.A, self.B

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"

    @property
    def AB(self) -> Tensor:
        """The product (..., L, R)."""
        return self.A @ self.B

    @property
    def BA(self) -> Tensor:
        """The product in the other order (..., M, M). Raises ValueError unless L = R."""
        if self.ldim != self.rdim:
            raise ValueError(
                f"not a square matrix: it has {self.ldim} rows and {self.rdim} columns"
            )
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __matmul__(self, other: Any) -> Any:
        """A FactoredMatrix, or the tensor (..., L) for a vector (R,)."""
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim == 1:
            return (self.A @ (self.B @ other)[..., None])[..., 0]
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Tensor) -> Any:
        """A FactoredMatrix, or the tensor (..., R) for a vector (L,)."""
        product = (self.T @ other.mT) if other.ndim > 1 else self.T @ other
        return product.T if isinstance(product, FactoredMatrix) else product

    def __mul__(self, number: float | Tensor) -> "FactoredMatrix":
        return FactoredMatrix(self.A * number, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Index the leading axes, then the rows and columns. Indexing a single row or column keeps
        its axis."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [each for each in index if not isinstance(each, Tensor)]:
            at = next(i for i, each in enumerate(index) if each is Ellipsis)
            used = sum(each is not None for each in index) - 1
            index = (*index[:at], *[slice(None)] * (self.ndim - used), *index[at + 1 :])
        leading = self.ndim - 2
        inner = max(0, sum(each is not None for each in index) - leading)
        if inner > 2:
            raise IndexError(f"too many indices ({len(index)}) for the shape {list(self.shape)}")
        outer, inside = index[: len(index) - inner], index[len(index) - inner :]
        if not inner:
            return FactoredMatrix(self.A[outer], self.B[outer])
        rows, *columns = map(_kept, inside)
        return FactoredMatrix(self.A[(*outer, rows)], self.B[(*outer, slice(None), *columns)])

    def unsqueeze(self, axis: int) -> "FactoredMatrix":
        return FactoredMatrix(self.A.unsqueeze(axis), self.B.unsqueeze(axis))

    @property
    def eigenvalues(self) -> Tensor:
        """The complex eigenvalues (..., M) of BA. AB has the same eigenvalues, plus L - M zeros."""
        return torch.linalg.eigvals(self.BA)

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (..., L, M), S (..., M) and V (..., R, M), with AB = U diag(S) V^T."""
        return self._svd

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        q_a, r_a = torch.linalg.qr(self.A)
        q_b, r_b = torch.linalg.qr(self.B.mT)
        U, S, Vh = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
        return q_a @ U, S, q_b @ Vh.mT

    @property
    def U(self) -> Tensor:
        return self._svd[0]

    @property
    def S(self) -> Tensor:
        return self._svd[1]

    @property
    def V(self) -> Tensor:
        return self._svd[2]

    @property
    def Vh(self) -> Tensor:
        """TransformerLens' older name for `V`. Despite this name, it is not transposed."""
        return self.V

    def norm(self) -> Tensor:
        """The Frobenius norm, with the shape of the leading axes."""
        return self.S.square().sum(dim=-1).sqrt()

    def collapse_l(self) -> Tensor:
        """diag(S) V^T (..., M, R). For every X, diag(S) V^T X has the same norm as AB X."""
        return self.S[..., None] * self.V.mT

    def collapse_r(self) -> Tensor:
        """U diag(S) (..., L, M)."""
        return self.U * self.S[..., None, :]

    def make_even(self) -> "FactoredMatrix":
        """The same matrix, with two factors that have the same singular values."""
        root = self.S.sqrt()
        return FactoredMatrix(self.U * root[..., None, :], root[..., None] * self.V.mT)

    def get_corner(self, k: int = 3) -> Tensor:
        """The first k rows and columns, of the first k matrices along each leading axis."""
        corner = (slice(k),) * self.ndim
        return self[corner].AB


def composition_scores(left: FactoredMatrix, right: FactoredMatrix) -> Tensor:
    """|left right| / (|left| |right|) (layers, heads, layers, heads) for each pair of a head of
    `left` and a head of `right`. Both are circuits (layers, heads, C, C). A score is 0 unless the
    head of `right` is in a later layer. Source: Elhage et al., "A Mathematical Framework for
    Transformer Circuits" (2021)."""
    first, second = left.collapse_l(), right.collapse_r()
    norms = torch.stack([torch.linalg.matrix_norm(each[:, None, None] @ second) for each in first])
    scores = norms / (left.norm()[..., None, None] * right.norm())
    layers = torch.arange(len(scores), device=scores.device)
    later = layers[:, None, None, None] < layers[None, None, :, None]
    return torch.where(later, scores, 0.0)


def _kept(index: Any) -> Any:
    """Replace an index that is an integer by a slice, so that its axis is kept."""
    return slice(index, index + 1 or None) if isinstance(index, int) else index
