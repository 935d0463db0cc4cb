"""Stacked Muon steps compared with torch.optim.Muon and with the iteration in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from logitd.model.training.distributed.fsdp import shard_of
from logitd.model.training.distributed.ranks import ALONE
from logitd.model.training.optim import muon

SHAPES = [(24, 24), (24, 40), (40, 24), (24, 24), (24, 40), (8, 24), (150, 160), (150, 160)]
"""Square, tall and wide matrices. Some shapes occur only once, and the largest matrices are not
stacked on a CPU."""
TORCH, EPS = ((3.4445, -4.7750, 2.0315),) * 5, 1e-7
"""Coefficients of torch's five iterations, and torch's epsilon."""


@pytest.fixture
def as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "ITERATIONS", TORCH)


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _fill(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _step(optimizer: Muon, dtype: torch.dtype) -> None:
    """A step with undivided matrices; test_fsdp.py tests divided matrices."""
    (group,) = optimizer.param_groups
    muon.step(optimizer, dtype, {each: shard_of(each) for each in group["params"]}, ALONE)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


@pytest.mark.usefixtures("as_torch")
@pytest.mark.parametrize("stacked_elements", [1, 2000, 2**24])
def test_step_equals_torchs_step(monkeypatch: pytest.MonkeyPatch, stacked_elements: int) -> None:
    """With stacks of any size, the results differ from torch's at most by the order of sums in
    bfloat16."""
    monkeypatch.setattr(muon, "STACKED_ELEMENTS", stacked_elements)
    mine, theirs = _parameters(), _parameters()
    own, other = (Muon(each, lr=0.1, momentum=0.9, weight_decay=0.2) for each in (mine, theirs))
    for step in range(3):
        before = [each.detach().clone() for each in theirs]
        for parameters in (mine, theirs):
            _fill(parameters, step)
        with torch.no_grad():  # each step from the same weights
            for one, two in zip(mine, theirs, strict=True):
                one.copy_(two)
        _step(own, torch.bfloat16)
        other.step()
        for one, two, was in zip(mine, theirs, before, strict=True):
            assert _distance(one - was, two - was) < 0.01
            assert torch.equal(
                own.state[one]["momentum_buffer"], other.state[two]["momentum_buffer"]
            )


@pytest.mark.parametrize("shape", [(6, 6), (6, 20), (20, 6), (140, 150)])
@pytest.mark.parametrize("iterations", [TORCH, muon.ITERATIONS])
def test_orthogonalize_in_float32_is_the_iteration_as_defined(
    iterations: tuple[tuple[float, float, float], ...], shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(3, *shape).double()
    found = [
        muon.orthogonalize(stack.float(), iterations, EPS) for stack in (matrices, matrices[:1])
    ]
    for index, matrix in enumerate(matrices):
        x = matrix / matrix.norm()
        for a, b, c in iterations:
            x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
        assert _distance(found[0][index].double(), x) < 1e-4
        singular = torch.linalg.svdvals(x)
        assert float(singular.min()) > 0.3
        assert float(singular.max()) < 1.3
    assert _distance(found[1][0], found[0][0]) < 1e-5


def test_each_iteration_is_the_polynomial_nearest_to_one() -> None:
    """By Chebyshev's theorem an odd polynomial of the fifth degree is the best approximation if its
    largest error occurs at four points with alternating signs."""
    low, high = muon.SMALLEST, 1.0
    for index, (a, b, c) in enumerate(muon.ITERATIONS):
        margin = muon.MARGIN if index + 1 < len(muon.ITERATIONS) else 1.0
        x = margin * torch.linspace(low, high, 100_001).double()
        errors = 1 - (a * x + b * x**3 + c * x**5)
        turns = (errors.diff().sign().diff() != 0).nonzero().flatten() + 1
        extremes = errors[[0, *turns.tolist(), -1]]
        largest = float(errors.abs().max())
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
        torch.testing.assert_close(extremes, largest * signs.double(), rtol=1e-3, atol=1e-4)
        low, high = 1 - largest, 1 + largest
    assert high < 1.13


def test_step_in_float32_is_the_same_except_for_rounding() -> None:
    exact, rough = _parameters(), _parameters()
    for parameters, dtype in ((exact, torch.float32), (rough, torch.bfloat16)):
        _fill(parameters, 0)
        _step(Muon(parameters, lr=1.0, weight_decay=0.0), dtype)
    start = _parameters()
    for one, two, was in zip(exact, rough, start, strict=True):
        assert 0 < _distance(two - was, one - was) < 0.05


def test_parameters_without_a_gradient_stay_unchanged() -> None:
    parameters = _parameters()
    _fill(parameters[:2], 0)
    before = [each.detach().clone() for each in parameters]
    _step(Muon(parameters, lr=0.1), torch.bfloat16)
    moved = [not torch.equal(*pair) for pair in zip(parameters, before, strict=True)]
    assert moved == [True, True] + [False] * (len(parameters) - 2)


def test_tall_matrices_move_by_more_than_the_rate() -> None:
    for shape, factor in (((8, 32), 1.0), ((32, 8), 2.0)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        _step(Muon([parameter], lr=0.5, weight_decay=0.0), torch.float32)
        root_mean = float(torch.linalg.svdvals(parameter.detach()).square().mean().sqrt())
        assert math.isclose(root_mean, 0.5 * factor, rel_tol=0.3)
