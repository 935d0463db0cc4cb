"""Time of each stage of a decode step and of a prompt in the native decoder.

    python -m benchmarks.profile [--checkpoint DIRECTORY] [--dtype bfloat16] [--quantize int8]
                                 [--threads N] [--batches 1 32] [--prompt-tokens N] [--rounds N]

Measures steps of a real engine whose decoder is wrapped. The native decoder reads a clock when all
of its threads have finished a stage (`model/inference/kernels/cpu/native/clocks.h`). The wrapper
measures the whole time of each call to the decoder. Only every other step is watched, so that the
cost of watching is measured as well. Times are means over the watched steps, without the shortest
and the longest quarter. "Overhead" is all time outside the model and the sampling: planning,
converting lists to arrays, collecting the sampling parameters of rows, and creating events. The
last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.arguments import new_parser
from logitd.model.benchmark.rates import BenchmarkError, Workload
from logitd.model.device import use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Decoder, Prefilled, PrefillInput
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.load import load_model
from logitd.model.inference.options import ComputeOptions
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.machine import processor_name
from logitd.model.transformer.gpt import GPT

STAGES = (
    "scheduling", "tensors", "embedding", "norms", "qkv", "attention", "attention_out", "mlp_up",
    "activation", "mlp_down", "head", "processing", "sampling", "events",
)  # fmt: skip
"""Stages in the order in which a step runs them. A residual addition counts as part of the matrix
product before it.

