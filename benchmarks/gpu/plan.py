"""Plan: the shapes and sizes that are measured, what a measurement finds, and how time is taken."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.synthetic import synthetic_gpt
from logitd.model.benchmark.rates import Workload
from logitd.model.device import Placement
from logitd.model.machine import Machine
from logitd.model.transformer.config import BLOCK, GPTConfig, gpt2_shape
from logitd.model.transformer.gpt import GPT

SHAPES = {
    "124m": {"n_layer": 12, "n_head": 12, "d_model": 768},
    "1.5b": {"n_layer": 48, "n_head": 25, "d_model": 1600},
}
TINY_SHAPES = {"tiny": {"n_layer": 2, "n_head": 2, "d_model": 32}}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `figures` are for the JSON line; `holds` is None for a measurement."""

    part: str
    case: str
    said: str
    figures: dict[str, Any]
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, on what, beside which limits."""

    placement: Placement
    machine: Machine
    tiny: bool

    @property
    def shapes(self) -> dict[str, dict[str, int]]:
        return TINY_SHAPES if self.tiny else SHAPES

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.tiny else (1, 8, 64, 256)

    @property
    def profiled(self) -> tuple[int, ...]:
        """Batches of which it is looked up where the time goes."""
        return (1, 2) if self.tiny else (1, 64)

    @property
    def prompt_tokens(self) -> int:
        return 32 if self.tiny else 256

    def config(self, shape: dict[str, int]) -> GPTConfig:
        context, vocabulary = (128, 300) if self.tiny else (1024, 50_257)
        return gpt2_shape(vocab_size=vocabulary, context_length=context, **shape)

    def gpt(self, shape: dict[str, int]) -> GPT:
        return synthetic_gpt(self.config(shape)).to(self.placement.dtype).to(self.placement.device)

    def workload(self, batch: int) -> Workload:
        chunk, steps = (64, 8) if self.tiny else (2048, 48)
        return Workload(
            batches=(batch,),
            prompt_tokens=self.prompt_tokens,
            tokens=tokens_for(steps, batch, self.prompt_tokens, chunk),
            rounds=1 if self.tiny else 3,
            vocab_size=300 if self.tiny else 50_257,
            prefill_chunk=chunk,
        )


def tokens_for(steps: int, batch: int, prompt_tokens: int, prefill_chunk: int) -> int:
    """Tokens of each sequence so that a whole batch decodes in `steps` steps: one comes with the
    prefill, and the first sequence is ahead by the steps between the ends of the prefills."""
    blocks, per_step = -(-prompt_tokens // BLOCK), prefill_chunk // BLOCK
    return 1 + -(-batch * blocks // per_step) - -(-blocks // per_step) + steps


def median_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a call, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
