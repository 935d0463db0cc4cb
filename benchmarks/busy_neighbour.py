"""What a process that spins on one of the cores costs.

    python -m benchmarks.busy_neighbour [--shape 124m|30m|CHECKPOINT] [--threads N]

The mean step of 1 and 8 sequences, and the time of their prompts, without and then with a neighbour
that never sleeps, in one process and in bfloat16. On N cores one of which is taken by half, a step
that loses its share and no more takes N / (N - 1/2) times as long. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from benchmarks.decode import load
from model.device import available_processors, keep_freed_memory, use_threads
from model.engine.api import EngineConfig, GenerationRequest, SamplingParams
from model.engine.engine import Engine
from model.gpt import GPT
from model.kernels.choose import choose_decode_path

PROMPT, STEPS = 256, 120


@dataclass(frozen=True)
class Cost:
    """Seconds of a mean step of `batch` sequences, and of a prompt: alone, and beside another."""

    batch: int
    step: float
    step_beside: float
    prompt: float
    prompt_beside: float


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that spins on the last of this process's cores."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(spinning.pid, {max(os.sched_getaffinity(0))})
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def measure(gpt: GPT, batch: int, threads: int) -> tuple[float, float]:
    """Seconds of a mean step, and of a prompt."""
    path = choose_decode_path(gpt, threads=threads)
    engine = Engine(gpt, EngineConfig(slots=batch), make_decoder=path.make_decoder)
    generator = torch.Generator().manual_seed(0)
    for index in range(batch):
        ids = torch.randint(gpt.config.vocab_size, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(max_tokens=STEPS + batch + 1, seed=index)
        engine.add(GenerationRequest(request_id=str(index), token_ids=tuple(ids), params=params))
    began = time.perf_counter()
    while engine.step().decoded_sequences < batch:
        assert engine.has_work(), "sequences ended before all of them decoded"
    prompts = time.perf_counter() - began
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.close()
    return statistics.mean(seconds), prompts / batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="checkpoints/python-small")
    parser.add_argument("--threads", type=int, default=available_processors())
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    keep_freed_memory()
    gpt = load(arguments.shape, torch.bfloat16)
    costs = []
    for batch in (1, 8):
        measure(gpt, batch, arguments.threads)  # warm up
        step, prompt = measure(gpt, batch, arguments.threads)
        with neighbour():
            beside = measure(gpt, batch, arguments.threads)
        costs.append(Cost(batch, step, beside[0], prompt, beside[1]))
        print(
            f"{batch} sequences: a step {1e3 * step:.2f} ms, {beside[0] / step:.2f} times that "
            f"beside a neighbour; a prompt {1e3 * prompt:.1f} ms, {beside[1] / prompt:.2f} times"
        )
    print(json.dumps({"shape": arguments.shape, "costs": [asdict(cost) for cost in costs]}))


if __name__ == "__main__":
    main()
