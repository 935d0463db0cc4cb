"""Validation: the loss on fixed windows of the validation tokens.

The loss is reported in two units. Training minimizes nats per token, which depend on the
vocabulary. Bits per byte do not: they are the nats of all predicted tokens, divided by the bytes of
their text and by ln 2. The end of a document is predicted like any other token and has zero bytes.

Validation uses no random numbers and leaves the model unchanged, so it does not disturb training.
Each process computes some of the batches. The sums of batches are added up in a fixed order, so the
bits of the result do not depend on the number of processes. `model/data/windows.py` chooses the
windows.
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
"""Largest number of nats per token whose perplexity is a finite float64."""


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss over `tokens` predicted tokens, whose text has `text_bytes` bytes."""

    loss: float  # nats per token
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.loss * self.tokens, self.text_bytes)

    @property
    def perplexity(self) -> float:
        """exp(loss): the prediction is as hard as choosing among this many equally likely tokens.
        Infinite for a loss of MOST_NATS or more."""
        return math.inf if self.loss >= MOST_NATS else math.exp(self.loss)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Bits per byte; infinite if the tokens have no text, for example if the only token is the end
    of a document."""
    return nats / math.log(2) / text_bytes if text_bytes else math.inf


def validate(
    gpt: GPT,
    windows: Windows,
    forward: Callable[[Tensor], Tensor],
    ranks: Ranks = ALONE,
    *,
    sharded: bool = False,
) -> ValidationLoss:
    """The mean loss over all windows. All ranks must call this and get the same result. `forward`
    maps ids (B, T) to logits (B, T, V). `sharded`: each rank has a part of the model, so all must
    compute together.
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
                    continue  # computed only because the others need its part of the model
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
    """Indices of the batches of one process. If `sharded`, all processes get the same number of
    indices, so the last index may be beyond the last batch."""
    end = -(-batches // ranks.size) * ranks.size if sharded else batches
    return range(ranks.rank, end, ranks.size)
