"""Serving: decode and prefill by the engine, by `transformers`, and over HTTP; and where the time
of a decode step goes."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.plan import Finding, Plan, median_seconds, wait
from benchmarks.started_server import started_server
from benchmarks.synthetic import save_synthetic, synthetic_gpt
from logitd.model.benchmark.rates import Rate, measure_engine
from logitd.model.device import DeviceError
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.cuda.capture import DirectCalls
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.memory import SlotBudget, slots_for
from logitd.model.inference.options import SlotDefault
from logitd.model.memory import available
from logitd.model.transformer.gpt import GPT
from logitd.service.cli.commands.bench import measure_server

VARIANTS: dict[str, DecoderMaker] = {
    "graphs": GraphDecoder,
    "no overlap": partial(GraphDecoder, overlap=False),
    "one by one": partial(GraphDecoder, capture=DirectCalls()),
    "batch-invariant": partial(GraphDecoder, batch_invariant=True),
    "torch": PlainDecoder,
}
WATCHED = 8
"""Decode steps of which a mean is taken."""
TIMED = 3
"""Times that as many are timed."""
LONGEST = 10
"""Kernels that are named."""
LARGEST_PLAIN = 64
"""Plain torch starts a kernel per layer and sequence: larger batches would take minutes."""


def engine(plan: Plan) -> Iterator[Finding]:
    """Decode and prefill by the engine, for each shape, variant and batch."""
    for name, shape in plan.shapes.items():
        gpt = plan.gpt(shape)
        for variant, make in VARIANTS.items():
            for batch in plan.batches:
                case = f"{name} {variant}, {batch} at once"
                if variant == "torch" and batch > LARGEST_PLAIN:
                    continue
                if (reason := _too_large(plan, gpt, batch)) is not None:
                    yield Finding("decode", case, f"left out: {reason}", {})
                    continue
                yield from _engine_case(plan, gpt, make, case, batch)
        del gpt


def _engine_case(
    plan: Plan, gpt: GPT, make: DecoderMaker, case: str, batch: int
) -> Iterator[Finding]:
    prefill, decode = measure_engine(gpt, make, plan.workload(batch), plan.machine)
    for rate in decode:
        yield _timed("decode", case, batch, rate)
    for rate in prefill:
        yield _timed(
            "prefill", f"{case}, {rate.batch} prompts", rate.batch * plan.prompt_tokens, rate
        )


def kernels(plan: Plan) -> Iterator[Finding]:
    """A decode step of the first shape as the device sees it: how much of its time a kernel runs,
    how many run, and which take longest. The rest is what starting them costs, and the host."""
    name, shape = next(iter(plan.shapes.items()))
    gpt = plan.gpt(shape)
    for variant in ("graphs", "no overlap", "one by one"):
        for batch in plan.profiled:
            seconds, watched = _watched_steps(plan, gpt, VARIANTS[variant], batch)
            busy = sum(kernel.microseconds for kernel in watched) / 1e6
            longest = sorted(watched, key=lambda kernel: kernel.microseconds, reverse=True)[
                :LONGEST
            ]
            said = ", ".join(
                f"{kernel.key[:40]} {kernel.microseconds / 1e6 / busy:.0%}"
                for kernel in longest[:3]
            )
            count = sum(kernel.count for kernel in watched)
            yield Finding(
                "kernels",
                f"{name} {variant}, {batch} at once",
                f"{1e3 * seconds:.3f} ms a step, {1e3 * busy:.3f} ms of kernels, {count:.0f} of "
                f"them; longest: {said}",
                {
                    "step_ms": 1e3 * seconds,
                    "busy_ms": 1e3 * busy,
                    "kernels": count,
                    "longest": [asdict(kernel) for kernel in longest],
                },
            )


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel took of a step: on a CPU, an operation."""

    key: str
    count: float
    microseconds: float


