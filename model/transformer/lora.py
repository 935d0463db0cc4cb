"""LoRA: low-rank adapters for the matrices in the blocks of a GPT, whose own weights are frozen.

An adapter adds two small matrices A and B to a matrix W: the result is x W' + (alpha / rank) x A'
B', where ' means transposed. At the start A is random and B is zero, so the adapted model computes
the same values as the original. Only A and B are trained; W has neither gradients nor optimizer
state. Afterwards `merge_into` adds the product of A and B to W, and the model has its original
shape again. A fused matrix contains several linear maps (`GPTConfig.maps`), and each has its own A:
queries, keys and values are adapted separately.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), without its dropout
and without adapters for embeddings and the head. `model/training/` trains adapters,
`model/checkpoint/adapter.py` stores them.

Shapes: C inputs of a matrix, R its rows (outputs), M maps in it, r = rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.transformer.config import TARGETS, GPTConfig, Target
from logitd.model.transformer.gpt import GPT

NARROW = ("lora_a", "lora_b")
"""Names of the two matrices of an adapter."""


class LoraError(ValueError):
    """Raised if adapters do not fit a model; the message names them and the reason."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The adapted matrices, and the rank and scale of the adapters."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise LoraError(f"rank is {self.rank} and alpha {self.alpha}; both must be above 0")
        if unknown := sorted(set(self.targets) - set(TARGETS)):
            raise LoraError(f"unknown targets {unknown}: choose from {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise LoraError(f"targets are {list(self.targets)}; name one or more, each once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """A frozen linear layer with adapters. It replaces the layer in its block."""

    def __init__(self, whole: nn.Linear, heights: Sequence[int], shape: LoraShape) -> None:
        super().__init__()
        self.whole = whole
        self.heights = list(heights)
        self.scale = shape.scale
        inputs, device = whole.in_features, whole.weight.device
        self.lora_a = nn.Parameter(torch.empty(len(heights), shape.rank, inputs, device=device))
        self.lora_b = nn.Parameter(torch.zeros(sum(heights), shape.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(x, self.lora_a.flatten(0, 1))  # (..., M * r)
        added = [
            F.linear(part, rows)  # (..., height)
            for part, rows in zip(
                narrow.chunk(len(self.heights), dim=-1),
                self.lora_b.split(self.heights),
                strict=True,
            )
        ]
        out: Tensor = self.whole(x)  # (..., R)
        return out + self.scale * torch.cat(added, dim=-1)


def adapt(gpt: GPT, shape: LoraShape, generator: torch.Generator) -> None:
    """Freeze a GPT and add adapters to its matrices. A is drawn from `generator` with variance 1 /
    C; B is zero."""
    check_rank(gpt.config, shape)
    gpt.requires_grad_(False)
    maps = gpt.config.maps()
    for block in gpt.blocks:
        for target in shape.targets:
            whole = getattr(block, target)
            adapted = LoraLinear(whole, maps[target], shape)
            with torch.no_grad():
                adapted.lora_a.normal_(std=whole.in_features**-0.5, generator=generator)
            setattr(block, target, adapted)


def check_rank(config: GPTConfig, shape: LoraShape) -> None:
    """Raise LoraError if the rank of the adapters exceeds the full rank of one of the adapted
    linear maps."""
    maps = config.maps()
    for target in shape.targets:
        full = min(*maps[target], config.d_model)
        if shape.rank > full:
            raise LoraError(
                f"rank is {shape.rank}, but a weight matrix of {target} has only {full} rows or "
                f"columns: choose a smaller rank, or remove {target} from the targets"
            )


def is_adapted(gpt: GPT) -> bool:
    return any(isinstance(module, LoraLinear) for module in gpt.modules())


def trained_weights(gpt: GPT) -> dict[str, Tensor]:
    """The weights that training changes, by name: the adapters' weights, or all weights of a model
    without adapters."""
    weights = gpt.state_dict()
    if not is_adapted(gpt):
        return weights
    return {name: tensor for name, tensor in weights.items() if name.endswith(NARROW)}


def load_trained_weights(gpt: GPT, weights: Mapping[str, Tensor]) -> None:
    """Load a result of `trained_weights`. Raises RuntimeError if names or shapes differ."""
    expected = set(trained_weights(gpt))
    if set(weights) != expected:
        odd = sorted(set(weights) ^ expected)
        raise RuntimeError(f"{len(odd)} tensors are missing or unknown; the first is {odd[0]}")
    gpt.load_state_dict(weights, strict=False)


@torch.no_grad()
def merge_into(gpt: GPT, shape: LoraShape, weights: Mapping[str, Tensor]) -> None:
    """Add the product of each adapter to its matrix, in a GPT without adapters.

    Raises LoraError unless `weights` are adapters of exactly this shape.
    """
    maps, left = gpt.config.maps(), dict(weights)
    for layer, block in enumerate(gpt.blocks):
        for target in shape.targets:
            matrix, heights = getattr(block, target).weight, list(maps[target])  # (R, C)
            name = f"blocks.{layer}.{target}"
            a, b = (left.pop(f"{name}.{part}", None) for part in NARROW)
            wanted = ((len(heights), shape.rank, matrix.shape[1]), (len(matrix), shape.rank))
            shapes = tuple(None if narrow is None else tuple(narrow.shape) for narrow in (a, b))
            if a is None or b is None or shapes != wanted:
                raise LoraError(
                    f"the adapter of {name} has shapes {shapes[0]} and {shapes[1]}; this model and "
                    f"rank {shape.rank} need {wanted[0]} and {wanted[1]}"
                )
            products = [  # (height, r) times (r, C)
                rows @ part
                for part, rows in zip(a.to(matrix), b.to(matrix).split(heights), strict=True)
            ]
            matrix += shape.scale * torch.cat(products)
    if left:
        raise LoraError(f"{len(left)} tensors belong to no target; the first is {min(left)}")
