"""What a step costs besides its forward pass, and what determinism costs.

    python -m benchmarks.engine_step [--checkpoint DIRECTORY] [--threads N]

Overhead: the time of `Engine.step` less the time inside the model, decoding 1, 8 and 32 sequences
in plain torch (`benchmarks/decode.py` has whole steps of the native decoder too).
Determinism: a decode step whose rows are padded to a multiple of 4, against one whose rows are not,
in turns in one process. Run it on a machine that does nothing else; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import load_checkpoint
from model.device import choose_placement, describe, use_threads
from model.engine.api import EngineConfig, GenerationRequest, SamplingParams
from model.engine.engine import Engine
from model.gpt import GPT
from model.kernels import plain

PROMPT, STEPS, ROUNDS = 64, 60, 5


def engine_decoding(gpt: GPT, sequences: int, temperature: float) -> Engine:
    """An engine whose sequences all have their prompt behind them and decode for long."""
    engine = Engine(gpt, EngineConfig(slots=sequences, prefill_chunk=256))
    generator = torch.Generator().manual_seed(0)
    for index in range(sequences):
        ids = torch.randint(gpt.config.vocab_size, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(max_tokens=4 * STEPS, seed=index, temperature=temperature)
        engine.add(GenerationRequest(request_id=str(index), token_ids=tuple(ids), params=params))
    while engine.step().decoded_sequences < sequences:
        assert engine.has_work(), "sequences ended before all of them decoded"
    return engine


class ForwardClock:
    """Adds up the time spent inside the model's forward."""

    def __init__(self, gpt: GPT) -> None:
        self.seconds = 0.0
        gpt.transform = self._timed(gpt.transform)  # type: ignore[method-assign]
        gpt.logits = self._timed(gpt.logits)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def step_and_forward(
    gpt: GPT, clock: ForwardClock, sequences: int, temperature: float
) -> tuple[float, float]:
    """Median microseconds of a step and of its forward."""
    engine = engine_decoding(gpt, sequences, temperature)
    steps, forwards = [], []
    for _ in range(STEPS):
        clock.seconds, began = 0.0, time.perf_counter()
        engine.step()
        steps.append(1e6 * (time.perf_counter() - began))
        forwards.append(1e6 * clock.seconds)
    return statistics.median(steps), statistics.median(forwards)


def price_of_padding(gpt: GPT, sequences: int) -> float:
    """A step with padded rows over one without, the median of rounds in turns."""
    padded = plain.ROW_GROUP
    ratios = []
    for _ in range(ROUNDS):
        medians = {}
        for group in (padded, 1):
            plain.ROW_GROUP = group
            engine = engine_decoding(gpt, sequences, temperature=0)
            times = []
            for _ in range(STEPS):
                began = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - began)
            medians[group] = statistics.median(times)
        ratios.append(medians[padded] / medians[1])
    plain.ROW_GROUP = padded
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    placement = choose_placement("cpu", "float32", arguments.threads)
    use_threads(placement.threads)
    info, gpt = load_checkpoint(
        arguments.checkpoint, device=placement.device, dtype=placement.dtype
    )
    price = {count: price_of_padding(gpt, count) for count in (1, 2, 3, 5, 8)}
    clock = ForwardClock(gpt)
    rows = [
        (count, name, *step_and_forward(gpt, clock, count, temperature))
        for count in (1, 8, 32)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    ]
    where = f"{describe(placement.device)}, {placement.threads} threads, torch {torch.__version__}"
    print(f"{info.name}, {gpt.parameter_count():,} parameters, float32; {where}\n")
    print("sequences  sampling   step us  forward us  overhead us")
    for count, name, step, forward in rows:
        print(f"{count:9}  {name:8} {step:9.0f} {forward:11.0f} {step - forward:12.0f}")
    print("\nsequences  step with padded rows / without")
    for count, ratio in price.items():
        print(f"{count:9}  {ratio:.2f}")
    overhead = {f"{count} {name}": step - forward for count, name, step, forward in rows}
    print(json.dumps({"overhead_us": overhead, "padding_ratio": price}))


if __name__ == "__main__":
    main()
