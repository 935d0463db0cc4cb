"""Finding: computes the circuit of one prompt, piece by piece.

A piece is one block of a forward pass, or one group of heads of a block in a backward pass. Every
piece runs on one thread. It has many small operations, and torch's threads wait for each other
after each of them: while other processes were busy, a piece took ten times as long on two threads
as on one. Another benefit of one thread is that the bits do not depend on torch's number of
threads.

The search for the threshold of the parts tries the thresholds of a falling series. The share that
the parts explain does not grow steadily as the threshold falls, because parts of opposite sign
cancel. So the search is a heuristic: a threshold between two others may explain more with fewer
parts. Passes with a high threshold follow few parts and are fast.

Shapes: T positions, C = d_model, H = n_head.
"""

import math
from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.attribution.gradients import Pieces, TextPasses
from logitd.model.inference.circuit.edges import Graph
from logitd.model.inference.circuit.frozen import ATTENTION, VALUES, Chosen, FrozenBlock
from logitd.model.inference.circuit.task import (
    MOST_SEARCHES,
    Circuit,
    CircuitTask,
    explained_share,
)
from logitd.model.inference.circuit.text import FrozenText, Kept
from logitd.model.transformer.gpt import GPT

VERSIONS = 3
"""Number of forward passes with ablations."""
HIGHEST = 0.99
"""The first threshold of the search, relative to the largest amount that a part writes to the
logits. It keeps this part."""
FACTOR = math.sqrt(2)
"""Factor between two thresholds of the search."""


def finding(gpt: GPT, token_ids: Sequence[int], task: CircuitTask) -> Pieces[Circuit]:
    """The circuit of one prompt, computed piece by piece."""
    return Pieces(_pieces(gpt, token_ids, task), one_thread)


def _pieces(
    gpt: GPT, token_ids: Sequence[int], task: CircuitTask
) -> Generator[None, None, Circuit]:
    # 1) Run the text forward, and determine the target.
    passes = TextPasses(gpt, token_ids[: task.position + 1], task.position)
    text = FrozenText(gpt, passes)
    yield from text.freeze()
    token_id, minus_id = _compared(passes, text.last[None], task)
    yield
    direction = passes.direction(token_id, minus_id)

    def difference(last: Tensor) -> float:
        return passes.logit(last[None], token_id) - passes.logit(last[None], minus_id)

    # 2) Choose the parts. If none is kept, `left_out` covers all parts that write to the logits.
    nothing = yield from text.search(direction, math.inf, task.parts)
    assert nothing is not None
    whole = nothing.choice.left_out[VALUES].item()
    kept = nothing
    if whole and math.isfinite(whole):
        kept = yield from _search(text, direction, whole, nothing, task)
    # 3) Compute the edges between them.
    graph = Graph(text, kept, task.edges)
    yield from graph.build(direction)
    # 4) Verify by ablations.
    streams = yield from _ablate(text, kept)
    alone, without, none = map(difference, streams)
    left_out = kept.choice.left_out
    return Circuit(
        token_id=token_id,
        minus_id=minus_id,
        logit=passes.logit(text.last[None], token_id),
        minus_logit=passes.logit(text.last[None], minus_id),
        baseline=difference(text.last) - whole,
        left_out=left_out[VALUES].item(),
        left_out_attention=left_out[ATTENTION].item(),
        nodes=tuple(graph.nodes),
        edges=graph.edges,
        edge_count=graph.edge_count,
        circuit_alone=alone,
        without_circuit=without,
        without_all=none,
    )


def _compared(passes: TextPasses, last: Tensor, task: CircuitTask) -> tuple[int, int]:
    """The ids of the two compared tokens; by default the likeliest tokens."""
    token_id, minus_id = task.token_id, task.minus_id
    if token_id is None:
        token_id = passes.likeliest(last, without=minus_id)
    if minus_id is None:
        minus_id = passes.likeliest(last, without=token_id)
    return token_id, minus_id


def _search(
    text: FrozenText, direction: Tensor, whole: float, nothing: Kept, task: CircuitTask
) -> Generator[None, None, Kept]:
    """Lower the threshold step by step until the kept parts explain the requested share of `whole`,
    the difference to explain. Returns these parts or, if a limit is reached first, the tried parts
    that explain the most. The thresholds do not depend on the limit on parts, so a higher limit
    never explains less."""
    best, most, threshold = nothing, -math.inf, HIGHEST * nothing.choice.largest
    for _ in range(MOST_SEARCHES):
        kept = yield from text.search(direction, threshold, task.parts)
        if kept is None:
            break
        left_out = kept.choice.left_out.tolist()
        share = explained_share(whole, left_out[VALUES], left_out[ATTENTION]) or 0.0
        if kept.choice.count and share > most:
            best, most = kept, share
        if share >= task.share:
            break
        threshold /= FACTOR
    return best


def _ablate(text: FrozenText, kept: Kept) -> Generator[None, None, list[Tensor]]:
    """Forward passes in which parts are set to their means and nothing is frozen. Returns the last
    stream (T, C) of each version: with only the circuit (all other parts are set to their means),
    without it, and without any part. All versions keep biases and value embeddings. Each piece is
    one block of one version."""
    chosen, streams = kept.choice.chosen, []

    def tap(version: int, layer: int) -> _Ablation:
        parts = chosen[layer, "heads"], chosen[layer, "mlp"]
        return _Ablation(text.blocks[layer], *parts, version)

    for version in range(VERSIONS):
        keep = _kept_by(kept.tokens, version)
        tokens = torch.where(keep[None, :, None], text.tokens, text.mean_token)
        stream = yield from text.passes.all_blocks(tokens, partial(tap, version))
        streams.append(stream[0])
    return streams


class _Ablation:
    """A tap that sets heads and neurons of one block to their means."""

    def __init__(self, block: FrozenBlock, heads: Chosen, neurons: Chosen, version: int) -> None:
        kept = _kept_by(_mask(heads, block.heads[..., 0]), version)  # (T, H)
        self._kept = {
            "attention.heads": (kept.T[..., None], block.mean_heads[:, None]),
            "mlp.hidden": (_kept_by(_mask(neurons, block.hidden), version), block.mean_hidden),
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


def _kept_by(circuit: Tensor, version: int) -> Tensor:
    """The mask of the parts that a version keeps, from the mask of the circuit."""
    return (circuit, ~circuit, torch.zeros_like(circuit))[version]
