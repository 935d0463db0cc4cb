"""N-grams: estimates the losses of n-gram models on a text. A trained GPT should have a lower loss.

Wrong variants of a trained model still predict the frequencies of single tokens, and often of some
pairs of tokens. The right variant predicts the text better than bigram and trigram models do,
unless the GPT learned little. So the loss of a variant is evidence only if it is lower than the
losses of these models. `by_text.py` compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
"""Length, in tokens, of the blocks into which a text is divided. Each block is either counted or
predicted."""
HELD_OUT = 4
"""One block out of this many is predicted from the counts of the other blocks."""
MOST_TOKENS = 500_000


@dataclass(frozen=True, slots=True)
class NgramNats:
    """Losses on held-out parts of a text, in nats per token. A token is predicted from counts of
    tokens (unigram), pairs (bigram) or triples (trigram) in the other parts of the text."""

    unigram: float
    bigram: float
    trigram: float

    @property
    def pairs(self) -> float:
        """The lower of the unigram and bigram losses."""
        return min(self.unigram, self.bigram)

    def over(self, length: int) -> float:
        """The lowest n-gram loss, averaged over a window of `length` predictions. The first
        prediction has one token before it, so there is no trigram loss."""
        return (self.pairs + (length - 1) * min(self.pairs, self.trigram)) / length


def ngram_nats(token_ids: Sequence[int], vocab_size: int) -> NgramNats:
    """Estimate the n-gram losses on a text. Counts for a context are interpolated with the
    probabilities for the next shorter context by the rule of Witten and Bell (1991, method C): the
    weight of the shorter context is the number of different tokens that followed the longer
    context."""
    ids = np.asarray(token_ids[:MOST_TOKENS], dtype=np.int64)
    predicted = np.arange(len(ids)) // BLOCK_TOKENS % HELD_OUT == HELD_OUT - 1
    if not predicted.any():
        predicted = np.arange(len(ids)) >= len(ids) * (HELD_OUT - 1) // HELD_OUT
    predicted[:2] = False  # without two tokens before
    contexts = np.zeros_like(ids)
    shares = np.full(len(ids), 1.0 / vocab_size)
    losses = []
    for order in range(3):
        if order:  # number the contexts that begin one token earlier
            longer = contexts * vocab_size + np.roll(ids, order)
            contexts = np.unique(longer, return_inverse=True)[1]
        shares = _interpolated(contexts, ids, vocab_size, ~predicted, shares)
        losses.append(float(-np.log(shares[predicted]).mean()) if predicted.any() else np.inf)
    return NgramNats(*losses)


def _interpolated(
    contexts: NDArray[np.int64],
    ids: NDArray[np.int64],
    vocab_size: int,
    counted: NDArray[np.bool_],
    shorter: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The probability of each token given its context. It is computed from counts of the tokens
    that `counted` selects, and from `shorter`, the probabilities given the next shorter
    contexts."""
    keys, pairs = np.unique(contexts * vocab_size + ids, return_inverse=True)
    together = np.bincount(pairs[counted], minlength=len(keys))
    total = np.bincount(contexts[counted], minlength=int(contexts.max()) + 1)
    different = np.bincount(keys[together > 0] // vocab_size, minlength=len(total))
    weight = (total + different)[contexts]
    mixed = together[pairs] + different[contexts] * shorter
    return np.where(weight > 0, mixed / np.maximum(weight, 1), shorter)
