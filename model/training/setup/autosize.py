"""Autosize: which model to train when only the minutes are given.

`logitd train --minutes 5` measures how fast this machine trains, by real steps on random ids, and
takes the largest of SIZES that sees enough tokens in that time. The choice is filled into the
configuration as if it had been given, so run.json holds it and a resumed run measures nothing.

The rule: the model may have as many parameters in its block matrices as leaves
TOKENS_PER_PARAMETER tokens for each. A larger model sees fewer tokens in the same time, so sizes
grow with the square root of the arithmetic that the time allows, as in Hoffmann et al. (2022).
Their constant is twenty; at these sizes fewer were measured to be better. One core of an AVX-512
machine, the text that Python carries, validation in bits per byte:

    time      model (layers x width)   matrices   tokens    per param.   bits per byte
    75 s      4 x 96                   0.44 M     1.13 M    2.6          1.677
    75 s      4 x 128                  0.79 M     0.97 M    1.2          1.655, the best
    75 s      4 x 192                  1.77 M     0.57 M    0.3          1.766
    170 s     4 x 128                  0.79 M     1.84 M    2.3          1.41, the best
    170 s     4 x 192                  1.77 M     1.11 M    0.6          1.60
    170 s     4 x 256                  3.15 M     0.71 M    0.2          1.69
    30 min    6 x 256 (two cores)      4.72 M     9.3 M     2.0          the bundled checkpoint's

So 1.2 is enough and 0.6 is not: the constant lies between. These are single runs. Below width 96
and above 256 nothing was measured: there the sizes follow the same rule. Vocabularies of 1,024 and
2,048 tokens were equal within the noise at widths 128 and 192, and larger ones worse; other values
grow with the model.

The text is looked at only by its length: one that would be passed several times in that time gets a
smaller vocabulary and dropout (`model/training/configuration/repetition.py`), and what that comes
to is told. A longer one, and whoever gives these values, gets what this module says.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from logitd.model.data.published_vocabulary import published_vocabulary
from logitd.model.device import Placement, use_threads
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.configuration.repetition import enough_bytes, passes, regularisation
from logitd.model.training.events import EventHandler, Noticed
from logitd.model.training.optim.optimizers import Optimizers, initialise
from logitd.model.training.setup.resolve import resolve_config
from logitd.model.training.step.flops import flops_per_token
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import count_elements

TOKENS_PER_PARAMETER = 0.9
"""Of the block matrices."""
USABLE = 0.9
"""Share of the time that goes into steps; the rest into evaluations, samples and checkpoints."""
MEASURING = 0.05
"""Share of the time that may be spent on measuring, at most MEASURING_SECONDS."""
MEASURING_SECONDS = 10.0
MEASURED_STEPS = 3
"""After one that is not counted: what a measurement is expected to take."""
MOST_MEASURED_STEPS = 9
"""What it takes where there is time. With 3 a moment in which another process had the cores made
up to half of them; the size and what suits the text followed from it for the whole run."""
SHORT = 45.0
"""Seconds of a run below which the first model measured is the smallest."""

_SHAPE = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff")
CHOSEN_BY_HAND = frozenset({"preset", "from_checkpoint", *_SHAPE, "steps", "optimizer"})
"""Whoever gives one of these has chosen the model, its recipe or the length of the run."""
PUBLISHED = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}
"""Tokens of published encodings."""


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
    """Heads of 64, the fastest width; beside AdamW's 0 the matrices of larger models decay, because
    they see a text several times."""
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
"""In all but a short run."""


@dataclass(frozen=True)
class Candidate:
    """What a configuration comes to with a size filled in."""

    recipe: Recipe
    model: GPTConfig


@dataclass(frozen=True)
class FlopsAndParams:
    """What a model of a size computes for a token, and the parameters of its block matrices."""

    flops_per_token: float
    matrix_params: int


Measure = Callable[[Size], float]
"""Trains a model of a size for some steps: tokens per second."""


@dataclass(frozen=True)
class Choice:
    """The size, the tokens per second expected of it, and those that were measured."""

    size: Size
    tokens_per_second: float
    measured: Mapping[Size, float]


Count = Callable[[float], int]
"""Counts the bytes of the text; where these are more than it is given, some number above that."""


def chooses(config: TrainingConfig, processes: int) -> bool:
    """Whether a model has to be chosen: minutes were given, and nothing that decides it. Raises
    TrainingError for several processes: one of them cannot measure what they do together."""
    if config.minutes is None or CHOSEN_BY_HAND & config.given().keys():
        return False
    if processes > 1:
        raise TrainingError(
            f"--minutes alone chooses a model by what one process measures, and there are "
            f"{processes}: name one with --preset"
        )
    return True


@dataclass(frozen=True)
class Measured:
    """What this machine can train in the minutes of a configuration. `vocab_size` is that of a
    ready-made vocabulary; None where one is learned."""

    choice: Choice
    tokens: float
    vocab_size: int | None
    placement: Placement


def choose(config: TrainingConfig, count: Count, report: EventHandler) -> TrainingConfig:
    """The configuration with a model and a length that suit its minutes, and a recipe that suits
    how often the text is passed in them. Values that were given stay."""
    return adapt(config, measure_machine(config), count, report)


def measure_machine(config: TrainingConfig) -> Measured:
    """The size for the minutes of a configuration, by measurements."""
    assert config.minutes is not None
    placement = training_placement(config.device, config.dtype or "auto", config.threads)
    use_threads(placement.threads)
    seconds = config.minutes * 60
    vocab_size = _vocabulary_size(config.tokenizer)
    candidates = {size: resolve_candidate(config, size, vocab_size) for size in SIZES}
    choice = search(
        seconds,
        {size: flops_and_params(candidate) for size, candidate in candidates.items()},
        lambda size: measure(candidates[size], placement, seconds),
    )
    return Measured(choice, seconds * USABLE * choice.tokens_per_second, vocab_size, placement)


def adapt(
    config: TrainingConfig, measured: Measured, count: Count, report: EventHandler
) -> TrainingConfig:
    """The configuration with what was measured filled in, and with what suits the text."""
    choice, tokens = measured.choice, measured.tokens
    chosen = fill_in(config, choice.size, tokens)
    report(Noticed(_describe(choice, chosen, tokens, measured.placement)))
    return regularise(chosen, config, tokens, measured.vocab_size, count, report)


def regularise(
    chosen: TrainingConfig,
    asked: TrainingConfig,
    tokens: float,
    ready_made: int | None,
    count: Count,
    report: EventHandler,
) -> TrainingConfig:
    """What was chosen, with what a text wants that so many tokens pass often, where nothing was
    asked for. `ready_made`: the size of such a vocabulary."""
    size = ready_made or chosen.vocab_size
    assert size is not None
    share = 1 - resolve_config(chosen).recipe.val_fraction
    text_bytes = share * count(enough_bytes(tokens, size) / share)
    may_learn = ready_made is None and "vocab_size" not in asked.given()
    wanted = regularisation(tokens, text_bytes, size, may_learn=may_learn)
    if wanted is None:
        return chosen
    changes: dict[str, int | float] = {}
    if wanted.vocab_size != size:
        changes["vocab_size"] = wanted.vocab_size
    if wanted.dropout and "dropout" not in asked.given():
        changes["dropout"] = wanted.dropout
    often = passes(tokens, text_bytes, wanted.vocab_size)
    said = f"the text is passed about {often:,.{0 if often >= 10 else 1}f} times in them"
    if so := " and ".join(f"{_WORDS[name]} {value:g}" for name, value in changes.items()):
        said += f", so it gets {so}"
    report(Noticed(said))
    return chosen.model_copy(update=changes)


_WORDS = {"dropout": "dropout", "vocab_size": "a vocabulary of"}


def search(
    seconds: float,
    demands: Mapping[Size, FlopsAndParams],
    measure: Measure,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """The largest size that the seconds allow, by measurements from small to large.

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
        size = largest(seconds, demands, measured)
        expected = _expected(size, demands, measured)
        takes = (1 + MEASURED_STEPS) * size.batch_size * size.context_length / expected
        if size in measured or clock() - began + takes > allowed:
            return Choice(size, expected, measured)


