"""Budget: which model to train when only the minutes are given.

`logitd train --minutes 5` measures how fast this machine trains, by real steps on random ids, and
takes the largest model of a ladder that sees enough tokens in that time. What was chosen is filled
into the configuration as if it had been given, so the run's description holds it and a resumed run
measures nothing.

The rule: a model may be as large as leaves TOKENS_PER_PARAMETER tokens for each number in its block
matrices. As the tokens of a budget fall with the size of the model, sizes grow with the square root
of the arithmetic that the budget allows, as in Hoffmann et al. (2022). Their constant is twenty; at
these sizes fewer were measured to be better. One core of an AVX-512 machine, the text that Python
carries, validation in bits per byte:

    budget    model (layers x width)   matrices   tokens    per number   bits per byte
    75 s      4 x 96                   0.44 M     1.13 M    2.6          1.677
    75 s      4 x 128                  0.79 M     0.97 M    1.2          1.655, the best
    75 s      4 x 192                  1.77 M     0.57 M    0.3          1.766
    170 s     4 x 128                  0.79 M     1.84 M    2.3          1.41, the best
    170 s     4 x 192                  1.77 M     1.11 M    0.6          1.60
    170 s     4 x 256                  3.15 M     0.71 M    0.2          1.69
    30 min    6 x 256 (two cores)      4.72 M     9.3 M     2.0          the bundled checkpoint's

So 1.2 is enough and 0.6 is not: the constant stands between. Single runs. Below width 96 and above
256 nothing was measured: there the ladder goes on by the same rule. Vocabularies of 1,024 and 2,048
tokens were equal within the noise at widths 128 and 192, and larger ones worse; the rest grows with
the model.

Does not look at the text: one of a few hundred kilobytes is learned by heart long before a large
model is done with its time (`best` is the checkpoint from before).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model.data.vocabulary import SMALLEST
from model.device import Placement, use_threads
from model.training.config import TrainingConfig, TrainingError, given, settle
from model.training.events import Noticed, Reporter
from model.training.optim.optimizers import Optimizers, initialise
from model.training.presets import preset
from model.training.step.flops import flops_per_token, matrix_parameters
from model.training.step.forward import Forward, training_placement
from model.transformer.config import GPTConfig
from model.transformer.gpt import GPT

TOKENS_PER_PARAMETER = 0.9
"""Of the block matrices."""
USABLE = 0.9
"""Share of the time that goes into steps; the rest into evaluations, samples and checkpoints."""
MEASURING = 0.05
"""Share of the budget that may be spent on measuring, at most MEASURING_SECONDS."""
MEASURING_SECONDS = 10.0
MEASURED_STEPS = 3
"""After one that is not counted."""
SHORT = 45.0
"""Seconds of a budget below which the first model measured is the smallest."""

OWN = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "steps", "optimizer")
"""Whoever gives one of these, or a preset, has chosen the model, its recipe or the length."""
READY_MADE = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}
"""Tokens of published encodings."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A rung of the ladder: fields of TrainingConfig."""

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


