"""Muon: a faster step for torch's Muon. It stacks matrices of the same shape.

`torch.optim.Muon` updates its matrices one by one, and for small matrices the calls cost more than
the arithmetic. Stacking reduced the time for a model's sixteen 64 x 64 matrices to a twelfth, and
for 128 x 128 matrices to a half. On a CPU it gains nothing for matrices of width 192 or more, so
these are updated one by one. Learning rates and momentum stay in torch's optimizer, so a saved
state can be used by either implementation.

Sources: Muon by Keller Jordan (2024), https://kellerjordan.github.io/posts/muon/, with the
learning-rate adjustment of torch.optim.Muon. Only torch's defaults, which the trainer uses, are
supported: Nesterov momentum and no `adjust_lr_fn`. The iterations differ: torch makes five with the
same coefficients. Here there are four, each with the optimal coefficients for the range of singular
values after the previous iteration (Amsel et al., The Polar Express, 2025, arXiv 2505.16932).

Shapes: M matrices of one shape, R rows, S columns, R <= S.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Muon

from logitd.model.training.distributed.fsdp import ParamShard, all_gather
from logitd.model.training.distributed.ranks import Ranks

WIDEST_STACKED = 128
"""On a CPU, matrices are stacked only if their smaller side is at most this; on a GPU, always."""
ITERATIONS = (
    (8.258396701, -23.873962919, 17.338582872),
    (3.938608340, -2.878221227, 0.536885447),
    (3.294533209, -2.421852255, 0.486021392),
    (2.308564578, -1.675994456, 0.419573929),
)
"""Coefficients of x, x^3 and x^5 in each iteration. Each polynomial is the one nearest to 1 on the
interval to which the earlier ones map [SMALLEST, 1]. All except the last are scaled to
p(x / MARGIN), so that rounding does not push values out of the interval."""
SMALLEST, MARGIN = 4e-3, 1.01
STACKED_ELEMENTS = 2**24
"""Maximum number of elements in a stack, so that large models need no second copy of all
gradients."""


@torch.no_grad()
def step(
    optimizer: Muon, dtype: torch.dtype, shards: Mapping[Tensor, ParamShard], ranks: Ranks
) -> None:
    """Do the work of `optimizer.step()` in `dtype`: bfloat16 as in torch, or float32 if the
    processor cannot multiply bfloat16. Parameters without a gradient stay unchanged.

    `shards` says for each parameter which rows of its matrix it holds. The update of a divided
    matrix is gathered and orthogonalized in every process, and each process applies the rows that
    it holds.
    """
    for group in optimizer.param_groups:
        for parameters in _stacks([p for p in group["params"] if p.grad is not None], shards):
            # 1) Momentum.
            momenta = [_momentum(optimizer, parameter) for parameter in parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates: Sequence[Tensor] = torch._foreach_lerp(gradients, momenta, group["momentum"])
            # 2) Orthogonalize whole matrices as a stack, with no more rows than columns.
            own = [shards[parameter] for parameter in parameters]
            if own[0].divided:
                updates = all_gather([update.to(dtype) for update in updates], own, ranks)
            rows, columns = own[0].shape
            tall = rows > columns
            stack = torch.stack([update.T if tall else update for update in updates])  # (M, R, S)
            directions = orthogonalize(stack.to(dtype), ITERATIONS, group["eps"])
            # 3) Update the rows of this process.
            rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
            for parameter, shard, direction in zip(parameters, own, directions, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((direction.T if tall else direction)[shard.rows], alpha=-rate)


def orthogonalize(
    matrices: Tensor,  # (M, R, S)
    iterations: Sequence[tuple[float, float, float]],
    eps: float,
) -> Tensor:
    """Push the singular values of each matrix toward 1 by Newton-Schulz iterations of degree 5,
    in the dtype of `matrices`. `iterations` are their coefficients. Returns (M, R, S)."""
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    if len(x) == 1:  # a plain product is faster than a batch of one
        return _iterate(x[0], torch.addmm, iterations)[None]
    return _iterate(x, torch.baddbmm, iterations)


def _iterate(
    x: Tensor,  # (M, R, S), or one matrix (R, S)
    add_product: Callable[..., Tensor],
    iterations: Sequence[tuple[float, float, float]],
) -> Tensor:
    for a, b, c in iterations:
        gram = x @ x.mT  # (M, R, R)
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _stacks(
    parameters: Sequence[Tensor], shards: Mapping[Tensor, ParamShard]
) -> Iterator[list[Tensor]]:
    by_shape: defaultdict[tuple[tuple[int, ...], torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_shape[shards[parameter].shape, parameter.device].append(parameter)
    for (shape, device), same_shape in by_shape.items():
        count = max(1, STACKED_ELEMENTS // math.prod(shape))
        if device.type == "cpu" and min(shape) > WIDEST_STACKED:
            count = 1
        for first in range(0, len(same_shape), count):
            yield same_shape[first : first + count]


def _momentum(optimizer: Muon, parameter: Tensor) -> Tensor:
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    buffer: Tensor = state["momentum_buffer"]
    return buffer
