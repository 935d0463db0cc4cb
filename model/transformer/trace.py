"""Trace: the shape, mean and standard deviation of every stage of a forward pass.

A trace shows how a model computes the logits of a text. For the tensors themselves, use
`GPT.forward`, a tap or the HTTP endpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.transformer.attention import RecordingAttend, mask_causal
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import HEADS_FIRST, Stage, stages_of


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage, computed for a whole text: the mean and the standard deviation of its finite values.
    `axes` has the names of the axes. T stands for positions, and in scores and probs also for keys;
    the other names are those of `GPTConfig`."""

    name: str
    shape: tuple[int, ...]
    axes: str
    mean: float
    std: float


@torch.inference_mode()
def trace(gpt: GPT, token_ids: Sequence[int]) -> list[TracedStage]:
    """Run a forward pass over one text and trace its stages, in the order of `stages.py`."""
    ids = torch.tensor([token_ids], device=gpt.token_embedding.weight.device)  # (1, T)
    positions = torch.arange(len(token_ids), device=ids.device)[None]
    attend, tap = RecordingAttend(), _Figures()
    final = gpt.transform(ids, positions, attend, tap=tap)
    for layer, (scores, probs) in enumerate(zip(attend.scores, attend.probs, strict=True)):
        tap(layer, "attention.scores", mask_causal(scores, gpt.config.window(layer)))
        tap(layer, "attention.probs", probs)
    tap(None, "logits", gpt.logits(final))
    return [tap.of(stage) for stage in stages_of(gpt.config)]


class _Figures:
    """A tap that records the shape, mean and standard deviation of each stage."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int | None, str], tuple[tuple[int, ...], float, float]] = {}

    def wants(self, layer: int | None, stage: str) -> bool:
        return True

    def __call__(self, layer: int | None, stage: str, value: Tensor, offset: int = 0) -> Tensor:
        shown = value[0].transpose(0, 1) if stage in HEADS_FIRST else value[0]  # (T, ...)
        finite = shown.float()[shown.isfinite()]
        figures = finite.mean().item(), finite.std(correction=0).item()
        self._kept[layer, stage] = tuple(shown.shape), *figures
        return value

    def of(self, stage: Stage) -> TracedStage:
        shape, mean, std = self._kept[stage.layer, stage.kind.name]
        return TracedStage(
            stage.name, shape, ", ".join(("T", *map(str, stage.kind.axes))), mean, std
        )
