"""In process: how fast the engine prefills and decodes, without a server.

Whole steps of a real engine are timed, scheduling and sampling included; tokens are drawn at
temperature 1. Each figure comes with the work that it did at least (`model/benchmark/work.py`), so
that it can be held against what the machine allows.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from logitd.model.benchmark.spread import Spread
from logitd.model.benchmark.work import ModelSize, Work, decode_work, prefill_work, size_of
from logitd.model.benchmark.workload import WARM_UP, Workload, decode_case, prefill_case
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.options import KVCacheDType, Quantization
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT


class MeasuringError(Exception):
    """The engine failed on what was to be measured."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that decoded the whole batch. `live_positions` are those that its sequences attended
    over, all together."""

    seconds: float
    live_positions: int


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """`work` is that of all prompts."""

    prompts: int
    tokens_per_second: float
    work: Work


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """`work` is that of a mean step, `steps` how many were timed in all rounds together."""

    batch: int
    tokens_per_second: float
    step: Spread
    steps: int
    work: Work


@dataclass(frozen=True, slots=True)
class EngineFigures:
    prefill: tuple[PrefillFigures, ...]
    decode: tuple[DecodeFigures, ...]


def measure_engine(
    gpt: GPT,
    make_decoder: DecoderMaker,
    workload: Workload,
    *,
    quantize: Quantization = "none",
    kv_cache_dtype: KVCacheDType = "auto",
    log: Callable[[str], None] = lambda line: None,
) -> EngineFigures:
    """All cases of a workload through one engine, which has slots for its largest batch.
    `quantize`: what its decoder makes of the weights. Raises MeasuringError."""
    size = size_of(gpt, kv_cache_dtype)
    config = EngineConfig(
        slots=workload.largest,
        prefill_chunk=workload.prefill_chunk,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = Engine(gpt, config, make_decoder=make_decoder)
    try:
        full_steps(engine, requests(workload, 1, WARM_UP))
        prefill = []
        for prompts in workload.prefill_counts:
            log(f"engine: prefill, {prompts} at once")
            prefill.append(_prefill(engine, workload, prompts, size))
        decode = []
        for batch in workload.batches:
            log(f"engine: decode, {batch} at once")
            decode.append(_decode(engine, workload, batch, size, quantize))
    finally:
        engine.close()
    return EngineFigures(tuple(prefill), tuple(decode))


def requests(
    workload: Workload, count: int, case: str, tokens: int | None = None
) -> list[GenerationRequest]:
    """Requests of one case; all of them generate `tokens` (those of the workload, if not given),
    because nothing stops them earlier."""
    return [
        GenerationRequest(
            request_id=f"{case} {index}",
            token_ids=prompt,
            params=SamplingParams(max_tokens=tokens or workload.tokens, seed=index),
            prefix_reuse=False,
        )
        for index, prompt in enumerate(workload.prompts(count, case))
    ]


def full_steps(engine: Engine, batch: Sequence[GenerationRequest]) -> list[TimedStep]:
    """Run requests to their end; the steps in which all of them decoded."""
    for request in batch:
        engine.add(request)
    live = sum(len(request.token_ids) for request in batch)
    steps = []
    while engine.has_work():
        began = time.perf_counter()
        result = engine.step()
        seconds = time.perf_counter() - began
        if result.decoded_sequences == len(batch):
            steps.append(TimedStep(seconds, live))
        for event in result.events:
            if isinstance(event, TokenEvent):
                live += 1
            elif isinstance(event, FinishEvent) and event.reason is not FinishReason.LENGTH:
                raise MeasuringError(f"a sequence ended by {event.reason.value}: {event.error}")
    return steps


def _prefill(engine: Engine, workload: Workload, prompts: int, size: ModelSize) -> PrefillFigures:
    times = []
    for number in range(workload.rounds):
        batch = requests(workload, prompts, prefill_case(prompts, number), tokens=1)
        began = time.perf_counter()
        full_steps(engine, batch)
        times.append(time.perf_counter() - began)
    return PrefillFigures(
        prompts=prompts,
        tokens_per_second=prompts * workload.prompt_tokens / statistics.median(times),
        work=prefill_work(size, prompts=prompts, length=workload.prompt_tokens),
    )


def _decode(
    engine: Engine, workload: Workload, batch: int, size: ModelSize, quantize: Quantization
) -> DecodeFigures:
    rounds = [
        full_steps(engine, requests(workload, batch, decode_case(batch, number)))
        for number in range(workload.rounds)
    ]
    steps = [step for steps_of_round in rounds for step in steps_of_round]
    spread = Spread.of(step.seconds for step in steps)
    assert spread is not None, "choose_workload leaves steps to be timed"
    return DecodeFigures(
        batch=batch,
        tokens_per_second=statistics.median(
            batch * len(steps_of_round) / sum(step.seconds for step in steps_of_round)
            for steps_of_round in rounds
        ),
        step=spread,
        steps=len(steps),
        work=decode_work(
            size,
            batch=batch,
            live_positions=statistics.mean(step.live_positions for step in steps),
            quantize=quantize,
        ),
    )