def largest(
    seconds: float, demands: Mapping[Size, FlopsAndParams], measured: Mapping[Size, float]
) -> Size:
    """The largest size that sees enough tokens in the time; the smallest if none does."""
    for size in reversed(SIZES):
        tokens = seconds * USABLE * _expected(size, demands, measured)
        if tokens >= TOKENS_PER_PARAMETER * demands[size].matrix_params:
            return size
    return SIZES[0]


def _expected(
    size: Size, demands: Mapping[Size, FlopsAndParams], measured: Mapping[Size, float]
) -> float:
    """Tokens per second."""
    index = SIZES.index(size)
    nearest = min(measured, key=lambda other: abs(SIZES.index(other) - index))
    rate = measured[nearest] * demands[nearest].flops_per_token
    return rate / demands[size].flops_per_token


def measure(candidate: Candidate, placement: Placement, seconds: float) -> float:
    """Tokens per second of real steps on random ids: the median of MOST_MEASURED_STEPS at most, the
    first not counted. For a run of so many `seconds`, no more steps than it has time for, but at
    least one."""
    recipe, model = candidate.recipe, candidate.model
    generator = torch.Generator().manual_seed(recipe.seed)
    gpt = GPT(model)
    initialise(gpt, recipe, generator)
    gpt.to(placement.device).train()
    optimizers, forward = Optimizers(gpt, recipe), Forward(gpt, placement, dropout=model.dropout)
    shape = (recipe.batch_size, model.context_length + 1)
    begun, allowed = time.perf_counter(), min(MEASURING * seconds, MEASURING_SECONDS)
    times: list[float] = []
    while _goes_on(len(times), (time.perf_counter() - begun) / allowed):
        ids = torch.randint(model.vocab_size, shape, generator=generator).to(placement.device)
        began = time.perf_counter()
        loss = forward.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizers.step(1.0)
        if placement.device.type == "cuda":  # there a call only queues the work
            torch.cuda.synchronize(placement.device)
        times.append(time.perf_counter() - began)
    return recipe.batch_size * model.context_length / statistics.median_low(times[1:])


