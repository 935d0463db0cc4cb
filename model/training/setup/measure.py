"""Measure: how fast this machine trains, by real steps on random ids.

Chooses a size for `--minutes` by that (`model/training/configuration/autosize.py`).
"""

import statistics
import time

import torch

from logitd.model.data.published_vocabulary import published_vocabulary
from logitd.model.device import Placement, use_threads
from logitd.model.training.configuration.autosize import (
    MEASURED_STEPS,
    MEASURING,
    MEASURING_SECONDS,
    SIZES,
    USABLE,
    Measured,
    fill_in,
    search,
)
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import ResolvedTraining, resolve
from logitd.model.training.optim.optimizers import Optimizers, initialise
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.transformer.gpt import GPT

MOST_MEASURED_STEPS = 9
"""Steps of a measurement if there is time. With 3, a moment in which another process had the cores
made up to half of them, and decided the size of the whole run."""
PUBLISHED = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}
"""Tokens of published encodings."""


def measure_machine(config: TrainingConfig) -> Measured:
    """Choose the size for the minutes of a configuration, by measurements."""
    assert config.minutes is not None
    placement = training_placement(config.device, config.dtype or "auto", config.threads)
    use_threads(placement.threads)
    seconds, tokenizer = config.minutes * 60, config.tokenizer or "own"
    published = None
    if tokenizer != "own":
        published = PUBLISHED.get(tokenizer) or published_vocabulary(tokenizer).vocab_size
    candidates = {}
    for size in SIZES:
        candidate = resolve(fill_in(config, size))
        candidates[size] = candidate.with_vocabulary(published or candidate.recipe.vocab_size)
    choice = search(
        seconds,
        {size: candidate.model for size, candidate in candidates.items()},
        lambda size: measure(candidates[size], placement, seconds),
    )
    tokens = seconds * USABLE * choice.tokens_per_second
    computed = f"{placement.dtype_name}, {placement.threads} threads"
    return Measured(choice, tokens, published, computed)


def measure(candidate: ResolvedTraining, placement: Placement, seconds: float) -> float:
    """Tokens per second of real steps on random ids: the median of MOST_MEASURED_STEPS at most,
    the first not counted. Takes no more steps than a run of `seconds` has time for, but at least
    one."""
    recipe, model = candidate.recipe, candidate.model
    generator = torch.Generator().manual_seed(recipe.seed)
    gpt = GPT(model)
    initialise(gpt, recipe, generator)
    gpt.to(placement.device).train()
    optimizers, forward = Optimizers(gpt, recipe), Forward(gpt, placement, dropout=model.dropout)
    shape = (recipe.batch_size, model.context_length + 1)
    begun, allowed = time.perf_counter(), min(MEASURING * seconds, MEASURING_SECONDS)
    times: list[float] = []
    while _takes_another(len(times), (time.perf_counter() - begun) / allowed):
        ids = torch.randint(model.vocab_size, shape, generator=generator).to(placement.device)
        began = time.perf_counter()
        loss = forward.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizers.step(1.0)
        if placement.device.type == "cuda":  # there a call only queues the work
            torch.cuda.synchronize(placement.device)
        times.append(time.perf_counter() - began)
    return recipe.batch_size * model.context_length / statistics.median_low(times[1:])


def _takes_another(steps: int, spent: float) -> bool:
    """Whether to measure another step after `steps` and a share of the time. A quarter of it goes
    into steps beyond the fewest, so that larger sizes are measured as well."""
    if steps < 2:
        return True
    if steps < 1 + MEASURED_STEPS:
        return spent < 1
    return steps < 1 + MOST_MEASURED_STEPS and spent < 0.25
