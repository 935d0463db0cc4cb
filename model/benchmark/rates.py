"""Rates: the speed of prefill and of decoding in this process, measured with random prompts.

Whole steps of a real engine are timed, including scheduling and sampling. The rate of decoding is
measured over the steps in which the whole batch decodes, from the end of the last prefill until the
first sequence ends.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from logitd.model.benchmark.work import Work, decode_work, limit, prefill_work
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker, Network
from logitd.model.inference.options import KVCacheDType, Quantization
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.machine import Machine
from logitd.model.transformer.gpt import GPT

FEWEST_STEPS = 8
"""A decoding rate is computed only from at least this many steps of the whole batch."""
SEVERAL_PROMPTS = 8
"""Number of prompts in the larger of the two measured prefills; the other has a single prompt."""


class BenchmarkError(ValueError):
    """Raised if the workload cannot be measured, or if the engine failed on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The cases to measure. Each sequence generates `tokens` tokens, and each case is repeated
    `rounds` times."""

    batches: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    rounds: int
    vocab_size: int
    prefill_chunk: int = EngineConfig().prefill_chunk

    def prompts(self, count: int, case: str) -> list[tuple[int, ...]]:
        """Random prompts, drawn with the name of the case as the seed."""
        drawn, ids = random.Random(case), range(self.vocab_size)
        return [tuple(drawn.choices(ids, k=self.prompt_tokens)) for _ in range(count)]

    def requests(self, count: int, case: str, tokens: int | None = None) -> list[GenerationRequest]:
        """The requests of a case. Each generates `tokens` tokens (None: the workload's number)."""
        return [
            GenerationRequest(
                request_id=f"{case} {index}",
                token_ids=prompt,
                params=SamplingParams(max_tokens=tokens or self.tokens, seed=index),
                prefix_reuse=False,
            )
            for index, prompt in enumerate(self.prompts(count, case))
        ]


@dataclass(frozen=True, slots=True)
class Rate:
    """The throughput of a batch in tokens per second (median of the rounds), and that rate as a
    fraction of the machine's limit. The fraction is None if the model runs its owner's code,
    because the amount of work in that code is unknown."""

    batch: int
    tokens_per_second: float
    share_of_limit: float | None
    limited_by: str | None

    @classmethod
    def of(cls, batch: int, rate: float, work: Work | None, tokens: int, machine: Machine) -> Self:
        """Compare a rate with the machine's limit. `work` is the work needed to process `tokens`
        tokens; None if it is unknown."""
        if work is None:
            return cls(batch, rate, None, None)
        seconds, limited_by = limit(work, machine)
        return cls(batch, rate, seconds * rate / tokens, limited_by)


def measure_engine(
    network: Network,
    make_decoder: DecoderMaker,
    workload: Workload,
    machine: Machine,
    *,
    quantize: Quantization = "none",
    kv_cache_dtype: KVCacheDType = "auto",
) -> tuple[list[Rate], list[Rate]]:
    """Measure the rates of prefill and of decoding, in an engine with as many slots as the largest
    batch. Raises BenchmarkError."""
    largest, rounds = max(workload.batches), range(workload.rounds)
    config = EngineConfig(
        slots=largest, prefill_chunk=workload.prefill_chunk, kv_cache_dtype=kv_cache_dtype
    )
    engine = Engine(network, config, make_decoder=make_decoder)
    gpt = network if isinstance(network, GPT) else None
    prefill, decode = [], []
    try:
        full_steps(engine, workload.requests(1, "warm-up"))
        for prompts in sorted({1, min(SEVERAL_PROMPTS, largest)}):
            times = []
            for number in rounds:
                batch = workload.requests(prompts, f"prefill {number}", tokens=1)
                began = time.perf_counter()
                full_steps(engine, batch)
                times.append(time.perf_counter() - began)
            tokens = prompts * workload.prompt_tokens
            work = None
            if gpt is not None:
                work = prefill_work(gpt, prompts=prompts, length=workload.prompt_tokens)
            rate = tokens / statistics.median(times)
            prefill.append(Rate.of(prompts, rate, work, tokens, machine))
        for size in workload.batches:
            runs = [full_steps(engine, workload.requests(size, f"decode {n}")) for n in rounds]
            if (fewest := min(map(len, runs))) < FEWEST_STEPS:
                raise BenchmarkError(
                    f"all {size} sequences decoded together in only {fewest} steps; at least "
                    f"{FEWEST_STEPS} are needed: raise --tokens, which is {workload.tokens}, "
                    "or lower --batches"
                )
            live = statistics.mean(positions for run in runs for *_, positions in run)
            if gpt is not None:
                work = decode_work(
                    gpt, batch=size, live_positions=live, quantize=quantize, kept=kv_cache_dtype
                )
            rate = statistics.median(
                sum(tokens for _, tokens, _ in run) / sum(seconds for seconds, *_ in run)
                for run in runs
            )
            decode.append(Rate.of(size, rate, work, size, machine))
    finally:
        engine.close()
    return prefill, decode


def full_steps(engine: Engine, batch: Sequence[GenerationRequest]) -> list[tuple[float, int, int]]:
    """Run requests until all have ended. For each step in which all of them decoded, returns the
    step's duration in seconds, the number of tokens that it generated, and the number of positions
    that it attended to. Raises BenchmarkError."""
    for request in batch:
        engine.add(request)
    live = sum(len(request.token_ids) for request in batch)
    steps = []
    while engine.has_work():
        began = time.perf_counter()
        result = engine.step()
        seconds = time.perf_counter() - began
        if result.decoded_sequences == len(batch):
            tokens = sum(isinstance(event, TokenEvent) for event in result.events)
            steps.append((seconds, tokens, live))
        for event in result.events:
            if isinstance(event, TokenEvent):
                live += 1
            elif isinstance(event, FinishEvent) and event.reason is not FinishReason.LENGTH:
                raise BenchmarkError(f"a sequence ended with {event.reason.value}: {event.error}")
    return steps
