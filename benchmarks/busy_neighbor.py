"""Cost of a process that spins on one of the cores.

    python -m benchmarks.busy_neighbor [--shape 124m|30m|CHECKPOINT] [--threads N]

Measures three mean times in bfloat16: the time of a step of 1 sequence, of a step of 8 sequences,
and of a prompt computed alone. Each is measured first without and then with a neighbor, which is a
process that never sleeps. Each measurement takes SECONDS, after a warm-up of the same length. The
neighbor takes half of one core out of N. A step that loses only this share takes N / (N - 1/2)
times as long; if every operation waits for all threads, or runs only on the free cores, it takes
N / (N - 1) times as long. The last line is JSON.
"""

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

from benchmarks.arguments import new_parser
from benchmarks.synthetic import load_gpt
from logitd.model.device import keep_freed_memory, use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT

PROMPT, TOKENS, SECONDS = 256, 120, 2.0


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a step of `batch` sequences, and of a prompt, each with and without a busy
    neighbor."""

    batch: int
    step: float
    step_beside: float
    prompt: float
    prompt_beside: float


@contextmanager
def neighbor() -> Iterator[None]:
    """Run a process that spins on the last core that this process may use."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(spinning.pid, {max(os.sched_getaffinity(0))})
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


class Load:
    """An engine that computes random prompts."""

    def __init__(self, gpt: GPT, batch: int, threads: int) -> None:
        path = choose_decode_path(gpt, threads=threads)
        self.engine = Engine(gpt, EngineConfig(slots=batch), make_decoder=path.make_decoder)
        self.batch = batch
        self._vocab_size = gpt.config.vocab_size
        self._generator = torch.Generator().manual_seed(0)
        self._asked = 0

    def ask(self, max_tokens: int) -> None:
        ids = torch.randint(self._vocab_size, (PROMPT,), generator=self._generator).tolist()
        params = SamplingParams(max_tokens=max_tokens, seed=self._asked)
        self.engine.add(
            GenerationRequest(request_id=str(self._asked), token_ids=tuple(ids), params=params)
        )
        self._asked += 1

    def prompts(self, seconds: float) -> float:
        """Mean seconds per prompt, measured for `seconds` seconds."""
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.ask(max_tokens=1)
            while self.engine.has_work():
                self.engine.step()
            count += 1
        return (time.perf_counter() - began) / count

    def steps(self, seconds: float) -> float:
        """Mean seconds per step in which all sequences decode, measured until such steps add up to
        `seconds`."""
        taken: list[float] = []
        while sum(taken) < seconds:
            for _ in range(self.batch):
                self.ask(max_tokens=TOKENS + self.batch)
            while self.engine.has_work():
                began = time.perf_counter()
                result = self.engine.step()
                if result.decoded_sequences == self.batch and not result.prefilled_tokens:
                    taken.append(time.perf_counter() - began)
        return statistics.mean(taken)

    def measure(self) -> tuple[float, float]:
        """Mean seconds of a step, and of a prompt, after the warm-up."""
        self.prompts(SECONDS)
        prompt = self.prompts(SECONDS)
        self.steps(SECONDS)
        return self.steps(SECONDS), prompt


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", default="checkpoints/python-small")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    keep_freed_memory()
    gpt = load_gpt(arguments.shape, torch.bfloat16)
    costs = []
    for batch in (1, 8):
        load_of = Load(gpt, batch, arguments.threads)
        step, prompt = load_of.measure()
        with neighbor():
            beside = load_of.measure()
        load_of.engine.close()
        costs.append(Cost(batch, step, beside[0], prompt, beside[1]))
        print(
            f"{batch} sequences: a step {1000.0 * step:.2f} ms, {beside[0] / step:.2f} times that "
            f"next to a neighbor; a prompt {1000.0 * prompt:.1f} ms, {beside[1] / prompt:.2f} "
            "times"
        )
    print(json.dumps({"shape": arguments.shape, "costs": [asdict(cost) for cost in costs]}))


if __name__ == "__main__":
    main()
