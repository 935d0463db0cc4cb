"""Autosize: the model and the recipe that suit `--minutes`, by this machine's speed and the text.

`logitd train --minutes 5` measures real steps (`model/training/setup/measure.py`), and takes the
largest of SIZES that sees enough tokens in that time. The choice is filled into the configuration
as if the user had set it, so run.json has it and a resumed run measures nothing. Fields that are
set stay. Pure functions.

A model may have as many parameters in its block matrices as leaves TOKENS_PER_PARAMETER tokens for
each. A larger model sees fewer tokens in the same time, so sizes grow with the square root of the
arithmetic that the time allows, as in Hoffmann et al. (2022).

A text that is passed six times is learned by heart: validation rises while the loss of training
falls. By the number of passes, a recipe gets a smaller vocabulary, because a short text shows a
rare token a few times, and dropout. The measurements behind the constants are in
`model/training/README.md`.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.step.flops import flops_per_token
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.size import count_elements

TOKENS_PER_PARAMETER = 0.9
"""Tokens for each parameter of the block matrices."""
USABLE = 0.9
"""Share of the time for steps; the rest is for evaluations, samples and checkpoints."""
MEASURING = 0.05
"""Share of the time for measuring, at most MEASURING_SECONDS."""
MEASURING_SECONDS = 10.0
MEASURED_STEPS = 3
"""Fewest steps of a measurement, after one that is not counted."""
SHORT = 45.0
"""Seconds of a run below which the first model measured is the smallest."""
CHOSEN_BY_HAND = frozenset(
    (
        *("preset", "from_checkpoint", "n_layer", "n_head", "n_kv_head", "head_dim", "d_model"),
        *("d_ff", "steps", "optimizer"),
    )
)
"""Setting any of these disables autosizing."""

FEW = 3.5
"""Passes up to which the recipe for long texts is the best one."""
MANY = 4.0
"""Passes from which the user is warned of a preset without dropout: `small` is made for as many."""
SMALL_VOCABULARY = 512
DROPOUT = ((5.0, 0.1), (12.0, 0.2), (30.0, 0.3))
"""Passes above which a dropout begins. With a larger vocabulary the first begins at FEW."""
BYTES_PER_TOKEN = ((257, 1.0), (512, 2.05), (1024, 2.65), (2048, 3.2), (4096, 3.65), (8192, 4.05),
                   (16_384, 4.4))  # fmt: skip
"""In English and in Python's text, by the size of a vocabulary that was learned from it."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One of SIZES: fields of TrainingConfig."""

    n_layer: int
    n_head: int
    d_model: int
    context_length: int
    vocab_size: int
    batch_size: int
    matrix_lr: float
    weight_decay: float = 0.0

    def __str__(self) -> str:
        return f"{self.n_layer} layers of width {self.d_model}"


def _size(layers: int, width: int, context: int, batch: int, vocabulary: int, rate: float) -> Size:
    """Heads of 64, the fastest width. The matrices of larger models decay, because they see a text
    several times."""
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
    _size(2, 64, 128, 8, 1024, 0.035),
    _size(3, 96, 256, 6, 1024, 0.035),
    _size(4, 128, 256, 8, 1024, 0.035),  # `tiny`
    _size(4, 192, 256, 12, 2048, 0.03),
    _size(6, 192, 256, 12, 2048, 0.03),
    _size(6, 256, 512, 8, 2048, 0.03),  # `small`
    _size(8, 320, 512, 10, 4096, 0.03),
    _size(8, 384, 512, 12, 4096, 0.025),
    _size(8, 512, 1024, 8, 8192, 0.025),
    _size(10, 640, 1024, 12, 16_384, 0.025),
    _size(12, 768, 1024, 16, 16_384, 0.02),
    _size(16, 1024, 1024, 32, 16_384, 0.02),
)
"""From small to large, each one and a half to three times the one before."""
FIRST_MEASURED = SIZES[2]
"""The first size measured, unless the run is short."""


@dataclass(frozen=True)
class Choice:
    """The size for a time, the tokens per second expected of it, and the measured speeds."""

    size: Size
    tokens_per_second: float
    measured: Mapping[Size, float]


@dataclass(frozen=True)
class Measured:
    """The size and the number of tokens that this machine can train in the configured minutes.

    vocab_size  size of a published vocabulary; None if one is learned
    computed    dtype and threads, for the user
    """

    choice: Choice
    tokens: float
    vocab_size: int | None
    computed: str


Count = Callable[[float], int]
"""Counts the bytes of the text, or returns some number above its argument if there are more."""


def chooses(config: TrainingConfig, processes: int) -> bool:
    """Whether a model has to be chosen by the minutes. Raises TrainingError for several processes:
    one of them cannot measure what they do together."""
    if config.minutes is None or CHOSEN_BY_HAND & config.given().keys():
        return False
    if processes > 1:
        raise TrainingError(
            f"--minutes alone chooses a model by the speed of one process, and there are "
            f"{processes}: name one with --preset"
        )
    return True


def autosize(
    config: TrainingConfig, measured: Measured, count: Count
) -> tuple[TrainingConfig, str]:
    """The configuration with a model, a length and a recipe filled in, and a notice that explains
    them."""
    choice, tokens = measured.choice, measured.tokens
    chosen = fill_in(config, choice.size, tokens)
    speeds = ", ".join(f"{speed:,.0f} tok/s with {size}" for size, speed in choice.measured.items())
    minutes = "a minute" if chosen.minutes == 1 else f"{chosen.minutes:g} minutes"
    notice = (
        f"measured {speeds}, {measured.computed}\n"
        f"in {minutes} that is {tokens / 1e6:.2g} million tokens: {choice.size}, "
        f"context {chosen.context_length}, batches of {chosen.batch_size}"
    )
    changes, repetition = suit_text(chosen, config, tokens, measured.vocab_size, count)
    return chosen.model_copy(update=changes), notice + repetition


