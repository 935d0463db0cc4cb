"""Profile: where the time of a decode step and of a prefill goes, stage by stage.

Steps of a real engine, as in `in_process.py`. Every other step is watched (`timeline.py`), those
between are not: so what the watching costs is known too. Times are means over the middle half of
the watched steps, by their length: the stages add up as those of one step do, and a step that a
neighbour held up is not among them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from logitd.model.benchmark.in_process import MeasuringError, requests
from logitd.model.benchmark.stages import (
    OUTSIDE,
    STAGES,
    Stage,
    decode_stage_works,
    prefill_stage_works,
)
from logitd.model.benchmark.timeline import Watch
from logitd.model.benchmark.work import Work
from logitd.model.benchmark.workload import WARM_UP, Workload, decode_case, prefill_case
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.options import KVCacheDType, Quantization
from logitd.model.transformer.gpt import GPT

PREFILLS = 5
"""Prompts that are watched, at least, and as many that are not: each is measured once."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """`stages` is None of a step that was not watched. A step of a prompt has `prefilled`
    positions; one that `decoded` sequences had `live_positions` to attend over."""

    seconds: float
    prefilled: int
    decoded: int
    live_positions: int
    stages: dict[Stage, float] | None


@dataclass(frozen=True, slots=True)
class StageTime:
    """`work` None where what is done has no limit that is known."""

    stage: Stage
    seconds: float
    work: Work | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One case: a decode step of `batch` sequences, or a prompt of `prompt_tokens`.

    seconds     measured around the whole
    stages      those that took time, in their order
    remainder   seconds in none of them
    overhead    seconds of the stages that are neither the model nor the sampling
    watching    how much longer the watched took than the others, as a share
    steps       watched, of which the middle half counts
    """

    batch: int
    prompt_tokens: int | None
    seconds: float
    stages: tuple[StageTime, ...]
    remainder: float
    overhead: float
    watching: float
    steps: int


class ProfileError(ValueError):
    """What cannot be profiled, and why."""


def profile_engine(
    gpt: GPT,
    make_decoder: DecoderMaker,
    workload: Workload,
    *,
    quantize: Quantization = "none",
    kv_cache_dtype: KVCacheDType = "auto",
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Profile, ...]:
    """A prompt, then a decode step of each batch size, through one engine. Raises ProfileError and
    MeasuringError."""
    device = gpt.token_embedding.weight.device
    if device.type != "cpu":
        raise ProfileError(
            f"the model is on {device}, where a call returns before its work is done: stages are "
            "told apart on a CPU only"
        )
    watch = Watch(gpt, make_decoder)
    config = EngineConfig(
        slots=workload.largest,
        prefill_chunk=workload.prefill_chunk,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = Engine(gpt, config, make_decoder=watch.make_decoder)
    try:
        run_watched(engine, watch, requests(workload, 1, WARM_UP))
        log("profile: prefill")
        profiles = [_prefill(engine, watch, workload, gpt)]
        for batch in workload.batches:
            log(f"profile: decode, {batch} at once")
            works = partial(_decode_works, gpt, batch=batch, quantize=quantize, kept=kv_cache_dtype)
            profiles.append(_decode(engine, watch, workload, batch, works))
    finally:
        engine.close()
    return tuple(profiles)


def run_watched(
    engine: Engine,
    watch: Watch,
    batch: Sequence[GenerationRequest],
    watched: Callable[[int], bool] = lambda number: number % 2 == 0,
    *,
    prefill: bool = False,
) -> list[WatchedStep]:
    """Run requests to their end; every step, those watched whose number is. Stages of a prefill
    are told apart if `prefill`."""
    for request in batch:
        engine.add(request)
    live = sum(len(request.token_ids) for request in batch)
    steps: list[WatchedStep] = []
    while engine.has_work():
        on = watched(len(steps))
        with watch.step(prefill=prefill) if on else nullcontext() as stages:
            began = time.perf_counter()
            result = engine.step()
            seconds = time.perf_counter() - began
        steps.append(
            WatchedStep(seconds, result.prefilled_tokens, result.decoded_sequences, live, stages)
        )
        for event in result.events:
            if isinstance(event, TokenEvent):
                live += 1
            elif isinstance(event, FinishEvent) and event.reason is not FinishReason.LENGTH:
                raise MeasuringError(f"a sequence ended by {event.reason.value}: {event.error}")
    return steps


def middle_half(steps: Sequence[WatchedStep]) -> list[WatchedStep]:
    """Those that are neither among the shortest nor among the longest quarter; one at least."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def summed(steps: Iterable[WatchedStep]) -> WatchedStep:
    """Steps of one prompt as one, all watched or none."""
    steps = list(steps)
    stages: dict[Stage, float] | None = None
    for step in steps:
        if step.stages is not None:
            stages = stages or {}
            for stage, seconds in step.stages.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
    return WatchedStep(
        seconds=sum(step.seconds for step in steps),
        prefilled=sum(step.prefilled for step in steps),
        decoded=0,
        live_positions=steps[-1].live_positions,
        stages=stages,
    )


def _all(number: int) -> bool:
    return True


def _none(number: int) -> bool:
    return False


def _prefill(engine: Engine, watch: Watch, workload: Workload, gpt: GPT) -> Profile:
    prompts = []
    for number in range(2 * max(PREFILLS, workload.rounds)):
        batch = requests(workload, 1, prefill_case(1, number), tokens=1)
        steps = run_watched(engine, watch, batch, _all if number % 2 else _none, prefill=True)
        prompts.append(summed(steps))
    works = prefill_stage_works(gpt, length=workload.prompt_tokens)
    return summarise(prompts, lambda live: works, batch=1, prompt_tokens=workload.prompt_tokens)


def _decode_works(
    gpt: GPT, live: float, *, batch: int, quantize: Quantization, kept: KVCacheDType
) -> dict[Stage, Work]:
    return decode_stage_works(gpt, batch=batch, live_positions=live, quantize=quantize, kept=kept)


def _decode(
    engine: Engine,
    watch: Watch,
    workload: Workload,
    batch: int,
    works: Callable[[float], dict[Stage, Work]],
) -> Profile:
    steps = [
        step
        for number in range(workload.rounds)
        for step in run_watched(
            engine, watch, requests(workload, batch, decode_case(batch, number))
        )
        if step.decoded == batch and not step.prefilled
    ]
    return summarise(steps, works, batch=batch, prompt_tokens=None)


def summarise(
    steps: Sequence[WatchedStep],
    works: Callable[[float], dict[Stage, Work]],
    *,
    batch: int,
    prompt_tokens: int | None,
) -> Profile:
    """The profile of steps of one kind; `works` says from the mean of live positions what each
    stage has to do."""
    watched = [step for step in steps if step.stages is not None]
    counted = middle_half(watched)
    whole = statistics.mean(step.seconds for step in counted)
    work = works(statistics.mean(step.live_positions for step in counted))
    stages = []
    for stage in STAGES:
        seconds = statistics.mean((step.stages or {}).get(stage, 0.0) for step in counted)
        if seconds:
            stages.append(StageTime(stage, seconds, work.get(stage)))
    unwatched = middle_half([step for step in steps if step.stages is None])
    return Profile(
        batch=batch,
        prompt_tokens=prompt_tokens,
        seconds=whole,
        stages=tuple(stages),
        remainder=whole - sum(stage.seconds for stage in stages),
        overhead=sum(stage.seconds for stage in stages if stage.stage in OUTSIDE),
        watching=whole / statistics.mean(step.seconds for step in unwatched) - 1,
        steps=len(watched),
    )
