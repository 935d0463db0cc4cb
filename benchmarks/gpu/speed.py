"""Measures the limits of a device, and the speed of decode steps, of `logitd serve` with clients in
a closed loop, and of `logitd train`.
"""

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
import torch
from uvicorn.loops.auto import auto_loop_factory

from benchmarks.closed_loop import Load, Question, Target, measure
from benchmarks.gpu.part import Finding, Setting
from benchmarks.gpu.truth import tested
from benchmarks.shapes import SHAPES
from benchmarks.started_server import started_server
from benchmarks.synthetic import config_of, save_synthetic, synthetic_gpt
from logitd.model.checkpoint.checkpoint import RANKS
from logitd.model.device import choose_placement, disable_cudnn_attention
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import SamplingRow, sampling_rows
from logitd.model.machine import measure_machine, surroundings
from logitd.model.transformer.gpt import GPT

ROOT = Path(__file__).parents[2]
STEPS = ((1, 300), (8, 300), (32, 300), (128, 300), (256, 300), (256, 500), (256, 900))
"""Decode steps to measure, as pairs: the number of rows, and the position that all of them have."""
ROUNDS, REPLAYS = 3, 50
CLIENTS = (1, 8, 32, 128)
TINY_MODEL = ("--n-layer=1", "--n-head=2", "--d-model=32", "--context-length=64", "--batch-size=2",
              "--accumulate=1", "--eval-batches=1", "--compile=off", "--threads=1")  # fmt: skip
SET_UP_SECONDS = 60.0
"""Seconds that a training run takes in addition to its training time: for reading the text, for
compiling, and for the last checkpoint."""
GRACE_SECONDS = 20.0
"""Seconds for a training run to end after the signal to stop."""


def machine(setting: Setting) -> Iterator[Finding]:
    """The highest rates at which the device reads memory and multiplies matrices."""
    placement = choose_placement(setting.device, "bfloat16")
    sizes = {"nbytes": 2**24, "width": 256} if setting.tiny else {}
    found = measure_machine(placement, **sizes)
    figures = {"GB/s": found.read_bandwidth / 1e9, "TFLOP/s": found.matrix_rate / 1e12}
    yield Finding("limits", {**figures, **asdict(surroundings(placement))})


def steps(setting: Setting) -> Iterator[Finding]:
    """Measure the time of a decode step with greedy sampling on the device, and the rate of an
    engine that runs such steps. `limit` is the rate at which the step reads memory, divided by the
    device's best rate."""
    placement = choose_placement(setting.device, "bfloat16")
    sizes = {"nbytes": 2**24, "width": 256} if setting.tiny else {}
    memory_rate = measure_machine(placement, **sizes).read_bandwidth
    disable_cudnn_attention()
    shape = SHAPES["small" if setting.tiny else "124m"]
    gpt = synthetic_gpt(config_of(shape)).to(placement.dtype).to(placement.device)
    weights = sum(weight.nbytes for weight in gpt.parameters())
    for rows, position in ((1, 20), (2, 20)) if setting.tiny else STEPS:
        for invariant in (False, True):
            make = partial(tested, batch_invariant=invariant)
            seconds = step_seconds(make, gpt, rows, position)
            cache = KVCache(gpt.config, 1, device=placement.device, dtype=placement.dtype)
            read = weights + rows * (position + 1) * cache.nbytes / cache.slot_length
            figures = {"us": 1e6 * seconds, "tokens/s": rows / seconds}
            figures |= {"limit": read / memory_rate / seconds}
            figures |= {"engine tokens/s": engine_rate(make, gpt, rows)}
            case = f"{rows} rows, {position} keys" + ", batch-invariant" * invariant
            yield Finding(case, figures)


@torch.inference_mode()
def step_seconds(make: DecoderMaker, gpt: GPT, rows: int, position: int) -> float:
    """Seconds of a step on the device, averaged over steps launched back to back, so that the host
    does not delay them."""
    weight = gpt.token_embedding.weight
    decoder = make(gpt, KVCache(gpt.config, rows, device=weight.device, dtype=weight.dtype))
    given, together = ([5] * rows, list(range(rows)), [position] * rows), 1

    def step() -> None:
        decoder.decode(*given)

    if isinstance(decoder, GraphDecoder):
        together = decoder.most_steps(rows)
        greedy = [SamplingRow(0.0, 0, 1.0, 0.0, 0, position + 1, 0)] * rows * together
        decoder.launch(*given, sampling_rows(greedy))()
        (step,) = decoder._recorded.values()  # without uploads and downloads
    spent = []
    for _ in range(ROUNDS):
        synchronize(weight.device)
        began = time.perf_counter()
        for _ in range(REPLAYS):
            step()
        synchronize(weight.device)
        spent.append((time.perf_counter() - began) / REPLAYS / together)
    decoder.close()
    return statistics.median(spent)


