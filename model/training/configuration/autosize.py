"""Autosize: the model and the recipe for `--minutes`, by this machine's speed and the text.

`logitd train --minutes 5` measures real steps (`model/training/setup/measure.py`) and takes the
largest of SIZES that sees enough tokens in that time. `autosize` fills the choice into the
configuration as if the user had set it, so run.json has it and a resumed run measures nothing.
Fields that are set stay. Pure functions.

A model may have as many parameters in its block matrices as leaves TOKENS_PER_PARAMETER tokens for
each. A larger model sees fewer tokens in the same time, so sizes grow with the square root of the
arithmetic that the time allows, as in Hoffmann et al. (2022).

A model learns a text by heart that it sees six times: validation rises while the training loss
falls. By the number of passes, a recipe gets a smaller vocabulary, because a short text shows a
rare token a few times, and dropout. `model/training/README.md` has the measurements.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

from logitd.model.plural import pluralize
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import PRESETS
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
"""Seconds of a run below which the smallest size is measured first."""
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
"""Passes above which a preset without dropout gets a warning; `small` is made for exactly 4."""
SMALL_VOCABULARY = 512
DROPOUT = ((5.0, 0.1), (12.0, 0.2), (30.0, 0.3))
"""Passes above which a dropout begins. With a larger vocabulary the first begins at FEW."""
BYTES_PER_TOKEN = ((257, 1.0), (512, 2.05), (1024, 2.65), (2048, 3.2), (4096, 3.65), (8192, 4.05),
                   (16_384, 4.4))  # fmt: skip
"""Bytes per token of English and of Python's text, by the size of a vocabulary learned from it."""


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
    """A size with heads of 64, the fastest width. The matrices of larger models decay, because they
    see a text several times."""
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
"""Sizes in rising order, each one and a half to three times the one before."""
FIRST_MEASURED = SIZES[2]
"""The first size measured, unless the run is short."""


@dataclass(frozen=True)
class Choice:
    """The size for a time.

    tokens_per_second  expected of that size
    speeds             measured tokens per second, by size
    """

    size: Size
    tokens_per_second: float
    speeds: Mapping[Size, float]


@dataclass(frozen=True)
class Measured:
    """The size and the number of tokens that this machine can train in the configured minutes.

    published  size of a published vocabulary; None if the vocabulary is learned
    computed   dtype and threads, for the notice
    """

    choice: Choice
    tokens: float
    published: int | None
    computed: str


def wants_size(config: TrainingConfig, processes: int) -> bool:
    """True if the minutes choose the model. Raises TrainingError for several processes: one of them
    cannot measure what they do together."""
    if config.minutes is None or CHOSEN_BY_HAND & config.given().keys():
        return False
    if processes > 1:
        raise TrainingError(
            f"--minutes alone chooses a model by the speed of one process, and there are "
            f"{processes}: name one with --preset"
        )
    return True


