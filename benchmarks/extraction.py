"""Rate of `logitd extract --logprobs` as a share of the rate at which the engine computes prompts.

    python -m benchmarks.extraction [--checkpoint DIRECTORY] [--dtype float32] [--threads N]

Measures three kinds of work, which take turns in one process: prompts as `logitd bench` measures
them (8 together, of 256 ids), prompts as long as the model's context, like the windows of long
documents, and an extraction from standard library sources, after the model has been loaded and the
data has been read once. An extraction does more work than prompts: the head computes a row for each
token instead of one for each prompt. Then the softmax is computed, and the rows are encoded and
written to files.

Each is measured in processor time of all threads and in wall-clock time. If other jobs run, trust
the processor time measured with `--threads 1`: with several threads, all spin while they wait for a
thread that lost its core. The last line is JSON.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_parser
from logitd.model.benchmark.rates import SEVERAL_PROMPTS, Workload, full_steps
from logitd.model.data.sources.open_text import open_text
from logitd.model.device import use_threads
from logitd.model.extraction.run import ExtractionRequest, Surveyed, extract
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.load import LoadedModel, load_model
from logitd.model.inference.options import ComputeOptions
from logitd.model.machine import surroundings

PROMPT_TOKENS = 256
BYTES_PER_TOKEN = 3
"""Approximate bytes per token of source code in the vocabulary of `python-small`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Time to process `tokens` tokens: processor seconds of all threads, and wall-clock seconds."""

    tokens: int
    processor: float
    clock: float


class Stopwatch:
    """Processor time of this process and wall-clock time since the stopwatch was created."""

    def __init__(self) -> None:
        self._processor, self._clock = time.process_time(), time.perf_counter()

    def cost(self, tokens: int) -> Cost:
        processor, clock = time.process_time(), time.perf_counter()
        return Cost(tokens, processor - self._processor, clock - self._clock)


def write_text(folder: Path, tokens: int) -> Path:
    """Write whole source files of Python's standard library as JSON lines, about `tokens` tokens in
    total."""
    path, left = folder / "text.jsonl", tokens * BYTES_PER_TOKEN
    with path.open("w", encoding="utf-8") as file:
        for document in open_text(["builtin:python"]).documents:
            text = "".join(document.pieces())
            file.write(json.dumps({"text": text[:left]}) + "\n")
            left -= len(text)
            if left <= 0:
                return path
    return path


@contextmanager
def engine_of(loaded: LoadedModel) -> Iterator[Engine]:
    """Create an engine with the settings of `logitd bench`."""
    config = EngineConfig(slots=SEVERAL_PROMPTS)
    engine = Engine(loaded.network, config, make_decoder=loaded.decode_path.make_decoder)
    try:
        yield engine
    finally:
        engine.close()


def prompts_of(loaded: LoadedModel, length: int) -> Workload:
    """Eight prompts of `length` tokens each, shortened if needed so that the context has room for
    one more token."""
    config = loaded.checkpoint.config
    return Workload(
        batches=(SEVERAL_PROMPTS,),
        prompt_tokens=min(length, config.context_length - 1),
        tokens=1,
        rounds=1,
        vocab_size=config.vocab_size,
    )


def prompts(engine: Engine, workload: Workload, tokens: int, name: str) -> Cost:
    """Compute at least `tokens` tokens of prompts, one batch after another."""
    batch_tokens = SEVERAL_PROMPTS * workload.prompt_tokens
    batches = [
        workload.requests(SEVERAL_PROMPTS, f"{name} {number}", tokens=1)
        for number in range(-(-tokens // batch_tokens))
    ]
    watch = Stopwatch()
    for batch in batches:
        full_steps(engine, batch)
    return watch.cost(batch_tokens * len(batches))


def extraction(checkpoint: Path, text: Path, folder: Path, options: ComputeOptions) -> Cost:
    """Extract the whole text into a new folder."""
    watches: list[Stopwatch] = []

    def tell(event: Any) -> None:
        if isinstance(event, Surveyed):
            watches.append(Stopwatch())

    result = extract(
        checkpoint, [str(text)], folder, ExtractionRequest(), options=options, tell=tell
    )
    return watches[0].cost(result.tokens)


def share(of: Cost, cost: Cost, kind: str) -> float:
    """The token rate of `cost`, divided by the token rate of `of`."""
    own, other = getattr(cost, kind) / cost.tokens, getattr(of, kind) / of.tokens
    return float(other / own)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--tokens", type=int, default=50_000, help="approximate tokens of each round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    options = ComputeOptions(device="cpu", dtype=arguments.dtype, threads=arguments.threads)
    loaded = load_model(arguments.checkpoint, options, log=lambda line: print(line, flush=True))
    use_threads(loaded.placement.threads)
    usual, long = prompts_of(loaded, PROMPT_TOKENS), prompts_of(loaded, 2**30)
    rounds: list[dict[str, Cost]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder, arguments.tokens)
        for number in range(arguments.rounds):
            with engine_of(loaded) as engine:
                full_steps(engine, usual.requests(1, "warm-up"))
                costs = {
                    "prompts": prompts(engine, usual, arguments.tokens, f"usual {number}"),
                    "long": prompts(engine, long, arguments.tokens, f"long {number}"),
                }
            out = folder / f"out-{number}"
            costs["extract"] = extraction(arguments.checkpoint, text, out, options)
            rounds.append(costs)
            print(f"round {number + 1}: {line(costs)}", flush=True)
    print(json.dumps(report(rounds, loaded), allow_nan=False))


def line(costs: dict[str, Cost]) -> str:
    """Format the costs of one round."""
    rates = ", ".join(
        f"{name} {cost.tokens / cost.processor:,.0f} tokens per processor second, "
        f"{cost.tokens / cost.clock:,.0f} by the clock"
        for name, cost in costs.items()
    )
    shares = {
        name: [share(costs[name], costs["extract"], kind) for kind in ("processor", "clock")]
        for name in ("prompts", "long")
    }
    told = "; ".join(f"of {name} {cpu:.0%}, {clock:.0%}" for name, (cpu, clock) in shares.items())
    return f"{rates}; extract has {told}"


def best(rounds: list[dict[str, Cost]], name: str, kind: str) -> Cost:
    """The lowest cost per token in all rounds."""
    return min(
        (costs[name] for costs in rounds), key=lambda cost: getattr(cost, kind) / cost.tokens
    )


def report(rounds: list[dict[str, Cost]], loaded: LoadedModel) -> dict[str, Any]:
    """Report the token rate of the extraction as a share of the token rate of each kind of prompt.
    Each share is given twice: as the median over the rounds, and computed from the lowest costs of
    all rounds, which other jobs disturb least."""
    return {
        "surroundings": asdict(surroundings(loaded.placement)),
        "checkpoint": loaded.checkpoint.name,
        "decoding": loaded.decode_path.name,
        **{
            f"of_{name}_{kind}": statistics.median(
                share(costs[name], costs["extract"], kind) for costs in rounds
            )
            for name in ("prompts", "long")
            for kind in ("processor", "clock")
        },
        **{
            f"of_{name}_{kind}_best": share(
                best(rounds, name, kind), best(rounds, "extract", kind), kind
            )
            for name in ("prompts", "long")
            for kind in ("processor", "clock")
        },
        "rounds": [{name: asdict(cost) for name, cost in costs.items()} for costs in rounds],
    }


if __name__ == "__main__":
    main()