def engine_rate(make: DecoderMaker, gpt: GPT, rows: int) -> float:
    """Tokens per second of an engine that decodes this many sequences."""
    engine = Engine(gpt, EngineConfig(slots=rows), make_decoder=make)
    length = min(400, gpt.config.context_length - 32)
    params = SamplingParams(max_tokens=length, temperature=0.0, seed=0)
    for number in range(rows):
        engine.add(
            GenerationRequest(request_id=str(number), token_ids=tuple(range(20)), params=params)
        )
    while engine.step().decoded_sequences < rows:  # compute the prompts
        pass
    began, count = time.perf_counter(), 0
    while engine.has_work():
        count += len(engine.step().events)
    seconds = time.perf_counter() - began
    engine.close()
    return count / seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def served(setting: Setting) -> Iterator[Finding]:
    """Measure a server with random weights, under load from clients that send a request after each
    reply."""
    name, prompt, tokens = ("small", 16, 16) if setting.tiny else ("124m", 256, 128)
    seconds, warm_up = (1.0, 0.5) if setting.tiny else (10.0, 5.0)
    question = Question(
        prompt_tokens=prompt, tokens=tokens, shared=0.0, seconds=seconds, warm_up=warm_up
    )
    with tempfile.TemporaryDirectory(prefix="logitd-gpu-") as folder:
        path = Path(folder) / name
        save_synthetic(path, config_of(SHAPES[name]))
        flags = ["--checkpoint", str(path), "--device", setting.device, "--dtype", "bfloat16"]
        flags += ["--slots", str(max(CLIENTS)), *(["--threads", "1"] if setting.tiny else [])]
        with started_server(*flags) as server:
            info = httpx.get(f"{server.url}/info", trust_env=False).json()
            how = {key: info[key] for key in ("device", "decoding", "decoding_note", "slots")}
            yield Finding(name, how, info["decoding_note"] is None)
            for clients in CLIENTS:
                asked = measure(
                    [Target(name, server.url)], [Load(clients=clients)], question,
                    vocab_size=256, rounds=1,
                )  # fmt: skip
                with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                    (figures,) = runner.run(asked)
                times = {
                    f"{name} {percentile} ms": 1e3 * seconds
                    for name, spread in (("TTFT", figures.first_token), ("gap", figures.gap))
                    for percentile, seconds in (asdict(spread) if spread else {}).items()
                }
                counts = {"requests": figures.requests, "failed requests": figures.failed}
                rate = {"tokens/s": figures.tokens_per_second, "client CPU": figures.client_cpu}
                yield Finding(
                    f"{name}, {clients} clients", {**rate, **times, **counts}, not figures.failed
                )


def trained(setting: Setting) -> Iterator[Finding]:
    """Run `logitd train --preset gpt2-124m` with a made-up vocabulary of GPT-2's size, which needs
    no download. Rates are measured in the second half of the run, in which nothing is compiled."""
    with tempfile.TemporaryDirectory(prefix="logitd-gpu-") as folder:
        model, run = Path(folder) / "model", Path(folder) / "run"
        save_synthetic(model, config_of(SHAPES["small" if setting.tiny else "124m"]))
        command = [sys.executable, "-m", "logitd", "train", "--preset", "gpt2-124m", "--out",
                   str(run), "--tokenizer", str(model / RANKS), "--device", setting.device,
                   "--minutes", str(setting.train_seconds / 60), "--log-every", "1",
                   "--sample-tokens", "1", *(TINY_MODEL if setting.tiny else ())]  # fmt: skip
        said = Path(folder) / "train.log"
        with said.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            try:
                process.wait(setting.train_seconds + SET_UP_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # the steps so far count
                process.wait(GRACE_SECONDS)
            finally:
                process.kill()
        log = run / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        steps = [record for line in lines if (record := json.loads(line))["kind"] == "train"]
        if not steps:
            raise RuntimeError(f"the trainer completed no step: {said.read_text(errors='replace')}")
        second_half = steps[len(steps) // 2 :]
        rates = {
            name: statistics.median(record[key] for record in second_half)
            for name, key in (("tokens/s", "tokens_per_second"), ("mfu", "matrix_share"))
        }
        ends = {"steps": steps[-1]["step"], "in s": steps[-1]["seconds"]}
        losses = {"first loss": steps[0]["loss"], "last loss": steps[-1]["loss"]}
        yield Finding("preset gpt2-124m", {**rates, **ends, **losses})