def fill_in(config: TrainingConfig, size: Size, tokens: float | None = None) -> TrainingConfig:
    """A configuration with the values of a size, and with evaluations, samples and checkpoints
    spread over a run of `tokens`: seven evaluations, each of which takes less than a hundredth of
    the time, and samples and a checkpoint three times."""
    values = asdict(size)
    if (config.tokenizer or "own") != "own":
        del values["vocab_size"]
    if tokens is not None:
        sequences = (config.batch_size or size.batch_size) * (config.accumulate or 1)
        length = config.context_length or size.context_length
        steps = max(1, round(tokens / (sequences * length)))
        # They need not divide the steps: a run ends with an evaluation and a checkpoint anyway.
        values["eval_every"] = max(10, round(0.15 * steps))
        values["eval_batches"] = max(4, round(0.02 * steps))
        values["sample_every"] = values["checkpoint_every"] = max(10, round(0.4 * steps))
    given = config.given()
    return config.model_copy(
        update={name: value for name, value in values.items() if name not in given}
    )


def suit_text(
    chosen: TrainingConfig,
    asked: TrainingConfig,
    tokens: float,
    published: int | None,
    count: Count,
) -> tuple[dict[str, int | float], str]:
    """The vocabulary and the dropout for a text that `tokens` pass often, unless `asked` has them,
    and a notice that begins with a line break; nothing and "" for another text. `published` is the
    size of a vocabulary that is not learned."""
    size = published or chosen.vocab_size
    share = 1 - resolve(chosen).recipe.val_fraction
    text_bytes = share * count(enough_bytes(tokens, size) / share)
    if passes(tokens, text_bytes, size) <= FEW:
        return {}, ""
    given = asked.given()
    changes: dict[str, int | float] = {}
    if published is None and "vocab_size" not in given and size > SMALL_VOCABULARY:
        changes["vocab_size"] = size = SMALL_VOCABULARY
    often = passes(tokens, text_bytes, size)
    if (dropout := dropout_of(often, size)) and "dropout" not in given:
        changes["dropout"] = dropout
    words = {"vocab_size": "a vocabulary of", "dropout": "dropout"}
    what = " and ".join(f"{words[name]} {value:g}" for name, value in changes.items())
    notice = f"the text is passed about {often:,.{0 if often >= 10 else 1}f} times in them"
    return changes, f"\n{notice}" + (f", so it gets {what}" if what else "")


def search(
    seconds: float,
    models: Mapping[Size, GPTConfig],
    measure: Callable[[Size], float],
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """The largest size that the seconds allow, by measurements from small to large. `measure`
    trains a size for some steps and returns tokens per second.

    A size that was not measured is expected to do as much arithmetic per second as the measured
    size nearest to it. The size that is best by that is measured next, until it has been measured
    or another measurement would take too long.
    """
    allowed = min(MEASURING * seconds, MEASURING_SECONDS)
    began = clock()
    measured: dict[Size, float] = {}
    size = FIRST_MEASURED if seconds >= SHORT else SIZES[0]
    while True:
        measured[size] = measure(size)
        size = _largest(seconds, models, measured)
        expected = _expected(size, models, measured)
        takes = (1 + MEASURED_STEPS) * size.batch_size * size.context_length / expected
        if size in measured or clock() - began + takes > allowed:
            return Choice(size, expected, measured)


def _largest(
    seconds: float, models: Mapping[Size, GPTConfig], measured: Mapping[Size, float]
) -> Size:
    """The largest size that sees enough tokens in the time; the smallest if none does."""
    for size in reversed(SIZES):
        tokens = seconds * USABLE * _expected(size, models, measured)
        if tokens >= TOKENS_PER_PARAMETER * count_elements(models[size]).block_matrices:
            return size
    return SIZES[0]


def _expected(
    size: Size, models: Mapping[Size, GPTConfig], measured: Mapping[Size, float]
) -> float:
    """Tokens per second."""
    index = SIZES.index(size)
    nearest = min(measured, key=lambda other: abs(SIZES.index(other) - index))
    return measured[nearest] * flops_per_token(models[nearest]) / flops_per_token(models[size])


def bytes_per_token(vocab_size: int) -> float:
    """About how many bytes of a text a token has: between two sizes by the logarithm."""
    smallest, largest = BYTES_PER_TOKEN[0], BYTES_PER_TOKEN[-1]
    if vocab_size >= largest[0]:
        return largest[1]
    above = next(i for i, (size, _) in enumerate(BYTES_PER_TOKEN) if size > max(vocab_size, 257))
    (low, fewer), (high, more) = BYTES_PER_TOKEN[above - 1], BYTES_PER_TOKEN[above]
    share = math.log(max(vocab_size, smallest[0]) / low) / math.log(high / low)
    return fewer + share * (more - fewer)


def passes(tokens: float, text_bytes: float, vocab_size: int) -> float:
    """About how often `tokens` pass a training text of `text_bytes`."""
    return tokens * bytes_per_token(vocab_size) / max(1.0, text_bytes)


def enough_bytes(tokens: float, vocab_size: int) -> float:
    """Bytes of a training text that `tokens` pass no more than FEW times."""
    return tokens * bytes_per_token(vocab_size) / FEW


def dropout_of(often: float, vocab_size: int) -> float:
    """The dropout for `often` passes with a vocabulary."""
    first = DROPOUT[0][1] if vocab_size > SMALL_VOCABULARY and often > FEW else 0.0
    return max([first, *(share for least, share in DROPOUT if often > least)])