def autosize(
    config: TrainingConfig, measured: Measured, text_bytes: float
) -> tuple[TrainingConfig, str]:
    """The configuration with a model, a length and a recipe filled in, and a notice about them.
    `text_bytes` is the size of the text, or any number above `enough_bytes`."""
    choice, tokens = measured.choice, measured.tokens
    changes, repetition = suit_text(
        config.given(),
        measured.published or config.vocab_size or choice.size.vocab_size,
        tokens,
        _train_share(config) * text_bytes,
        learned=measured.published is None,
    )
    chosen = fill_in(config.model_copy(update=changes), choice.size, tokens)
    speeds = ", ".join(f"{speed:,.0f} tok/s with {size}" for size, speed in choice.speeds.items())
    minutes = "a minute" if chosen.minutes == 1 else f"{chosen.minutes:g} minutes"
    return chosen, (
        f"measured {speeds}, {measured.computed}\n"
        f"in {minutes} that is {tokens / 1e6:.2g} million tokens: {choice.size}, "
        f"context {chosen.context_length}, batches of {chosen.batch_size}{repetition}"
    )


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
    given: Collection[str], vocab_size: int, tokens: float, train_bytes: float, *, learned: bool
) -> tuple[dict[str, int | float], str]:
    """The vocabulary and the dropout for a training text of `train_bytes` that `tokens` pass often,
    except fields that are `given`, and a notice that begins with a line break. Returns nothing and
    "" for a text that is passed less often. `vocab_size` may become smaller if it is `learned`."""
    if passes(tokens, train_bytes, vocab_size) <= FEW:
        return {}, ""
    changes: dict[str, int | float] = {}
    if learned and "vocab_size" not in given and vocab_size > SMALL_VOCABULARY:
        changes["vocab_size"] = vocab_size = SMALL_VOCABULARY
    often = passes(tokens, train_bytes, vocab_size)
    if (dropout := dropout_of(often, vocab_size)) and "dropout" not in given:
        changes["dropout"] = dropout
    words = {"vocab_size": "a vocabulary of", "dropout": "dropout"}
    what = " and ".join(f"{words[name]} {value:g}" for name, value in changes.items())
    notice = f"\nthe text is passed about {often:,.{0 if often >= 10 else 1}f} times in them"
    return changes, notice + (f", so it gets {what}" if what else "")


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
    speeds: dict[Size, float] = {}
    size = FIRST_MEASURED if seconds >= SHORT else SIZES[0]
    while True:
        speeds[size] = measure(size)
        size = _largest(seconds, models, speeds)
        expected = _expected(size, models, speeds)
        takes = (1 + MEASURED_STEPS) * size.batch_size * size.context_length / expected
        if size in speeds or clock() - began + takes > allowed:
            return Choice(size, expected, speeds)


def _largest(
    seconds: float, models: Mapping[Size, GPTConfig], speeds: Mapping[Size, float]
) -> Size:
    for size in reversed(SIZES):
        tokens = seconds * USABLE * _expected(size, models, speeds)
        if tokens >= TOKENS_PER_PARAMETER * count_elements(models[size]).block_matrices:
            return size
    return SIZES[0]


def _expected(size: Size, models: Mapping[Size, GPTConfig], speeds: Mapping[Size, float]) -> float:
    index = SIZES.index(size)
    nearest = min(speeds, key=lambda other: abs(SIZES.index(other) - index))
    return speeds[nearest] * flops_per_token(models[nearest]) / flops_per_token(models[size])


def bytes_per_token(vocab_size: int) -> float:
    """Approximate bytes of text per token; between two sizes by the logarithm."""
    smallest, largest = BYTES_PER_TOKEN[0], BYTES_PER_TOKEN[-1]
    if vocab_size >= largest[0]:
        return largest[1]
    above = next(i for i, (size, _) in enumerate(BYTES_PER_TOKEN) if size > max(vocab_size, 257))
    (low, fewer), (high, more) = BYTES_PER_TOKEN[above - 1], BYTES_PER_TOKEN[above]
    share = math.log(max(vocab_size, smallest[0]) / low) / math.log(high / low)
    return fewer + share * (more - fewer)


def passes(tokens: float, train_bytes: float, vocab_size: int) -> float:
    """Approximate number of times that `tokens` pass a training text of `train_bytes`."""
    return tokens * bytes_per_token(vocab_size) / max(1.0, train_bytes)


def enough_bytes(config: TrainingConfig, measured: Measured) -> float:
    """Bytes of a text, with its held-out part, that the run passes no more than FEW times."""
    vocab_size = measured.published or config.vocab_size or measured.choice.size.vocab_size
    return measured.tokens * bytes_per_token(vocab_size) / FEW / _train_share(config)


def _train_share(config: TrainingConfig) -> float:
    val_fraction: float = config.val_fraction or PRESETS[config.preset].recipe.val_fraction
    return 1 - val_fraction


def dropout_of(often: float, vocab_size: int) -> float:
    """The dropout for a text that is passed `often` times."""
    first = DROPOUT[0][1] if vocab_size > SMALL_VOCABULARY and often > FEW else 0.0
    return max([first, *(share for least, share in DROPOUT if often > least)])
