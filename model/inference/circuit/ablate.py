"""Ablations: forward passes in which parts are set to their means and nothing is frozen.

The forward pass is computed in three versions, one after the other: with only the circuit (all
other parts are set to their means), without the circuit, and without any part. All versions keep
biases and value embeddings.

Shapes: T positions, C = d_model, H = n_head, D = head_dim, F = d_ff.
"""

from collections.abc import Generator
from functools import partial

import torch
from torch import Tensor

from logitd.model.inference.circuit.frozen import Chosen, FrozenBlock
from logitd.model.inference.circuit.text import FrozenText, Kept

VERSIONS = 3


def ablate(text: FrozenText, kept: Kept) -> Generator[None, None, list[Tensor]]:
    """The last stream (T, C) of each version: with only the circuit, without it, and without any
    part. Each piece is one block of one version."""
    chosen, streams = kept.choice.chosen, []

    def tap(version: int, layer: int) -> _Ablation:
        parts = chosen[layer, "heads"], chosen[layer, "mlp"]
        return _Ablation(text.blocks[layer], *parts, version)

    for version in range(VERSIONS):
        keep = _kept(kept.tokens, version)
        tokens = torch.where(keep[None, :, None], text.tokens, text.mean_token)
        stream = yield from text.passes.all_blocks(tokens, partial(tap, version))
        streams.append(stream[0])
    return streams


class _Ablation:
    """A tap that sets heads and neurons of one block to their means."""

    def __init__(self, block: FrozenBlock, heads: Chosen, neurons: Chosen, version: int) -> None:
        kept = _kept(_mask(heads, block.heads[..., 0]), version)  # (T, H)
        self._kept = {
            "attention.heads": (kept.T[..., None], block.mean_heads[:, None]),
            "mlp.hidden": (_kept(_mask(neurons, block.hidden), version), block.mean_hidden),
        }

    def wants(self, layer: int | None, stage: str) -> bool:
        return stage in self._kept

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        if stage not in self._kept:
            return value
        kept, mean = self._kept[stage]
        return torch.where(kept, value, mean)


def _mask(chosen: Chosen, like: Tensor) -> Tensor:
    """A mask of a sublayer's parts, true for the chosen parts. `like` has the same shape (T,
    parts)."""
    mask = torch.zeros_like(like, dtype=torch.bool)
    mask[chosen.positions, chosen.indices] = True
    return mask


def _kept(circuit: Tensor, version: int) -> Tensor:
    """The mask of the parts that a version keeps, from the mask of the circuit."""
    return (circuit, ~circuit, torch.zeros_like(circuit))[version]
