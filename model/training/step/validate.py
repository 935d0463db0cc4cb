"""Validation: the loss on fixed windows of the validation tokens.

It has two units. Training lowers nats per token, which depend on the vocabulary. Bits per byte do
not: the nats of all predicted tokens, over the bytes of their text, over ln 2. The end of a
document is predicted like any token, and has zero bytes.

Draws no random numbers and leaves the model unchanged, so it does not disturb training. Each
process computes some of the batches. The sums are added up batch by batch in one order, so the bits
of the result do not depend on the number of processes. `model/data/windows.py` chooses the windows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.data.windows import UNCOUNTED, Windows
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.transformer.gpt import GPT

MOST_NATS = 709.0
"""Nats per token up to which the perplexity is a finite float64."""


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss over `tokens` predicted tokens of `text_bytes` bytes of text."""

    loss: float  # nats per token
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.loss * self.tokens, self.text_bytes)

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that are as hard to predict; inf above MOST_NATS."""
        return math.inf if self.loss >= MOST_NATS else math.exp(self.loss)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Bits per byte; inf for tokens without text, such as only the end of a document."""
    return nats / math.log(2) / text_bytes if text_bytes else math.inf


def validate(
    gpt: GPT,
    windows: Windows,
    forward: Callable[[Tensor], Tensor],
    ranks: Ranks = ALONE,
    *,
    sharded: bool = False,
) -> ValidationLoss:
    """The mean loss over all windows, the same on all ranks, which all have to call this. `forward`
    maps ids (B, T) to logits (B, T, V). `sharded`: each rank has a part of the model, so none can
    compute without the others.
    """
    training = gpt.training
    gpt.eval()
    sums = torch.zeros(len(windows), 3, dtype=torch.float64)  # nats, tokens, bytes of each batch
    device = gpt.token_embedding.weight.device
    try:
        with torch.no_grad():
            for index in _own_batches(len(windows), ranks, sharded):
                inputs, targets = windows.batch(min(index, len(windows) - 1))
                logits = forward(inputs.to(device)).float()  # (B, T, V)
                loss = F.cross_entropy(
                    logits.flatten(0, 1),
                    targets.to(device).flatten(),
                    reduction="sum",
                    ignore_index=UNCOUNTED,
                )
                if index >= len(windows):
                    continue  # computed because the others need its part of the model
                counted = targets[targets != UNCOUNTED].numpy()
                text_bytes = int(windows.byte_lengths[counted].sum())
                sums[index] = torch.tensor(
                    [float(loss), counted.size, text_bytes], dtype=torch.float64
                )
    finally:
        gpt.train(training)
    nats, tokens, text_bytes = (sum(column) for column in ranks.all_reduce_cpu(sums).T.tolist())
    return ValidationLoss(loss=nats / tokens, tokens=int(tokens), text_bytes=int(text_bytes))


def _own_batches(batches: int, ranks: Ranks, sharded: bool) -> range:
    """The batches of one process. If `sharded`, each has the same number, so the last may not
    exist."""
    end = -(-batches // ranks.size) * ranks.size if sharded else batches
    return range(ranks.rank, end, ranks.size)
