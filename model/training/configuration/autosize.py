"""Autosize: chooses the model and the recipe for `--minutes` from the machine's speed and the text.

`logitd train --minutes 5` measures real steps (`model/training/setup/measure.py`) and chooses the
largest of SIZES that can see enough tokens in that time. `autosize` resolves the run as if the user
had set the chosen values, so run.json stores them and a resumed run measures nothing. Values that
the user set are kept.

A size is allowed if the run can train on at least TOKENS_PER_PARAMETER tokens for each parameter of
the block matrices. A larger model sees fewer tokens in the same time, so the chosen size grows with
the square root of the operations that the time allows, as in Hoffmann et al. (2022).

A model that sees a text six times overfits: the validation loss rises while the training loss
falls. So if the text is short, the recipe gets dropout, and a smaller vocabulary, because a rare
token would occur only a few times. `model/training/README.md` has the measurements.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from logitd.model.plural import pluralize
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.resolve import ResolvedTraining, resolve
from logitd.model.transformer.size import count_elements

TOKENS_PER_PARAMETER = 0.85
"""Minimum number of training tokens per parameter of the block matrices."""
USABLE = 0.9
"""Share of the run's time available for steps; the rest is for evaluations, samples and
checkpoints."""
MEASURING = 0.05
"""Measuring may take at most this share of the run's time, and at most MEASURING_SECONDS."""
MEASURING_SECONDS = 10.0
MEASURED_STEPS = 3
"""Minimum number of timed steps in a measurement, which begins with an untimed step."""
SHORT = 45.0
"""In runs shorter than this many seconds, the smallest size is measured first."""
CHOSEN_BY_HAND = frozenset(
    (
        *("preset", "from_checkpoint", "n_layer", "n_head", "n_kv_head", "head_dim", "d_model"),
        *("d_ff", "steps", "optimizer"),
    )
)
"""Setting any of these disables autosizing."""

FEW = 3.5
"""Up to this number of passes over the text, the recipe for long texts is best."""
MANY = 4.0
"""Number of passes above which a preset without dropout causes a warning. The preset `small` makes
exactly this many over Python's own text, so it causes none."""
SMALL_VOCABULARY = 512
DROPOUT = ((5.0, 0.1), (12.0, 0.2), (30.0, 0.3))
"""Pairs of a number of passes and the dropout to use above it. If the vocabulary is larger than
SMALL_VOCABULARY, the first dropout applies above FEW passes instead."""
BYTES_PER_TOKEN = ((257, 1.0), (512, 2.05), (1024, 2.65), (2048, 3.2), (4096, 3.65), (8192, 4.05),
                   (16_384, 4.4))  # fmt: skip
"""Pairs of the size of a learned vocabulary and the bytes of text per token, measured on English
text and on Python's own text."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model size, as fields of TrainingConfig."""

    n_layer: int
    n_head: int
    d_model: int
    context_length: int
    vocab_size: int
    batch_size: int
    matrix_lr: float
    weight_decay: float = 0.0

    def __str__(self) -> str:
        return f"{pluralize(self.n_layer, 'layer')} of width {self.d_model}"


