"""Cost of sampling: microseconds per row of logits for each filter, native and in plain torch.

    python -m benchmarks.sampling [--vocab-size 50257] [--rows 32] [--spread 1 3] [--threads N]

The logits are normally distributed; --spread is their standard deviation. The native sampler
and the one in torch draw a token for each row, and must draw the same tokens. The time is the
wall-clock time of all rows together in the best of several rounds. The last line is JSON.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.arguments import new_parser
from benchmarks.shapes import Shape
from benchmarks.synthetic import config_of, synthetic_gpt
from logitd.model.device import use_threads
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.cpu.library import load_library
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, sample_tokens, sampling_rows
from logitd.model.machine import processor_name

ROUNDS = 15
PLAIN = SamplingRow(1.0, 0, 1.0, 0.0, seed=0, position=0, index=0)
WAYS = {
    "temperature 1": PLAIN,
    "temperature 0.7": replace(PLAIN, temperature=0.7),
    "top_k 50": replace(PLAIN, top_k=50),
    "top_p 0.9": replace(PLAIN, top_p=0.9),
    "top_k 50, top_p 0.9": replace(PLAIN, top_k=50, top_p=0.9),
    "min_p 0.05": replace(PLAIN, min_p=0.05),
    "greedy": replace(PLAIN, temperature=0.0),
}
"""The filters that are measured."""


@dataclass(frozen=True)
class Row:
    """Microseconds per row of logits, native and in torch."""

    spread: float
    way: str
    native: float
    torch: float


def best_seconds(work: Callable[[], object], rounds: int) -> float:
    """The shortest time that `work` takes in `rounds` runs."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(decoder: NativeDecoder, logits: Tensor, spread: float, rounds: int) -> list[Row]:
    """Measure every filter on rows of logits (R, V)."""
    rows = []
    for name, way in WAYS.items():
        sampling = sampling_rows([replace(way, seed=seed) for seed in range(len(logits))])
        native = decoder.sample(logits, logits, sampling)
        plain = sample_tokens(logits, logits, sampling)
        if native != plain:
            raise SystemExit(f"{name}: the native sampler returns {native}, torch {plain}")
        seconds = best_seconds(lambda: decoder.sample(logits, logits, sampling), rounds)  # noqa: B023
        in_torch = best_seconds(lambda: sample_tokens(logits, logits, sampling), 3)  # noqa: B023
        per_row = 1e6 / len(logits)
        rows.append(Row(spread, name, seconds * per_row, in_torch * per_row))
    return rows


def new_decoder(vocab_size: int, threads: int) -> NativeDecoder:
    """A decoder of a minimal model with this vocabulary. Raises KernelsUnavailable."""
    shape = Shape(vocab_size=vocab_size, context_length=32, n_layer=1, n_head=1, d_model=16)
    config = config_of(shape)
    gpt = synthetic_gpt(config)
    cache = KVCache(config, 1, device=torch.device("cpu"), dtype=torch.float32)
    return NativeDecoder(load_library().functions, gpt, cache, threads=threads)


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__, "benchmarks.sampling")
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(argv)
    if min(given.vocab_size, given.rows, given.rounds) < 1:
        parser.error("--vocab-size, --rows and --rounds must be at least 1")
    if not all(0 <= spread < math.inf for spread in given.spread):
        parser.error(f"--spread is {given.spread}; it must be a standard deviation, 0 or more")
    use_threads(given.threads)
    decoder = new_decoder(given.vocab_size, given.threads)
    generator = torch.Generator().manual_seed(0)
    results: list[Row] = []
    print(f"{processor_name()}, {given.threads} threads, {given.rows} rows of {given.vocab_size}\n")
    print("| spread | | native, us a row | torch |\n|---:|---|---:|---:|", flush=True)
    for spread in given.spread:
        logits = spread * torch.randn(given.rows, given.vocab_size, generator=generator)
        for row in measure(decoder, logits, spread, given.rounds):
            results.append(row)
            line = f"| {spread:g} | {row.way} | {row.native:,.1f} | {row.torch:,.0f} |"
            print(line, flush=True)
    decoder.close()
    print(json.dumps({"vocab_size": given.vocab_size, "results": [asdict(r) for r in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
