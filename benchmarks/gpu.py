"""What a GPU gives: first whether it computes what is promised, then how fast, in one table.

    python -m benchmarks.gpu [--device cuda] [--parts logits,engine,...] [--tiny]

The checks are those of `benchmarks/gpu_truth.py`. Then whole steps of the engine, sampling
included, with GPT-2's shapes and random weights in bfloat16: decode with steps that are recorded,
called one by one, batch-invariant, and in plain torch; prefill; `transformers` generating with a
compiled static cache; streams over HTTP, the engine in a thread and in a process of its own; steps
of training; and a model trained from text to checkpoint, for eight minutes at most. Rates are
shares of what the same card reads and multiplies at best, measured before them; the head of the
table has the better of that and of a second measurement at the end.

A part that fails loses its own results alone: it is named at the end, and the exit code is 1. The
last line is JSON. `--device cpu --tiny` runs all of it that needs no GPU, to see that it runs; its
times mean nothing. Nothing here has been run on a GPU yet.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_place import compare, served_twice
from benchmarks.gpu_truth import CHECKS, FULL, SMALL, Finding
from benchmarks.synthetic import save_synthetic, synthetic_gpt
from model.benchmark.in_process import measure_engine
from model.benchmark.machine import Machine, best_of, measure_machine, surroundings
from model.benchmark.work import Work, limit
from model.benchmark.workload import Workload, tokens_for
from model.checkpoint import read_checkpoint
from model.config import GPTConfig, gpt2_shape
from model.device import DeviceError, Placement, choose_placement, use_threads
from model.engine.runner import DecoderMaker
from model.gpt import GPT
from model.kernels.capture import DirectCalls
from model.kernels.graphs import GraphDecoder
from model.kernels.plain import PlainDecoder
from model.memory import SlotWish, available, slots_for
from model.presets import Compile, Optimizer, Recipe, preset
from model.training.compiling import choose_loss
from model.training.flops import flops_per_token
from model.training.forward import Forward, training_placement
from model.training.recipe import Optimizers

SHAPES = {
    "124m": {"n_layer": 12, "n_head": 12, "d_model": 768},
    "1.5b": {"n_layer": 48, "n_head": 25, "d_model": 1600},
}
TINY_SHAPES = {"tiny": {"n_layer": 2, "n_head": 2, "d_model": 32}}
VARIANTS: dict[str, DecoderMaker] = {
    "graphs": GraphDecoder,
    "one by one": partial(GraphDecoder, capture=DirectCalls()),
    "batch-invariant": partial(GraphDecoder, batch_invariant=True),
    "torch": PlainDecoder,
}
LARGEST_PLAIN = 64
"""Plain torch starts a kernel per layer and sequence: larger batches would take minutes."""


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
    def prompt_tokens(self) -> int:
        return 32 if self.tiny else 256

    def config(self, shape: dict[str, int]) -> GPTConfig:
        context, vocabulary = (128, 300) if self.tiny else (1024, 50_257)
        return gpt2_shape(vocab_size=vocabulary, context_length=context, **shape)

    def gpt(self, shape: dict[str, int]) -> GPT:
        return synthetic_gpt(self.config(shape)).to(self.placement.dtype).to(self.placement.device)

    def workload(self, batch: int) -> Workload:
        chunk, steps = (64, 6) if self.tiny else (2048, 48)
        return Workload(
            batches=(batch,),
            prompt_tokens=self.prompt_tokens,
            tokens=tokens_for(
                steps, batch=batch, prompt_tokens=self.prompt_tokens, prefill_chunk=chunk
            ),
            rounds=1 if self.tiny else 3,
            vocab_size=300 if self.tiny else 50_257,
            prefill_chunk=chunk,
        )


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
    figures = measure_engine(gpt, make, plan.workload(batch))
    for decode in figures.decode:
        yield _timed(plan, "decode", case, batch, decode.step.p50, decode.work)
    for prefill in figures.prefill:
        tokens = prefill.prompts * plan.prompt_tokens
        seconds = tokens / prefill.tokens_per_second
        beside = f"{case}, {prefill.prompts} prompts"
        yield _timed(plan, "prefill", beside, tokens, seconds, prefill.work)


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

            seconds = _median_seconds(generate, device, rounds=3) / tokens
            yield Finding(
                "transformers",
                f"{name}, {batch} at once",
                f"{1e3 * seconds:.3f} ms a step, {batch / seconds:,.0f} tokens/s",
                {"step_ms": 1e3 * seconds, "tokens_per_second": batch / seconds},
            )
        del theirs


def http(plan: Plan) -> Iterator[Finding]:
    """The first shape as servers, the engine in a thread and in a process, in turns: tokens per
    second of streams, and the share that this is of the engine's own rate."""
    name, shape = next(iter(plan.shapes.items()))
    config = replace(plan.config(shape), context_length=1024)
    gpt = synthetic_gpt(config).to(plan.placement.dtype).to(plan.placement.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save_synthetic(path, config)
        flags = ("--checkpoint", str(path), "--device", str(plan.placement.device), "--dtype",
                 plan.placement.dtype_name, "--slots", str(plan.batches[-1]))  # fmt: skip
        with served_twice(*flags) as urls:
            for batch in plan.batches[1:]:
                # Tokens come several to a chunk, and a rate needs chunks of all streams.
                workload = replace(plan.workload(batch), tokens=512)
                (decode,) = measure_engine(gpt, GraphDecoder, workload).decode
                alone = batch / decode.step.p50
                found = compare(urls, workload, rounds=1 if plan.tiny else 3)
                yield Finding(
                    "http",
                    f"{name}, {batch} streams",
                    f"thread {found['thread']:,.0f} tokens/s, {found['thread'] / alone:.0%} of the "
                    f"engine's; process {found['process']:,.0f}, {found['process'] / alone:.0%}",
                    {**found, "engine": alone},
                )


def training(plan: Plan) -> Iterator[Finding]:
    """Whole steps of the trainer on random ids: GPT-2 124M at a context of 1,024 with AdamW, eager
    and compiled, and with Muon; and what of the matrix rate that is."""
    shape = next(iter(plan.shapes.values()))
    config, recipe = plan.config(shape), preset("gpt2-124m").recipe
    placement = training_placement(str(plan.placement.device), "auto", 0)
    ways: tuple[tuple[str, Optimizer, Compile], ...]
    ways = (("eager", "adamw", "off"), ("compiled", "adamw", "on"), ("compiled", "muon", "on"))
    for batch in (2,) if plan.tiny else (8, 32):
        for said, optimizer, compiled in ways:
            case = f"{batch} windows of {config.context_length}, {said}, {optimizer}"
            step = _training_step(
                config, replace(recipe, optimizer=optimizer), placement, batch, compiled
            )
            seconds = _median_seconds(step, placement.device, rounds=3 if plan.tiny else 10)
            tokens = batch * config.context_length
            rate = flops_per_token(config) * tokens / seconds
            share = rate / plan.machine.matrix_rate
            yield Finding(
                "training",
                case,
                f"{placement.dtype_name}: {1e3 * seconds:.1f} ms a step, "
                f"{tokens / seconds:,.0f} tokens/s, {rate / 1e12:.2f} TFLOP/s, "
                f"{share:.0%} of the matrix rate",
                {"step_ms": 1e3 * seconds, "tokens_per_second": tokens / seconds, "mfu": share},
            )


def _training_step(
    config: GPTConfig, recipe: Recipe, placement: Placement, batch: int, compiled: Compile
) -> Callable[[], None]:
    gpt = GPT(config).to(placement.device).train()
    optimizers = Optimizers(gpt, recipe)
    loss_of = choose_loss(Forward(gpt, placement, dropout=0.0), placement, compiled, _refuse_eager)
    shape = (batch, config.context_length + 1)
    ids = torch.randint(config.vocab_size, shape, device=placement.device)

    def step() -> None:
        loss_of(ids[:, :-1], ids[:, 1:]).backward()
        optimizers.step(1.0)

    return step


def _refuse_eager(notice: str) -> None:
    if notice.startswith("not compiled"):
        raise RuntimeError(notice)


def trained(plan: Plan) -> Iterator[Finding]:
    """`logitd train` as a person starts it: the preset `small` on the text that Python carries, for
    at most eight minutes and until validation stops improving; its loss, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        name = "tiny" if plan.tiny else "small"
        steps = 2 if plan.tiny else preset(name).recipe.steps  # or the minutes, if they end first
        command = [sys.executable, "-m", "service.cli", "train", "--preset", name]
        command += ["--steps", str(steps), "--minutes", "8", "--patience", "3"]
        if plan.tiny:
            command += ["--eval-batches", "1", "--sample-tokens", "4"]
        command += ["--device", str(plan.placement.device), "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the trainer ended with {done.returncode}: {done.stderr[-2000:]}")
        best = read_checkpoint(run / "best").training
        samples = (run / "samples.txt").read_text(encoding="utf-8")
        last = [json.loads(each) for each in (run / "metrics.jsonl").read_text().splitlines()][-1]
        yield Finding(
            "trained",
            f"preset {name}, best at step {best.step:,}",
            f"{best.val_bits_per_byte:.4f} bits per byte; stopped at step {last['step']:,} after "
            f"{last['seconds'] / 60:.1f} minutes",
            {"bits_per_byte": best.val_bits_per_byte, "val_loss": best.val_loss, "last": last,
             "samples": samples[-4000:]},
        )  # fmt: skip


def _too_large(plan: Plan, gpt: GPT, batch: int) -> str | None:
    """Why so many slots do not fit beside the weights."""
    try:
        slots_for(
            SlotWish(slots=batch),
            gpt.config,
            plan.placement.dtype.itemsize,
            available(plan.placement.device),
            default=batch,
            gpu=plan.placement.device.type == "cuda",
        )
    except DeviceError as error:
        return str(error)
    return None


def _timed(plan: Plan, part: str, case: str, tokens: int, seconds: float, work: Work) -> Finding:
    least = limit(work, plan.machine)
    return Finding(
        part,
        case,
        f"{1e3 * seconds:.3f} ms, {tokens / seconds:,.0f} tokens/s, "
        f"{least.seconds / seconds:.0%} of what {least.by} allows",
        {
            "ms": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "share_of_limit": least.seconds / seconds,
            "limit": least.by,
        },
    )


def _median_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a call, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes read and written per second by a copy within the device."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _median_seconds(lambda: target.copy_(source), device, rounds=5)


def guarded(name: str, part: Callable[[], Iterator[Finding]]) -> tuple[list[Finding], str | None]:
    """What a part found before it ended or failed, and how it failed."""
    found: list[Finding] = []
    print(f"gpu: {name}", file=sys.stderr, flush=True)
    try:
        for finding in part():
            found.append(finding)
            print(line(finding), file=sys.stderr, flush=True)
    except Exception as error:  # whatever it is, the other parts are still wanted
        traceback.print_exc()
        return found, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found, None


def line(finding: Finding) -> str:
    mark = {None: " ", True: "ok", False: "NO"}[finding.holds]
    return f"{mark:2} {finding.part:12} {finding.case:44} {finding.said}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    speeds = (engine, transformers, http, training, trained)
    names = [part.__name__ for part in (*CHECKS, *speeds)]
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(names), help="with commas between them")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0 is all")
    parser.add_argument("--tiny", action="store_true", help="shapes that any machine runs")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        placement = choose_placement(arguments.device, "bfloat16", arguments.threads)
    except DeviceError as error:
        parser.error(str(error))
    use_threads(placement.threads)
    before = measure_machine(placement)
    copied = copy_bandwidth(placement.device, 2**24 if arguments.tiny else 2**30)
    plan = Plan(placement, before, arguments.tiny)
    size = SMALL if arguments.tiny else FULL
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        **{check.__name__: partial(check, placement.device, size) for check in CHECKS},
        **{speed.__name__: partial(speed, plan) for speed in speeds},
    }
    findings: list[Finding] = []
    failures: dict[str, str] = {}
    for name in names:
        if name in chosen:
            found, failure = guarded(name, parts[name])
            findings += found
            if failure is not None:
                failures[name] = failure
    after, failure_after = before, None
    try:
        after = measure_machine(placement)
    except Exception as error:  # a device that is lost does not take the results with it
        failure_after = f"{type(error).__name__}: {error}"
        failures["machine"] = failure_after
    best = best_of(before, after)
    here = surroundings(placement)
    print(
        f"{here.device}, torch {here.torch}: reads {best.read_bandwidth / 1e9:,.0f} GB/s, copies "
        f"{copied / 1e9:,.0f} GB/s, multiplies {best.matrix_rate / 1e12:,.2f} TFLOP/s in "
        f"{here.dtype}"
    )
    for finding in findings:
        print(line(finding))
    for name, reason in failures.items():
        print(f"FAILED {name}: {reason}")
    wrong = [finding for finding in findings if finding.holds is False]
    print(
        json.dumps(
            {
                "surroundings": asdict(here),
                "machine": asdict(best),
                "copy_bandwidth": copied,
                "tiny": arguments.tiny,
                "findings": [asdict(finding) for finding in findings],
                "failures": failures,
            }
        )
    )
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
