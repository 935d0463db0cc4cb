"""Measure: times real training steps on random ids, to find the speed of this machine.

With `--minutes`, `model/training/configuration/autosize.py` chooses the model's size from this
speed.
"""

import time
from collections.abc import Sequence

import torch

from logitd.model.data.prepare import published_vocabulary
from logitd.model.device import Placement, use_threads
from logitd.model.training.configuration.autosize import (
    MEASURED_STEPS,
    MEASURING,
    MEASURING_SECONDS,
    SIZES,
    Choice,
    resolve_size,
    search,
)
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.optim.optimizers import Optimizers, initialize
from logitd.model.training.step.flops import flops_per_token
from logitd.model.training.step.forward import Forward
from logitd.model.transformer.gpt import GPT

MOST_MEASURED_STEPS = 40
LONG_ENOUGH, LONGEST = 0.25, 0.4
"""Shares of the allowed time after which a measurement ends: LONG_ENOUGH if its two fastest steps
agree, LONGEST otherwise. If a measurement were shorter, other programs might use the processors
from its start to its end, and the chosen model would be too small."""
AGREEMENT = 1.05
"""Two step times agree if their ratio is at most this."""


def measure_machine(training: ResolvedTraining, placement: Placement, seconds: float) -> Choice:
    """Measure how fast this machine trains models of several sizes, and choose the size for the
    `seconds` that are left of the configured minutes."""
    use_threads(placement.threads)
    tokenizer = training.recipe.tokenizer
    published = None if tokenizer == "own" else published_vocabulary(tokenizer).vocab_size
    candidates = {size: resolve_size(training.config, size, published) for size in SIZES}
    return search(seconds, candidates, lambda sized: measure(sized, placement, seconds))


def measure(candidate: ResolvedTraining, placement: Placement, seconds: float) -> float:
    """Time several real steps on random ids. Returns the tokens per second of the fastest step,
    which other programs disturbed least, if windows have their average length. The first step is
    not timed. Measuring ends when it has used its share of `seconds`, but at least one step is
    timed."""
    recipe, model = candidate.recipe, candidate.model
    generator = torch.Generator().manual_seed(recipe.seed)
    gpt = GPT(model)
    initialize(gpt, recipe, generator)
    gpt.to(placement.device).train()
    optimizers, forward = Optimizers(gpt, recipe), Forward(gpt, placement, dropout=model.dropout)
    shape = (recipe.batch_size, model.context_length + 1)
    begun, allowed = time.perf_counter(), min(MEASURING * seconds, MEASURING_SECONDS)
    times: list[float] = []
    while _takes_another(times[1:], (time.perf_counter() - begun) / allowed):
        ids = torch.randint(model.vocab_size, shape, generator=generator).to(placement.device)
        began = time.perf_counter()
        loss = forward.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizers.step(1.0)
        if placement.device.type == "cuda":  # a call only queues the work on CUDA
            torch.cuda.synchronize(placement.device)
        times.append(time.perf_counter() - began)
    shorter = flops_per_token(model) / candidate.operations_per_token
    return shorter * recipe.batch_size * model.context_length / min(times[1:])


def _takes_another(times: Sequence[float], spent: float) -> bool:
    """True if another step should be measured. `times` are the times in seconds of the timed steps
    so far; `spent` is the used share of the allowed time."""
    if len(times) < MEASURED_STEPS:
        return not times or spent < 1
    if len(times) >= MOST_MEASURED_STEPS or spent >= LONGEST:
        return False
    fastest, second = sorted(times)[:2]
    return spent < LONG_ENOUGH or second > AGREEMENT * fastest
