"""Repetition: how often a run passes its text, and what a recipe does about it.

A text that is passed once cannot be learned by heart; one that is passed six times is: validation
rises while the loss of training falls. `regularisation` says what helps then, by the number of
passes alone:

  a smaller vocabulary   a short text shows a rare token a few times, which is learned by heart
                         first. It also makes more tokens, so that the text is passed less often
  dropout                noise that grows with the passes; it takes a fifth more time on one core

Measured with 4 layers of width 128, batches of 2,048 tokens, Shakespeare's plays, validation in
bits per byte of the last weights and of the best evaluation's; "passes" are those of the row:

    text       steps   vocabulary   dropout   passes   last, best
    1.1 MB     1060    1,024        0         5.7      2.166, 2.123
    1.1 MB     1060    1,024        0.1       5.7      2.105
    1.1 MB     1060    512          0         4.4      2.093
    1.1 MB     530     1,024        0         2.8      2.099
    1.1 MB     530     512          0         2.2      2.141
    1.1 MB     333     1,024        0         1.8      2.173
    0.37 MB    333     1,024        0         5.5      2.290, 2.232
    0.37 MB    333     1,024        0.1       5.5      2.187
    0.37 MB    333     1,024        0.2       5.5      2.198
    0.37 MB    333     512          0         4.2      2.183
    0.37 MB    333     512          0.1       4.2      2.224
    0.37 MB    494     1,024        0         8.2      2.668, 2.250
    0.37 MB    494     512          0.1       6.2      2.187

These are single runs, and other texts have other losses: compare within a text. So at four to six
passes the small vocabulary does what dropout does, and costs nothing; at three the large one is
better, because more of the text is seen, and needs half the time for what the small one comes to.
Nothing was measured of more than eight passes and of other sizes of the model: there dropout grows
by what is usual.

Pure functions of numbers. What a run's size is, and that a person's own values come first, is
decided in `model/training/setup/autosize.py`.
"""

import math
from dataclasses import dataclass

FEW = 3.5
"""Passes up to which nothing changes: the recipe for long texts is the best one."""

MANY = 4.0
"""Passes from which on a preset without dropout is warned of: `small` is made for so many."""

SMALL_VOCABULARY = 512

DROPOUT = ((5.0, 0.1), (12.0, 0.2), (30.0, 0.3))
"""From so many passes on. With a larger vocabulary the first begins at FEW."""

BYTES_PER_TOKEN = ((257, 1.0), (512, 2.05), (1024, 2.65), (2048, 3.2), (4096, 3.65), (8192, 4.05),
                   (16_384, 4.4))  # fmt: skip
"""Of English and of Python's text, by the size of a vocabulary that was learned from it."""


@dataclass(frozen=True)
class Regularisation:
    """What a run gets that passes its text so often."""

    vocab_size: int
    dropout: float


def bytes_per_token(vocab_size: int) -> float:
    """About how many bytes of a text a token stands for: between two sizes by the logarithm."""
    smallest, largest = BYTES_PER_TOKEN[0], BYTES_PER_TOKEN[-1]
    if vocab_size >= largest[0]:
        return largest[1]
    above = next(i for i, (size, _) in enumerate(BYTES_PER_TOKEN) if size > max(vocab_size, 257))
    (low, fewer), (high, more) = BYTES_PER_TOKEN[above - 1], BYTES_PER_TOKEN[above]
    share = math.log(max(vocab_size, smallest[0]) / low) / math.log(high / low)
    return fewer + share * (more - fewer)


def passes(tokens: float, text_bytes: float, vocab_size: int) -> float:
    """How often `tokens` pass a training text of so many bytes, about."""
    return tokens * bytes_per_token(vocab_size) / max(1.0, text_bytes)


def enough_bytes(tokens: float, vocab_size: int) -> float:
    """Bytes of a training text that so many tokens pass no more than FEW times."""
    return tokens * bytes_per_token(vocab_size) / FEW


def regularisation(
    tokens: float, text_bytes: float, vocab_size: int, *, may_learn: bool
) -> Regularisation | None:
    """What `tokens` of a training text of so many bytes want, where a recipe for long texts would
    take a vocabulary of `vocab_size`; None: nothing. `may_learn`: the vocabulary is learned, and
    may be another."""
    if passes(tokens, text_bytes, vocab_size) <= FEW:
        return None
    smaller = min(vocab_size, SMALL_VOCABULARY) if may_learn else vocab_size
    often = passes(tokens, text_bytes, smaller)
    return Regularisation(smaller, dropout_of(often, smaller))


def dropout_of(often: float, vocab_size: int) -> float:
    """For so many passes of tokens of such a vocabulary."""
    first = DROPOUT[0][1] if vocab_size > SMALL_VOCABULARY and often > FEW else 0.0
    return max([first, *(share for least, share in DROPOUT if often > least)])
