"""Gradients of the target with respect to stages of a block, and probes as targets.

The backward pass of a block (`gradients.py`) computes the block again. Here a tap keeps the values
of some stages, and autograd returns the gradients with respect to them too. The target of a probe
is the product of a direction with the value of a stage at one position. Its backward pass begins in
the block that has the stage.

Shapes: T positions of the text, C = d_model, H = n_head, D = head_dim.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.attribution.gradients import TextPasses, fused_attend
from logitd.model.inference.attribution.kept import KeptStages
from logitd.model.inference.attribution.task import OVER_KEYS
from logitd.model.transformer.attention import attention_scores, mask_causal, visible_keys
from logitd.model.transformer.stages import HEADS_FIRST

OUT, HEAD_OUT = "attention.out", "attention.head_out"


@dataclass(frozen=True, slots=True)
class BlockGradients:
    """Results of one backward pass through a block.

    of_input   gradient (1, T, C) with respect to the block's input
    of_stages  gradients (T, ...) with respect to stages, by name within the block
    probed     value of the probe; None if this block has no probe
    """

    of_input: Tensor
    of_stages: Mapping[str, Tensor]
    probed: float | None


def block_gradients(
    passes: TextPasses,
    layer: int,
    x: Tensor,  # (1, T, C)
    gradient: Tensor,  # (1, T, C), with respect to the block's output
    stages: Collection[str],
    probe: tuple[str, Tensor] | None = None,  # a stage of the block, and a direction
) -> BlockGradients:
    """Run a gradient back through a block."""
    names = {*stages, *([probe[0]] if probe else [])}
    explicit = not names.isdisjoint(OVER_KEYS)
    if HEAD_OUT in names:
        names.add(OUT)
    kept = KeptStages(names)
    # Several threads may change the bits of the explicit attention.
    context = one_thread() if explicit else passes.watched(x.shape[1])
    with context, torch.enable_grad():
        x = x.detach().requires_grad_()
        entered = kept(layer, "input", x)
        out = passes.block(layer, entered, kept, _Weighing(kept) if explicit else fused_attend)
        targets, weights = [out], [gradient]
        if probe is not None:
            value = positions_first(probe[0], kept.kept[probe[0]])
            targets.append(product(value, passes.row, probe[1]))
            weights.append(torch.ones_like(targets[1]))
        order = list(kept.kept)
        inputs = [x, *(kept.kept[name] for name in order)]
        of_input, *found = torch.autograd.grad(targets, inputs, weights, allow_unused=True)
    by_name = {
        name: torch.zeros_like(kept.kept[name]) if each is None else each
        for name, each in zip(order, found, strict=True)
    }
    if HEAD_OUT in names:  # the outputs of the heads add up to the output of attention
        by_name[HEAD_OUT] = by_name[HEAD_OUT] + by_name[OUT][:, None]
    probed = None if probe is None else targets[1].item()
    return BlockGradients(
        of_input, {name: positions_first(name, by_name[name]) for name in stages}, probed
    )


def product(value: Tensor, row: int, direction: Tensor) -> Tensor:
    """The inner product of `direction` with row `row` of `value` (T, ...). If the last axis is over
    keys, one of the two may have more keys; the extra keys are ignored, because the row does not
    attend to them. Scores of -inf count as 0."""
    keys = min(direction.shape[-1], value.shape[-1])
    at = value[row][..., :keys]
    return (torch.where(at.isneginf(), 0.0, at) * direction[..., :keys]).sum()


def positions_first(name: str, value: Tensor) -> Tensor:
    """The value (1, heads, T, ...) or (1, T, ...) of a stage, with the axis of positions first."""
    return value[0].transpose(0, 1) if name in HEADS_FIRST else value[0]


class _Weighing:
    """Causal attention that passes its scores and weights to a tap. If a query may not attend to a
    key, the weight of the key stays 0 whatever the tap returns, so its gradient is 0."""

    def __init__(self, tap: KeptStages) -> None:
        self._tap = tap

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
    ) -> Tensor:
        scores = mask_causal(attention_scores(q, k), window)
        weights = self._tap(layer, OVER_KEYS[0], scores).softmax(dim=-1)
        length, keys = scores.shape[-2:]
        unseen = ~visible_keys(length, keys, scores.device, window)
        weights = self._tap(layer, OVER_KEYS[1], weights).masked_fill(unseen, 0.0)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
