"""Ablations: forward passes in which parts are set to their means and nothing is frozen.

Three versions of the text are computed together: with only the circuit (all other parts are set to
their means), without the circuit, and without any part. All versions keep biases and value
embeddings.

Shapes: T positions, C = d_model, H = n_head, D = head_dim, F = d_ff.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from logitd.model.inference.circuit.frozen import Chosen, FrozenBlock
from logitd.model.inference.circuit.text import FrozenText, Kept


def ablate(text: FrozenText, kept: Kept) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """The last streams (T, C) with only the circuit, without it, and without any part. Each piece
    is one block."""
    chosen = kept.choice.chosen
    tokens = torch.where(_keeping(kept.tokens)[..., None], text.tokens, text.mean_token)
    alone, without, none = yield from text.passes.all_blocks(
        tokens,
        lambda layer: _Ablation(text.blocks[layer], chosen[layer, "heads"], chosen[layer, "mlp"]),
    )
    return alone, without, none


class _Ablation:
    """A tap that sets heads and neurons of one block to their means."""

    def __init__(self, block: FrozenBlock, heads: Chosen, neurons: Chosen) -> None:
        kept = _keeping(_mask(heads, block.heads[..., 0]))  # (3, T, H)
        self._kept = {
            "attention.heads": (kept.transpose(1, 2)[..., None], block.mean_heads[:, None]),
            "mlp.hidden": (_keeping(_mask(neurons, block.hidden)), block.mean_hidden),
        }

    def wants(self, layer: int | None, stage: str) -> bool:
        return stage in self._kept

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        if stage not in self._kept:
            return value
        kept, mean = self._kept[stage]
        return torch.where(kept, value, mean)


def _mask(chosen: Chosen, like: Tensor) -> Tensor:
    """The mask of a sublayer's parts, with the shape of `like` (T, parts)."""
    mask = torch.zeros_like(like, dtype=torch.bool)
    mask[chosen.positions, chosen.indices] = True
    return mask


def _keeping(circuit: Tensor) -> Tensor:
    """The masks (3, ...) of the parts that each version keeps, from the mask (...) of the
    circuit."""
    return torch.stack((circuit, ~circuit, torch.zeros_like(circuit)))
