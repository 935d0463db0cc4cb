"""Attributing: computes the attributions of one prompt, by all requested methods, in pieces.

A piece is one forward or backward pass through one block, or one pass over the head. Between two
pieces the engine can do other work, or drop the attribution. An attribution keeps the residual
stream before each block and a few more tensors of that size (`kept_elements` in `task.py`),
regardless of its number of steps.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitd.model.inference.attribution.direct import direct_parts, kept_row
from logitd.model.inference.attribution.gradients import (
    Pieces,
    TextPasses,
    Watch,
    backout,
    mixture,
    per_token,
)
from logitd.model.inference.attribution.kept import KeptStages
from logitd.model.inference.attribution.stage_gradients import block_gradients, product
from logitd.model.inference.attribution.task import (
    Attribution,
    AttributionTask,
    IntegratedGradients,
    padded_length,
)
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import match_stages
from logitd.model.transformer.tap import UNTAPPED, Tap


def attributing(
    gpt: GPT, token_ids: Sequence[int], task: AttributionTask, watched: Watch | None = None
) -> Pieces[Attribution]:
    """The attributions of one prompt, computed piece by piece. Each block runs in the context that
    `watched` creates."""
    return Pieces(_Prompt(gpt, token_ids, task, watched).pieces())


class _Prompt:
    """A prompt, its task, and the generator of its pieces. Only the generator refers to this
    object. If this object also referred to the generator, the two would form a reference cycle, and
    only the garbage collector would free the tensors of a dropped attribution."""

    def __init__(
        self, gpt: GPT, token_ids: Sequence[int], task: AttributionTask, watched: Watch | None
    ) -> None:
        self._gpt = gpt
        self._task = task
        self._length = len(token_ids)
        # The text ends at the position, and is padded to whole blocks so that few lengths occur.
        text = token_ids[: task.position + 1]
        self._text = [*text, *[0] * (padded_length(task, gpt.config) - len(text))]
        self._watched = watched
        self._stages = match_stages(task.stages, gpt.config) if task.stages else ()
        self._wanted: defaultdict[int | None, list[str]] = defaultdict(list)
        for stage in self._stages:
            self._wanted[stage.layer].append(stage.kind.name)
        self._probe_at: tuple[int | None, str] | None = None
        if task.probe is not None:
            (probed,) = match_stages([task.probe.stage], gpt.config)
            self._probe_at = probed.layer, probed.kind.name
        self._probed = 0.0  # the value of the probe
        self._gradients: dict[str, Tensor] = {}  # with respect to stages (T, ...), by full name

    def pieces(self) -> Generator[None, None, Attribution]:
        task, row = self._task, self._task.position
        passes = self._passes = TextPasses(self._gpt, self._text, row, self._watched)
        # 1) Run the prompt forward, and keep the streams before the blocks if they are needed.
        embedding = passes.embedding()
        times_input = "gradient_times_input" in task.methods
        backward = times_input or bool(task.stages) or task.probe is not None
        streams: list[Tensor] | None = [] if backward else None
        rows: list[dict[str, Tensor]] | None = [] if "direct" in task.methods else None
        last = yield from self._forward(embedding, streams, rows)
        # 2) The target.
        token_id, minus_id, direction = task.token_id, task.minus_id, None
        logit, minus_logit = 0.0, None
        if task.probe is None:
            if token_id is None:
                token_id = passes.likeliest(last, without=minus_id)
                yield
            direction = passes.direction(token_id, minus_id)
            logit = passes.logit(last, token_id)
            minus_logit = None if minus_id is None else passes.logit(last, minus_id)
        elif self._probe_at == (None, "final_norm"):
            direction = self._direction()
            logit = (passes.normed(self._gpt.final_norm, last[0, row]) @ direction).item()
        target = logit if minus_logit is None else logit - minus_logit
        # 3) The attributions by each method.
        parts = gradient_times_input = path = None
        if rows is not None:
            assert token_id is not None
            assert direction is not None
            bias = self._head_bias(token_id, minus_id)
            parts = direct_parts(self._gpt, embedding[0, row], rows, last[0, row], direction, bias)
            yield
        if streams is not None:
            gradient = yield from self._backward(last, streams, direction, stages=True)
            self._reach("embedding", embedding, gradient)
            if times_input:
                gradient_times_input = self._of_tokens(per_token(embedding, gradient))
            del gradient
        if "integrated_gradients" in task.methods:
            assert token_id is not None
            assert direction is not None
            del last
            path = yield from self._path(embedding, token_id, direction, target)
        return Attribution(
            token_id,
            minus_id,
            logit + self._probed,
            minus_logit,
            gradient_times_input,
            path,
            parts,
            self._arrays(),
        )

    def _forward(
        self, x: Tensor, streams: list[Tensor] | None, rows: list[dict[str, Tensor]] | None = None
    ) -> Generator[None, None, Tensor]:
        """Run `x`, the stream that enters the first block, through all blocks, one block in each
        piece. Returns the last stream (1, T, C), after `backout`. Appends the input of each block
        to `streams`, and what each block computes at the task's position to `rows`, if these lists
        are given."""
        row = self._task.position

        def keep(layer: int, before: Tensor, tap: Tap) -> None:
            if streams is not None:
                streams.append(before)
            if rows is not None and isinstance(tap, KeptStages):
                rows.append({**tap.kept, "input": before[0, row]})

        return self._passes.all_blocks(
            x, lambda layer: UNTAPPED if rows is None else kept_row(row), keep
        )

    def _backward(
        self,
        last: Tensor,
        streams: list[Tensor],
        direction: Tensor | None,
        *,
        stages: bool = False,
    ) -> Generator[None, None, Tensor]:
        """Run the gradient back through all blocks, one per piece, and return the gradient (1, T,
        C) with respect to the stream that enters the first block. Empties `streams`. `direction` is
        the gradient of the target with respect to the final hidden state; None if the target is a
        probe of an earlier stage. With `stages`, keeps the gradients with respect to the task's
        stages."""
        after = self._end(last, direction, keep=stages)
        gradient = after
        of_embedding: Tensor | None = None
        for layer in reversed(range(self._gpt.config.n_layer)):
            if layer == self._gpt.config.backout_layer:
                gradient = gradient - backout(self._gpt) * after
            step = self._stages_backward if stages else self._passes.backward
            gradient = step(layer, streams.pop(), gradient)
            if self._gpt.config.residual_mix:
                stream, first = mixture(self._gpt, layer)
                part = first * gradient
                of_embedding = part if of_embedding is None else of_embedding + part
                gradient = stream * gradient
            yield
        return gradient if of_embedding is None else gradient + of_embedding

    def _end(self, last: Tensor, direction: Tensor | None, *, keep: bool) -> Tensor:
        """The gradient (1, T, C) of the target with respect to the last stream."""
        gradient = torch.zeros_like(last)
        if direction is not None:
            gradient = self._passes.head_gradient(last, direction)
        if keep and "final_norm" in self._wanted[None]:
            of_final = self._gradients["final_norm"] = torch.zeros_like(last)[0]
            if direction is not None:
                of_final[self._task.position] = direction
        if keep:
            self._reach("backout", last, gradient)
        return gradient

    def _stages_backward(self, layer: int, x: Tensor, gradient: Tensor) -> Tensor:
        """Run the gradient back through a block, and keep the gradients of its stages."""
        stages = self._wanted[layer]
        probe = None
        if self._probe_at is not None and self._probe_at[0] == layer:
            probe = self._probe_at[1], self._direction()
        if not stages and probe is None:
            return self._passes.backward(layer, x, gradient)
        found = block_gradients(self._passes, layer, x, gradient, stages, probe)
        for name, value in found.of_stages.items():
            self._gradients[f"blocks.{layer}.{name}"] = value
        self._probed += found.probed or 0.0
        return found.of_input

    def _reach(self, stage: str, value: Tensor, gradient: Tensor) -> None:
        """Keep the gradient with respect to a stage outside the blocks, if it is wanted. If the
        target is a probe of this stage, first add the probe's direction."""
        if self._probe_at == (None, stage):
            row, direction = self._task.position, self._direction()
            self._probed = product(value[0], row, direction).item()
            gradient[0, row] += direction
        if stage in self._wanted[None]:
            self._gradients[stage] = gradient[0]

    def _direction(self) -> Tensor:
        assert self._task.probe is not None
        weight = self._gpt.token_embedding.weight
        return torch.from_numpy(self._task.probe.direction).to(weight.device, self._passes.dtype)

    def _arrays(self) -> dict[str, Any]:
        """The kept gradients as arrays. Their first axis is over the tokens of the prompt; values
        after the task's position are 0."""
        arrays = {}
        for stage in self._stages:
            shape = self._length, *stage.shape(self._gpt.config, self._length)
            rows = self._gradients[stage.name][: self._task.position + 1, ..., : shape[-1]]
            array = arrays[stage.name] = np.zeros(shape, rows.cpu().numpy().dtype)
            array[: len(rows), ..., : rows.shape[-1]] = rows.cpu().numpy()
        return arrays

    def _path(
        self, embedding: Tensor, token_id: int, direction: Tensor, target: float
    ) -> Generator[None, None, IntegratedGradients]:
        passes, task = self._passes, self._task
        if task.baseline is None:
            baseline = torch.zeros_like(embedding)
        else:
            baseline = passes.embedding(task.baseline)
        last = yield from self._forward(baseline, None)
        baseline_target = passes.logit(last, token_id)
        if task.minus_id is not None:
            baseline_target -= passes.logit(last, task.minus_id)
        way = embedding - baseline
        total = torch.zeros_like(way)
        for step in range(task.steps):
            streams: list[Tensor] = []
            x = baseline + (step + 0.5) / task.steps * way
            last = yield from self._forward(x, streams)
            total += yield from self._backward(last, streams, direction)
        values = self._of_tokens(per_token(way, total) / task.steps)
        return IntegratedGradients(values, target, baseline_target)

    def _head_bias(self, token_id: int, minus_id: int | None) -> float | None:
        _, bias = self._gpt.head_parameters()
        if bias is None:
            return None
        minus = 0.0 if minus_id is None else bias[minus_id].item()
        return bias[token_id].item() - minus

    def _of_tokens(self, values: Tensor) -> tuple[float, ...]:
        """The attributions of all tokens of the prompt; 0 for tokens after the task's position."""
        behind = self._length - self._task.position - 1
        return (*values[: self._task.position + 1].tolist(), *[0.0] * behind)