LADDER: tuple[Size, ...] = (
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

FIRST = LADDER[2]
"""What is measured first, but in a short budget."""


@dataclass(frozen=True)
class Demand:
    """What a size asks for: arithmetic per token, and numbers in the block matrices."""

    flops_per_token: float
    matrices: int


Measure = Callable[[Size], float]
"""Trains a model of a size for some steps: tokens per second."""


@dataclass(frozen=True)
class Choice:
    """The size, the tokens per second expected of it, and those that were measured."""

    size: Size
    tokens_per_second: float
    measured: Mapping[Size, float]


def fit(config: TrainingConfig, processes: int, report: Reporter) -> TrainingConfig:
    """The configuration with everything filled in that the budget decides, where it is to decide:
    minutes are given, and no preset and no size of one's own. Values that are given stay. Raises
    TrainingError for several processes: what they do together one of them cannot measure."""
    if config.minutes is None or given(config) & {"preset", *OWN}:
        return config
    if processes > 1:
        raise TrainingError(
            f"--minutes alone chooses a model by what one process measures, and there are "
            f"{processes}: name one with --preset"
        )
    placement = training_placement(config.device, config.dtype or "auto", config.threads)
    use_threads(placement.threads)
    seconds = config.minutes * 60
    demands = {size: demand(fill_in(config, size)) for size in LADDER}
    choice = climb(
        seconds, demands, lambda size: measure(fill_in(config, size), placement, seconds)
    )
    tokens = seconds * USABLE * choice.tokens_per_second
    fitted = fill_in(config, choice.size, tokens)
    report(Noticed(_said(choice, fitted, tokens, placement)))
    return fitted


def climb(
    seconds: float,
    demands: Mapping[Size, Demand],
    measure: Measure,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """The largest size that the seconds allow, by measurements from small to large.

    A size that was not measured is taken to do as much arithmetic per second as the measured one
    that is nearest to it. The one that is best by that is measured next, until it was, or until
    another measurement would take too long.
    """
    allowed = min(MEASURING * seconds, MEASURING_SECONDS)
    began = clock()
    measured: dict[Size, float] = {}
    size = FIRST if seconds >= SHORT else LADDER[0]
    while True:
        measured[size] = measure(size)
        size = largest(seconds, demands, measured)
        expected = _expected(size, demands, measured)
        takes = (1 + MEASURED_STEPS) * size.batch_size * size.context_length / expected
        if size in measured or clock() - began + takes > allowed:
            return Choice(size, expected, measured)


def largest(seconds: float, demands: Mapping[Size, Demand], measured: Mapping[Size, float]) -> Size:
    """The largest size that sees enough tokens in the time; the smallest if none does."""
    for size in reversed(LADDER):
        tokens = seconds * USABLE * _expected(size, demands, measured)
        if tokens >= TOKENS_PER_PARAMETER * demands[size].matrices:
            return size
    return LADDER[0]


def _expected(size: Size, demands: Mapping[Size, Demand], measured: Mapping[Size, float]) -> float:
    """Tokens per second."""
    place = LADDER.index(size)
    nearest = min(measured, key=lambda each: abs(LADDER.index(each) - place))
    rate = measured[nearest] * demands[nearest].flops_per_token
    return rate / demands[size].flops_per_token


def measure(config: TrainingConfig, placement: Placement, seconds: float) -> float:
    """Tokens per second of real steps on random ids: the median of a few, the first not counted.
    In a budget of so many `seconds`, no more steps than it has time for, one at least."""
    recipe, _ = settle(config)
    model = _model(config)
    generator = torch.Generator().manual_seed(recipe.seed)
    gpt = GPT(model)
    initialise(gpt, recipe, generator)
    gpt.to(placement.device).train()
    optimizers, forward = Optimizers(gpt, recipe), Forward(gpt, placement, dropout=model.dropout)
    shape = (recipe.batch_size, model.context_length + 1)
    end = time.perf_counter() + min(MEASURING * seconds, MEASURING_SECONDS)
    times: list[float] = []
    while len(times) < 1 + MEASURED_STEPS and (len(times) < 2 or time.perf_counter() < end):
        ids = torch.randint(model.vocab_size, shape, generator=generator).to(placement.device)
        began = time.perf_counter()
        loss = forward.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizers.step(1.0)
        if placement.device.type == "cuda":  # there a call only queues the work
            torch.cuda.synchronize(placement.device)
        times.append(time.perf_counter() - began)
    return recipe.batch_size * model.context_length / statistics.median_low(times[1:])


def demand(config: TrainingConfig) -> Demand:
    model = _model(config)
    return Demand(flops_per_token(model), matrix_parameters(model))


def fill_in(config: TrainingConfig, size: Size, tokens: float | None = None) -> TrainingConfig:
    """A configuration with the values of a size, and with evaluations, samples and checkpoints
    spread over a run of so many tokens, where nothing else is given: seven evaluations, each of
    which takes less than a hundredth of the time, and samples and a checkpoint three times."""
    chosen = asdict(size)
    if (config.tokenizer or "own") != "own":
        del chosen["vocab_size"]
    if tokens is not None:
        sequences = (config.batch_size or size.batch_size) * (config.accumulate or 1)
        length = config.context_length or size.context_length
        steps = max(1, round(tokens / (sequences * length)))
        # No divisors of the whole: the end brings an evaluation and a checkpoint of its own.
        chosen["eval_every"] = max(10, round(0.15 * steps))
        chosen["eval_batches"] = max(4, round(0.02 * steps))
        chosen["sample_every"] = chosen["checkpoint_every"] = max(10, round(0.4 * steps))
    return config.model_copy(
        update={name: value for name, value in chosen.items() if name not in given(config)}
    )


def _model(config: TrainingConfig) -> GPTConfig:
    recipe, shape = settle(config)
    vocab_size = recipe.vocab_size
    if recipe.tokenizer != "own":
        vocab_size = READY_MADE.get(recipe.tokenizer) or _lines(Path(recipe.tokenizer))
    return preset(config.preset).config(vocab_size, **shape)


def _lines(ranks: Path) -> int:
    """About as many tokens as a ranks file has; one that cannot be read is refused later, with a
    sentence."""
    return ranks.read_bytes().count(b"\n") + 1 if ranks.is_file() else SMALLEST


def _said(choice: Choice, fitted: TrainingConfig, tokens: float, placement: Placement) -> str:
    speeds = ", ".join(f"{speed:,.0f} tok/s with {size}" for size, speed in choice.measured.items())
    return (
        f"measured {speeds}, {placement.dtype_name}, {placement.threads} threads\n"
        f"in {fitted.minutes:g} minutes that is {tokens / 1e6:.2g} million tokens: {choice.size}, "
        f"context {fitted.context_length}, batches of {fitted.batch_size}"
    )