def _size(layers: int, width: int, context: int, batch: int, vocabulary: int, rate: float) -> Size:
    """Build a size with heads of width 64, the fastest width. Larger models get weight decay,
    because they see a text several times."""
    return Size(
        n_layer=layers,
        n_head=max(1, width // 64),
        d_model=width,
        context_length=context,
        batch_size=batch,
        vocab_size=vocabulary,
        matrix_lr=rate,
        weight_decay=0.05 if width >= 256 else 0.0,
    )


SIZES: tuple[Size, ...] = (
    _size(2, 64, 512, 2, 1024, 0.035),
    _size(3, 96, 768, 2, 1024, 0.035),
    _size(4, 128, 1024, 2, 1024, 0.035),  # `tiny`
    _size(4, 192, 1024, 3, 2048, 0.03),
    _size(6, 192, 1024, 3, 2048, 0.03),
    _size(6, 256, 1024, 4, 2048, 0.03),  # `small`
    _size(8, 320, 1024, 5, 4096, 0.03),
    _size(8, 384, 1024, 6, 4096, 0.025),
    _size(8, 512, 1024, 8, 8192, 0.025),
    _size(10, 640, 1024, 12, 16_384, 0.025),
    _size(12, 768, 1024, 16, 16_384, 0.02),
    _size(16, 1024, 1024, 32, 16_384, 0.02),
)
"""Sizes in ascending order. Each has 1.5 to 3 times the parameters of the previous one."""
FIRST_MEASURED = SIZES[2]
"""The first size measured, unless the run is short."""


@dataclass(frozen=True)
class Choice:
    """The size that `search` chose for a time limit, with its measurements.

    training           settings of a run of that size, assuming that the text is long
    tokens_per_second  expected speed of that size
    tokens             number of tokens that this machine can train on in that time
    speeds             measured tokens per second, by size
    """

    size: Size
    training: ResolvedTraining
    tokens_per_second: float
    tokens: float
    speeds: Mapping[Size, float]

    @property
    def train_share(self) -> float:
        return 1 - self.training.recipe.val_fraction

    @property
    def enough_bytes(self) -> float:
        """Size of the smallest text, including its held-out part, over which the run makes at most
        FEW passes."""
        per_token = bytes_per_token(self.training.model.vocab_size)
        return self.tokens * per_token / FEW / self.train_share


def wants_size(config: TrainingConfig, processes: int) -> bool:
    """True if the size is chosen from --minutes. Raises TrainingError if there are several
    processes, because one process cannot measure their joint speed."""
    if config.minutes is None or CHOSEN_BY_HAND & config.given().keys():
        return False
    if processes > 1:
        raise TrainingError(
            f"--minutes without --preset chooses a model by the speed of one process, but there "
            f"are {processes}: set --preset"
        )
    return True


def resolve_size(
    config: TrainingConfig, size: Size, published: int | None = None
) -> ResolvedTraining:
    """Determine the settings of a run of this size, assuming that the text is long. `published` is
    the size of a published vocabulary; None if the vocabulary is learned."""
    values = asdict(size)
    if published is not None:
        del values["vocab_size"]
    training = resolve(config.filled(values))
    return training.with_vocabulary(published or training.recipe.vocab_size)


def autosize(
    config: TrainingConfig, choice: Choice, text_bytes: float
) -> tuple[ResolvedTraining, str]:
    """Determine the settings of a run of the chosen size, with a recipe that suits its text and
    length. Also returns a notice about the run. `text_bytes` is the size of the text; all values
    above `choice.enough_bytes` have the same effect.

    The run gets seven evaluations, each less than a hundredth of the time, and writes samples and a
    checkpoint three times."""
    training, tokens = choice.training, choice.tokens
    steps = max(1, round(tokens / training.tokens_per_step))
    # Intervals need not divide the steps: a run always ends with an evaluation and a checkpoint.
    rarely = max(10, round(0.4 * steps))
    intervals = {
        "eval_every": max(10, round(0.15 * steps)),
        "eval_batches": max(4, round(0.02 * steps)),
        "sample_every": rarely,
        "checkpoint_every": rarely,
    }
    changes, repetition = suit_text(
        config.given(),
        training.model.vocab_size,
        tokens,
        choice.train_share * text_bytes,
        learned=training.recipe.tokenizer == "own",
    )
    chosen = resolve(training.config.filled(intervals).model_copy(update=changes))
    minutes = "a minute" if config.minutes == 1 else f"{config.minutes:g} minutes"
    return chosen, (
        f"{minutes} allow about {tokens / 1e6:.2g} million tokens: {choice.size}, "
        f"context {chosen.model.context_length}, batches of {chosen.recipe.batch_size}{repetition}"
    )


def suit_text(
    given: Collection[str], vocab_size: int, tokens: float, train_bytes: float, *, learned: bool
) -> tuple[dict[str, int | float], str]:
    """Adapt vocabulary and dropout if a run of this many `tokens` makes more than FEW passes over a
    training text of `train_bytes`. Returns the changed fields and a notice that begins with a line
    break; {} and "" if nothing changes. Fields in `given` are not changed. Only a `learned`
    vocabulary is made smaller."""
    before = passes(tokens, train_bytes, vocab_size)
    if before <= FEW:
        return {}, ""
    changes: dict[str, int | float] = {}
    reason = ""
    if learned and "vocab_size" not in given and vocab_size > SMALL_VOCABULARY:
        reason = f" ({_count(before)} with a vocabulary of {vocab_size:,})"
        changes["vocab_size"] = vocab_size = SMALL_VOCABULARY
    often = passes(tokens, train_bytes, vocab_size)
    if (dropout := dropout_of(often, vocab_size)) and "dropout" not in given:
        changes["dropout"] = dropout
    words = {"vocab_size": "a vocabulary of", "dropout": "dropout"}
    what = " and ".join(f"{words[name]} {value:g}" for name, value in changes.items())
    notice = f"\nthe run passes over the text about {_count(often)} times{reason}"
    return changes, notice + (f", so it uses {what}" if what else "")


def _count(passes: float) -> str:
    return f"{passes:,.{0 if passes >= 10 else 1}f}"


def search(
    seconds: float,
    candidates: Mapping[Size, ResolvedTraining],
    measure: Callable[[ResolvedTraining], float],
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Find the largest size that a run of this many seconds allows, by measuring sizes from small
    to large. `measure` trains a run for some steps and returns tokens per second.

    A size that was not measured is expected to reach as many operations per second as the nearest
    measured size. The largest size allowed by these expectations is measured next. The search ends
    if that size was already measured, or if measuring it would take too long.
    """
    allowed = min(MEASURING * seconds, MEASURING_SECONDS)
    began = clock()
    speeds: dict[Size, float] = {}

    def expected(size: Size) -> float:
        index = SIZES.index(size)
        nearest = min(speeds, key=lambda other: abs(SIZES.index(other) - index))
        measured, this = (candidates[each].operations_per_token for each in (nearest, size))
        return speeds[nearest] * measured / this

    def is_allowed(size: Size) -> bool:
        matrices = count_elements(candidates[size].model).block_matrices
        return seconds * USABLE * expected(size) >= TOKENS_PER_PARAMETER * matrices

    size = FIRST_MEASURED if seconds >= SHORT else SIZES[0]
    while True:
        speeds[size] = measure(candidates[size])
        size = next(filter(is_allowed, reversed(SIZES)), SIZES[0])
        speed = expected(size)
        takes = (1 + MEASURED_STEPS) * size.batch_size * size.context_length / speed
        if size in speeds or clock() - began + takes > allowed:
            return Choice(size, candidates[size], speed, seconds * USABLE * speed, speeds)


def bytes_per_token(vocab_size: int) -> float:
    """Approximate bytes of text per token, interpolated over the logarithm of the vocabulary's
    size."""
    sizes, values = zip(*BYTES_PER_TOKEN, strict=True)
    return float(np.interp(np.log(vocab_size), np.log(sizes), values))


def passes(tokens: float, train_bytes: float, vocab_size: int) -> float:
    """Approximate number of passes over a training text of `train_bytes` in a run of `tokens`
    tokens."""
    return tokens * bytes_per_token(vocab_size) / max(1.0, train_bytes)


def dropout_of(often: float, vocab_size: int) -> float:
    """The dropout for a run that makes `often` passes over its text."""
    first = DROPOUT[0][1] if vocab_size > SMALL_VOCABULARY and often > FEW else 0.0
    return max([first, *(share for least, share in DROPOUT if often > least)])