scheduling  checks deadlines and plans the step
tensors     converts lists to the decoder's arrays
processing  collects the sampling parameters of each row
events      converts tokens to events
"""
OUTSIDE = frozenset({"scheduling", "tensors", "processing", "events"})
"""Stages that belong neither to the model nor to the sampling."""
PREFILLS = 5
"""Minimum number of prompts that are watched, and of prompts that are not."""


class Timeline:
    """Seconds of the stages of one step. Marks count only between `begin` and `end`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] | None = None
        self._last = 0.0

    def begin(self) -> None:
        self.seconds, self._last = {}, time.perf_counter()

    def end(self, stage: str) -> dict[str, float]:
        """End the step. Returns the seconds of each stage; the time since the last mark belongs to
        `stage`."""
        self.mark(stage)
        seconds, self.seconds = self.seconds, None
        assert seconds is not None, "a step must begin before it ends"
        return seconds

    def mark(self, stage: str, timed: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Attribute the time since the last mark to `stage`. `timed` returns the seconds of that
        time that belong to other stages, by stage. The time of the call to `timed` itself is not
        attributed to any stage."""
        if self.seconds is None:
            return
        now = time.perf_counter()
        own, self._last = now - self._last, now
        if timed is not None:
            for name, seconds in timed().items():
                if seconds:
                    self._add(name, seconds)
                    own -= seconds
            self._last = time.perf_counter()
        self._add(stage, own)

    def _add(self, stage: str, seconds: float) -> None:
        assert self.seconds is not None
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


class WatchedDecoder:
    """A native decoder that records its calls on a timeline. Its calls run one after another: steps
    do not overlap, and no pass computes prompts together with a decode step."""

    launcher = None
    mixed_pass = None

    def __init__(self, decoder: NativeDecoder, timeline: Timeline) -> None:
        self.has_threads = decoder.has_threads
        self.prefill_matches_decode = decoder.prefill_matches_decode
        self.native = decoder
        self._timeline = timeline

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        self._timeline.mark("scheduling" if not self._timeline.seconds else "tensors")
        return self._timed("tensors", self.native.prefill, pieces)

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        self._timeline.mark("scheduling")
        return self._timed("tensors", self.native.decode, token_ids, slots, positions)

    def head(self, hidden: Tensor) -> Tensor:
        self._timeline.mark("tensors")
        if self.native.torch_head is not None:  # it is not timed natively
            return self._timed("head", self.native.head, hidden)
        return self._timed("tensors", self.native.head, hidden)

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        self._timeline.mark("processing")
        return self._timed("processing", self.native.sample, logits, computed, sampling)

    def restore_weights(self) -> None:
        self.native.restore_weights()

    def close(self) -> None:
        self.native.close()

    def _timed(self, rest: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the decoder. Time that the decoder does not measure belongs to the stage `rest`."""
        result = call(*arguments)
        self._timeline.mark(rest, self.native.take_stage_seconds)
        return result


class Watch:
    """The decoder and the timeline of one engine. Create the engine with this object's
    `make_decoder`."""

    def __init__(self, make_decoder: DecoderMaker) -> None:
        self._make = make_decoder
        self._timeline = Timeline()
        self._decoder: WatchedDecoder | None = None

    def make_decoder(self, gpt: GPT, cache: KVCache) -> Decoder:
        decoder = self._make(gpt, cache)
        if not isinstance(decoder, NativeDecoder) or not decoder.prefill_matches_decode:
            raise BenchmarkError(
                "stages are measured only if the native decoder also computes prompts"
            )
        self._decoder = WatchedDecoder(decoder, self._timeline)
        return self._decoder

    @contextmanager
    def step(self) -> Iterator[dict[str, float]]:
        """Watch the single step that runs in the block. After the block, the yielded dict contains
        the seconds of the step's stages."""
        assert self._decoder is not None, "create the engine before watching it"
        seconds: dict[str, float] = {}
        self._decoder.native.time_stages(True)
        self._timeline.begin()
        try:
            yield seconds
        finally:
            seconds.update(self._timeline.end("events"))
            self._decoder.native.time_stages(False)


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """Seconds of a step, the numbers of its prefilled positions and decoded sequences, and the
    seconds of its stages if it was watched."""

    seconds: float
    prefilled: int
    decoded: int
    stages: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of a decode step of `batch` sequences, or of a prompt, in microseconds. `watching` is
    the cost of watching: 0.01 if watched steps took 1 % longer than the others."""

    case: str
    batch: int
    step_us: float
    overhead_us: float
    remainder_us: float
    watching: float
    steps: int
    stages_us: dict[str, float]


def profile_engine(make_decoder: DecoderMaker, gpt: GPT, workload: Workload) -> list[Profile]:
    """Profile a prompt, then a decode step of each batch size, in one engine. Raises
    BenchmarkError."""
    watch = Watch(make_decoder)
    config = EngineConfig(slots=max(workload.batches), prefill_chunk=workload.prefill_chunk)
    engine = Engine(gpt, config, make_decoder=watch.make_decoder)
    try:
        run_watched(engine, watch, workload.requests(1, "warm-up"))
        prompts = []
        for number in range(2 * max(PREFILLS, workload.rounds)):
            batch = workload.requests(1, f"prefill {number}", tokens=1)
            steps = run_watched(engine, watch, batch, every=1 if number % 2 else None)
            prompts.append(summed(steps))
        profiles = [summarize(prompts, "prefill", 1)]
        for size in workload.batches:
            steps = [
                step
                for number in range(workload.rounds)
                for step in run_watched(engine, watch, workload.requests(size, f"decode {number}"))
                if step.decoded == size and not step.prefilled
            ]
            profiles.append(summarize(steps, "decode", size))
    finally:
        engine.close()
    return profiles


def run_watched(
    engine: Engine,
    watch: Watch,
    batch: Sequence[GenerationRequest],
    every: int | None = 2,
) -> list[WatchedStep]:
    """Run requests until all have ended. Every `every`-th step is watched, or no step if `every` is
    None. Returns all steps."""
    for request in batch:
        engine.add(request)
    steps: list[WatchedStep] = []
    while engine.has_work():
        on = every is not None and len(steps) % every == 0
        with watch.step() if on else nullcontext() as stages:
            began = time.perf_counter()
            result = engine.step()
            seconds = time.perf_counter() - began
        steps.append(
            WatchedStep(seconds, result.prefilled_tokens, result.decoded_sequences, stages)
        )
        for event in result.events:
            if isinstance(event, FinishEvent) and event.reason is not FinishReason.LENGTH:
                raise BenchmarkError(
                    f"a sequence ended early ({event.reason.value}): {event.error}"
                )
    return steps


def summed(steps: Sequence[WatchedStep]) -> WatchedStep:
    """Add up the steps of one prompt. Either all or none of them are watched."""
    stages: dict[str, float] | None = None
    for step in steps:
        for stage, seconds in (step.stages or {}).items():
            stages = stages or {}
            stages[stage] = stages.get(stage, 0.0) + seconds
    prefilled = sum(step.prefilled for step in steps)
    return WatchedStep(sum(step.seconds for step in steps), prefilled, 0, stages)


def middle_half(steps: Sequence[WatchedStep]) -> list[WatchedStep]:
    """The steps without the shortest and the longest quarter. At least one step is kept."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def summarize(steps: Sequence[WatchedStep], case: str, batch: int) -> Profile:
    """Summarize watched and unwatched steps: prompts, or decode steps of one batch size."""
    watched = [step for step in steps if step.stages is not None]
    counted = middle_half(watched)
    whole = statistics.mean(step.seconds for step in counted)
    unwatched = middle_half([step for step in steps if step.stages is None])
    means = {
        stage: 1e6 * statistics.mean((step.stages or {}).get(stage, 0.0) for step in counted)
        for stage in STAGES
    }
    return Profile(
        case=case,
        batch=batch,
        step_us=1e6 * whole,
        overhead_us=sum(means[stage] for stage in OUTSIDE),
        remainder_us=1e6 * whole - sum(means.values()),
        watching=whole / statistics.mean(step.seconds for step in unwatched) - 1,
        steps=len(watched),
        stages_us=means,
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    options = replace(ComputeOptions.of(given), device="cpu", kernels="native")
    loaded = load_model(given.checkpoint, options, log=print)
    use_threads(loaded.placement.threads)
    workload = Workload(
        batches=tuple(given.batches),
        prompt_tokens=given.prompt_tokens,
        tokens=given.tokens,
        rounds=given.rounds,
        vocab_size=loaded.checkpoint.config.vocab_size,
    )
    profiles = profile_engine(loaded.decode_path.make_decoder, loaded.gpt, workload)
    print(f"{processor_name()}, {given.threads} threads, {loaded.checkpoint.name}, "
          f"{loaded.placement.dtype_name}, {loaded.decode_path.name}")  # fmt: skip
    for profile in profiles:
        print(
            f"\n{profile.case} of {profile.batch}: {profile.step_us:,.0f} us, "
            f"{profile.overhead_us:,.0f} of it overhead, watching {profile.watching:+.1%}"
        )
        for stage, microseconds in profile.stages_us.items():
            print(f"  {stage:14} {microseconds:9,.0f}  {microseconds / profile.step_us:4.0%}")
    print(json.dumps({"profiles": [asdict(profile) for profile in profiles]}))


if __name__ == "__main__":
    main()
