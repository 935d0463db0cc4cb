"""Time that an engine step takes outside its forward pass, when it decodes in plain torch.

    python -m benchmarks.engine_step [--checkpoint DIRECTORY] [--threads N]

Overhead is the time of `Engine.step` minus the time inside the model, for 1, 8 and 32 sequences
that decode in plain torch. `benchmarks.profile` measures the parts of a native step. Run it on an
idle machine. The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import new_parser
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.device import choose_placement, describe, use_threads
from logitd.model.inference.constraints.protocol import TokenConstraint
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT

PROMPT, STEPS = 64, 60


def engine_decoding(
    gpt: GPT,
    sequences: int,
    temperature: float = 1.0,
    make_decoder: DecoderMaker = PlainDecoder,
    constraint: TokenConstraint | None = None,
) -> Engine:
    """An engine whose prompts are computed and whose sequences will decode for a long time."""
    config = EngineConfig(slots=sequences, prefill_chunk=256)
    engine = Engine(gpt, config, make_decoder=make_decoder)
    generator = torch.Generator().manual_seed(0)
    for index in range(sequences):
        ids = torch.randint(gpt.config.vocab_size, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=4 * STEPS, seed=index, temperature=temperature, constraint=constraint
        )
        engine.add(GenerationRequest(request_id=str(index), token_ids=tuple(ids), params=params))
    while engine.step().decoded_sequences < sequences:
        assert engine.has_work(), "sequences ended before all of them decoded"
    return engine


class ForwardClock:
    """Adds up the time of the model's forward passes."""

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
    """Median microseconds of a step and of its forward pass."""
    engine = engine_decoding(gpt, sequences, temperature)
    steps, forwards = [], []
    for _ in range(STEPS):
        clock.seconds, began = 0.0, time.perf_counter()
        engine.step()
        steps.append(1e6 * (time.perf_counter() - began))
        forwards.append(1e6 * clock.seconds)
    return statistics.median(steps), statistics.median(forwards)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    arguments = parser.parse_args()
    placement = choose_placement("cpu", "float32", arguments.threads)
    use_threads(placement.threads)
    info, gpt = load_checkpoint(
        arguments.checkpoint, device=placement.device, dtype=placement.dtype
    )
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
    overhead = {f"{count} {name}": step - forward for count, name, step, forward in rows}
    print(json.dumps({"overhead_us": overhead}))


if __name__ == "__main__":
    main()