def _goes_on(steps: int, spent: float) -> bool:
    """Whether to measure another step after so many and a share of the time. A quarter of it goes
    into steps beyond the fewest: larger sizes are to be measured as well."""
    if steps < 2:
        return True
    if steps < 1 + MEASURED_STEPS:
        return spent < 1
    return steps < 1 + MOST_MEASURED_STEPS and spent < 0.25


def flops_and_params(candidate: Candidate) -> FlopsAndParams:
    model = candidate.model
    return FlopsAndParams(flops_per_token(model), count_elements(model).block_matrices)


def fill_in(config: TrainingConfig, size: Size, tokens: float | None = None) -> TrainingConfig:
    """A configuration with the values of a size, and with evaluations, samples and checkpoints
    spread over a run of so many tokens, where nothing else is given: seven evaluations, each of
    which takes less than a hundredth of the time, and samples and a checkpoint three times."""
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


def resolve_candidate(
    config: TrainingConfig, size: Size, vocab_size: int | None = None
) -> Candidate:
    """A size with what was given besides; `vocab_size` of a vocabulary that is ready-made."""
    resolution = resolve_config(fill_in(config, size))
    return Candidate(
        resolution.recipe, resolution.model(vocab_size or resolution.recipe.vocab_size)
    )


def _vocabulary_size(tokenizer: str | None) -> int | None:
    """The size of a ready-made vocabulary; None where one is learned, which has the size's own."""
    if tokenizer is None or tokenizer == "own":
        return None
    return PUBLISHED.get(tokenizer) or published_vocabulary(tokenizer).vocab_size


def _describe(choice: Choice, chosen: TrainingConfig, tokens: float, placement: Placement) -> str:
    speeds = ", ".join(f"{speed:,.0f} tok/s with {size}" for size, speed in choice.measured.items())
    minutes = "a minute" if chosen.minutes == 1 else f"{chosen.minutes:g} minutes"
    return (
        f"measured {speeds}, {placement.dtype_name}, {placement.threads} threads\n"
        f"in {minutes} that is {tokens / 1e6:.2g} million tokens: {choice.size}, "
        f"context {chosen.context_length}, batches of {chosen.batch_size}"
    )