def _watched_steps(
    plan: Plan, gpt: GPT, make: DecoderMaker, batch: int
) -> tuple[float, list[Kernel]]:
    """Seconds of a decode step among others that nobody watches, and the kernels of one."""
    device, workload = plan.placement.device, plan.workload(batch)
    tokens = (TIMED + 2) * WATCHED + WATCHED + 2  # those that warm up, are timed and are watched
    workload = replace(workload, tokens=workload.tokens + tokens)
    config = EngineConfig(slots=batch, prefill_chunk=workload.prefill_chunk)
    engine = Engine(gpt, config, make_decoder=make)
    try:
        for request in workload.requests(batch, "kernels"):
            engine.add(request)
        while sum(isinstance(event, TokenEvent) for event in engine.step().events) < batch:
            continue

        def several() -> None:
            for _ in range(WATCHED):  # behind one another: what is waited for is the last
                engine.step()

        seconds = median_seconds(several, device, rounds=TIMED) / WATCHED
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            several()
            wait(device)
    finally:
        engine.close()
    return seconds, [
        Kernel(
            average.key,
            average.count / WATCHED,
            (
                average.self_device_time_total
                if device.type == "cuda"
                else average.self_cpu_time_total
            )
            / WATCHED,
        )
        for average in profiler.key_averages()
        if average.device_type.name == device.type.upper()
    ]


def transformers(plan: Plan) -> Iterator[Finding]:
    """GPT-2 by `transformers`, greedy, its static cache compiled; the time of a step is the whole
    call's over its tokens, the prefill in it."""
    from transformers import GPT2Config, GPT2LMHeadModel  # an optional extra

    device, tokens = plan.placement.device, 6 if plan.tiny else 128
    for name, shape in plan.shapes.items():
        config = plan.config(shape)
        theirs: Any = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.context_length,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.d_model,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        theirs = theirs.to(plan.placement.dtype).to(device).eval()
        for batch in plan.batches:
            ids = torch.randint(config.vocab_size, (batch, plan.prompt_tokens), device=device)

            def generate(theirs: Any = theirs, ids: torch.Tensor = ids) -> None:
                with torch.inference_mode():
                    theirs.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=False,
                        min_new_tokens=tokens,
                        max_new_tokens=tokens,
                        pad_token_id=0,
                        cache_implementation="static",
                    )

            seconds = median_seconds(generate, device, rounds=3) / tokens
            yield Finding(
                "transformers",
                f"{name}, {batch} at once",
                f"{1e3 * seconds:.3f} ms a step, {batch / seconds:,.0f} tokens/s",
                {"step_ms": 1e3 * seconds, "tokens_per_second": batch / seconds},
            )
        del theirs


def http(plan: Plan) -> Iterator[Finding]:
    """The first shape behind a server: tokens per second of streams, and the share that this is
    of the engine's own rate."""
    name, shape = next(iter(plan.shapes.items()))
    config = replace(plan.config(shape), context_length=1024)
    gpt = synthetic_gpt(config).to(plan.placement.dtype).to(plan.placement.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save_synthetic(path, config)
        flags = ("--checkpoint", str(path), "--device", str(plan.placement.device), "--dtype",
                 plan.placement.dtype_name, "--slots", str(plan.batches[-1]),
                 "--target-gap", "none")  # fmt: skip
        with started_server(*flags) as server:
            for batch in plan.batches[1:]:
                # Tokens come several to a chunk, and a rate needs chunks of all streams.
                workload = replace(plan.workload(batch), tokens=512)
                _, (decode,) = measure_engine(gpt, GraphDecoder, workload, plan.machine)
                alone = decode.tokens_per_second
                (streams,) = asyncio.run(measure_server(server.url, workload))
                rate = streams["tokens_per_second"]
                yield Finding(
                    "http",
                    f"{name}, {batch} streams",
                    f"{rate:,.0f} tokens/s, {rate / alone:.0%} of the engine's",
                    {"tokens_per_second": rate, "engine": alone},
                )


def _too_large(plan: Plan, gpt: GPT, batch: int) -> str | None:
    """Why so many slots do not fit beside the weights."""
    if plan.placement.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of the variant before is not free to the driver
    try:
        slots_for(
            SlotBudget(slots=batch),
            gpt.config,
            plan.placement.dtype.itemsize,
            available(plan.placement.device),
            default=SlotDefault(batch),
            gpu=plan.placement.device.type == "cuda",
        )
    except DeviceError as error:
        return str(error)
    return None


def _timed(part: str, case: str, tokens: int, rate: Rate) -> Finding:
    milliseconds = 1e3 * tokens / rate.tokens_per_second
    return Finding(
        part,
        case,
        f"{milliseconds:.3f} ms, {rate.tokens_per_second:,.0f} tokens/s, "
        f"{rate.share_of_limit:.0%} of what {rate.limited_by} allows",
        {
            "ms": milliseconds,
            "tokens_per_second": rate.tokens_per_second,
            "share_of_limit": rate.share_of_limit,
            "limit": rate.limited_by,
        },
    )
