"""A GPT with hook points: a copy of a served model's weights, in float32 or wider.

`hooked_copy` replaces the norms and embeddings of a `GPT` with modules that have hook points; the
weights of a float32 model are shared. `tap.py` calls all other points; `folding.py` processes the
weights.

Shapes: B sequences, T positions, C = d_model, V = vocab_size.
"""

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.device import for_autograd
from logitd.model.hooked.points import HookPoint
from logitd.model.transformer.gpt import GPT, Block

Points = Mapping[str, HookPoint]


class Norm(nn.Module):
    """A LayerNorm or RMSNorm with hook points for its scale, its input divided by the scale, and
    its output. `entry` is the hook point of its input, a copy of the stream that only this norm
    reads."""

    def __init__(
        self, norm: nn.Module, name: str, points: Points, entry: HookPoint | None = None
    ) -> None:
        super().__init__()
        self._entry = entry
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        self.centered = isinstance(norm, nn.LayerNorm)
        assert norm.weight is not None
        assert norm.eps is not None
        self.eps = norm.eps
        self.w = norm.weight
        self.b = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.hook_scale = points[f"{name}.hook_scale"]
        self.hook_normalized = points[f"{name}.hook_normalized"]
        self.hook_out = points[f"{name}.hook_out"]

    def forward(self, x: Tensor) -> Tensor:
        if self._entry is not None and self._entry.has_hooks():
            x = self._entry(x.clone())
        x, scale = self._centered_and_scale(x)
        x = self.hook_normalized(x / self.hook_scale(scale))
        return self.hook_out(self._weighted(x))

    def without_points(self, x: Tensor) -> Tensor:
        """Normalize streams (..., C) without calling hooks."""
        x, scale = self._centered_and_scale(x)
        return self._weighted(x / scale)

    def _centered_and_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.centered:
            x = x - x.mean(dim=-1, keepdim=True)
        return x, (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def _weighted(self, x: Tensor) -> Tensor:
        return x * self.w if self.b is None else x * self.w + self.b


class Embedding(nn.Module):
    """An embedding whose rows pass through a hook point. If autograd is on, its graph begins with
    these rows, and the hooks get a copy that they may change in place."""

    def __init__(self, weight: Tensor, point: HookPoint) -> None:
        super().__init__()
        self.weight = weight
        self._point = point

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return self._point(rows.requires_grad_().clone() if torch.is_grad_enabled() else rows)


class Unembed(nn.Module):
    """The head, with hook points for its input and output. `logit_softcap` is applied after it."""

    def __init__(self, w: Tensor, b: Tensor, points: Points) -> None:
        super().__init__()
        self.W_U, self.b_U = w, b  # (C, V), (V,)
        self.hook_in, self.hook_out = points["unembed.hook_in"], points["unembed.hook_out"]

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(self.hook_in(x) @ self.W_U + self.b_U)


def hooked_copy(gpt: GPT, points: Points) -> tuple[GPT, Unembed]:
    """Copy a GPT. Returns the copy, whose norms and embeddings call their hook points, and an
    `Unembed` for its head. The parameters require no gradients."""
    config, weight = gpt.config, gpt.token_embedding.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with torch.device("meta"):
        copy = GPT(config)
    state = {name: for_autograd(value, dtype) for name, value in gpt.state_dict().items()}
    copy.load_state_dict(state, assign=True)
    copy.requires_grad_(False).eval()
    copy.reset_tables()
    head, bias = copy.head_parameters()
    vocab = config.vocab_size
    b = head.new_zeros(vocab) if bias is None else bias[:vocab].detach()
    unembed = Unembed(head[:vocab].detach().T, b, points)
    copy.token_embedding = Embedding(copy.token_embedding.weight, points["hook_embed"])  # type: ignore[assignment]
    if config.positions == "learned":
        rows = copy.position_embedding.weight
        copy.position_embedding = Embedding(rows, points["hook_pos_embed"])  # type: ignore[assignment]
    for layer, block in enumerate(blocks(copy)):
        block.attention_norm = Norm(block.attention_norm, f"blocks.{layer}.ln1", points)
        entry = points.get(f"blocks.{layer}.hook_mlp_in")
        block.mlp_norm = Norm(block.mlp_norm, f"blocks.{layer}.ln2", points, entry)
    if config.final_norm:
        copy.final_norm = Norm(copy.final_norm, "ln_final", points)
    return copy, unembed


def blocks(gpt: GPT) -> list[Block]:
    return cast(list[Block], list(gpt.blocks))
