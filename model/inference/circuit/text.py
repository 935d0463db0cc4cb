"""Frozen text: a forward pass over one text, and backward passes through it.

`FrozenText.search` is one backward pass from the target through the parts that a threshold keeps.
The error of leaving out the other parts is exactly the amount that they carry, because in the
frozen model

    difference = baseline + (sum over the kept parts) + (sum over the parts left out).

`find.py` looks for the threshold.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.inference.attribution.gradients import TextPasses, backout, mixture
from logitd.model.inference.attribution.kept import FrozenNorm, KeptStages, freeze_norm
from logitd.model.inference.circuit.frozen import (
    GRADIENTS,
    STAGES,
    VALUES,
    Choice,
    FrozenBlock,
)
from logitd.model.transformer.gpt import GPT


@dataclass(slots=True)
class Kept:
    """The result of a backward pass: the chosen heads and neurons, the mask `tokens` (T) of the
    chosen tokens, and the amounts `carried` (G, T) that the tokens carry."""

    choice: Choice
    tokens: Tensor
    carried: Tensor


class FrozenText:
    """A text with the target at its last position. `freeze` must run before `search`."""

    def __init__(self, gpt: GPT, passes: TextPasses) -> None:
        self.gpt, self.passes = gpt, passes
        self.tokens = passes.embedding()[0]  # (T, C)
        self.mean_token = self.tokens.mean(0)
        self.blocks: list[FrozenBlock] = []
        self.last = self.tokens  # (T, C), the last stream, after `backout`
        self.final_norm: FrozenNorm | None = None

    def freeze(self) -> Generator[None]:
        """Run the text forward, one block per piece."""
        gpt, rotation = self.gpt, self.passes.rotation

        def freeze_block(layer: int, before: Tensor, tap: KeptStages) -> None:
            self.blocks.append(FrozenBlock(gpt, layer, before[0], tap.kept, rotation))

        (self.last,) = yield from self.passes.all_blocks(
            self.tokens[None],
            lambda layer: KeptStages(STAGES, lambda value: value[0]),
            freeze_block,
        )
        if gpt.config.final_norm:
            self.final_norm = freeze_norm(gpt.final_norm, self.last)

    def search(
        self, direction: Tensor, threshold: float, most: int
    ) -> Generator[None, None, Kept | None]:
        """Choose the parts that carry more than `threshold` of the target, which is the product of
        `direction` (C) with the final hidden state. Each piece is a part of one block. Returns None
        if there are more than `most` parts."""
        gpt, choice = self.gpt, Choice(threshold)
        g = self.tokens.new_zeros(GRADIENTS, *self.tokens.shape)
        g[VALUES, -1] = direction
        if self.final_norm is not None:
            g = self.final_norm.backward(g)
        after, of_tokens = g, torch.zeros_like(g)
        for layer in reversed(range(gpt.config.n_layer)):
            if layer == gpt.config.backout_layer:
                g = g - backout(gpt) * after
            g = yield from self.blocks[layer].backward(g, choice)
            if choice.count > most:
                return None
            stream, first = mixture(gpt, layer)
            of_tokens, g = of_tokens + first * g, stream * g
            yield
        carried = ((of_tokens + g) * (self.tokens - self.mean_token)).sum(-1)
        tokens = choice.keep(carried)
        return Kept(choice, tokens, carried) if choice.count <= most else None
