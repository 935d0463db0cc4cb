"""Gain from computing several short prompts together in one step.

    python -m benchmarks.short_prompts [--shape CHECKPOINT|124m|30m] [--threads N] [--dtype NAME]
                                       [--quantize int8|int4] [--lengths N ...] [--rounds N]

Prompts of random ids, one for each slot, arrive at the same time, and each asks for one token.
Measures positions per second in two cases: the prompts of a step go through the model together, as
in the engine, or each goes through the model by itself. The two cases are measured alternately in
one process; the ratio is the median of the rounds' ratios. The time is the processor time of all
threads of this process. So with one thread, other work on the machine hardly affects it. With
several threads, other work does, because the threads spin while they wait for one another. Both
cases must generate the same tokens. The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.arguments import new_parser
from benchmarks.synthetic import load_gpt
from logitd.model.device import describe, use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Decoder, Prefilled, PrefillInput
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import ComputeOptions
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT

LENGTHS = (8, 16, 32, 64, 256)
PROMPTS = 32


@dataclass(frozen=True)
class Row:
    """Positions per second of processor time: prompts computed together, prompts computed one by
    one, and the ratio of the two."""

    length: int
    together: float
    apart: float
    ratio: float


def one_by_one(make_decoder: DecoderMaker) -> DecoderMaker:
    """Make decoders that compute each prompt in a separate pass."""

    def make(gpt: GPT, cache: KVCache) -> Decoder:
        decoder = make_decoder(gpt, cache)
        prefill = decoder.prefill

        def apart(pieces: Sequence[PrefillInput]) -> list[Prefilled]:
            return [prefilled for piece in pieces for prefilled in prefill([piece])]

        decoder.prefill = apart  # type: ignore[method-assign]
        return decoder

    return make


def first_tokens(engine: Engine, prompts: list[list[int]], name: str) -> tuple[float, list[int]]:
    """Seconds to compute all prompts, and the token generated after each prompt."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, seed=index)
        engine.add(
            GenerationRequest(
                request_id=f"{name} {index}",
                token_ids=tuple(prompt),
                params=params,
                prefix_reuse=False,
            )
        )
    tokens: dict[str, int] = {}
    began = time.process_time()
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, TokenEvent):
                tokens[event.request_id] = event.token_id
    return time.process_time() - began, [tokens[f"{name} {i}"] for i in range(len(prompts))]


def measure(together: Engine, apart: Engine, vocabulary: int, length: int, rounds: int) -> Row:
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(vocabulary, (PROMPTS, length), generator=generator).tolist()
    rates: list[tuple[float, float]] = []
    for index in range(rounds + 1):  # the first round allocates memory
        seconds, tokens = first_tokens(together, prompts, f"together {length} {index}")
        seconds_apart, tokens_apart = first_tokens(apart, prompts, f"apart {length} {index}")
        assert tokens == tokens_apart
        rates.append((PROMPTS * length / seconds, PROMPTS * length / seconds_apart))
    together_rate, apart_rate = (statistics.median(rate) for rate in zip(*rates[1:], strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in rates[1:])
    return Row(length, round(together_rate, 1), round(apart_rate, 1), round(ratio, 3))


def main() -> None:
    parser = new_parser(__doc__, "benchmarks.short_prompts")
    parser.add_argument("--shape", default="30m", metavar="CHECKPOINT|124m|30m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    use_threads(options.threads)
    gpt = load_gpt(options.shape, getattr(torch, options.dtype))
    path = choose_decode_path(
        gpt, ComputeOptions(quantize=options.quantize), threads=options.threads
    )
    print(f"{describe(torch.device('cpu'))}; {path.name}")
    config = EngineConfig(slots=PROMPTS)
    together = Engine(gpt, config, make_decoder=path.make_decoder)
    apart = Engine(gpt, config, make_decoder=one_by_one(path.make_decoder))
    rows = []
    print("length  together  apart  ratio")
    for length in options.lengths:
        row = measure(together, apart, gpt.config.vocab_size, length, options.rounds)
        rows.append(asdict(row))
        print(f"{row.length:6}  {row.together:8,.0f}  {row.apart:5,.0f}  {row.ratio:.2f}")
    print(json.dumps({"path": path.name, "rows": rows}))


if __name__ == "__main__":
    main()
