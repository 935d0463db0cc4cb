"""Compares `logitd serve` and `transformers serve` over HTTP, with the same weights.

    python -m benchmarks.peers.serving [--shape 124m|30m] [--threads N] [--peer-python PYTHON]

One server runs at a time, in a separate process. All get the same number of threads. A client in
this process requests the same batches of streams from each, all streams of a batch together. All
servers draw at temperature 1 from the whole vocabulary, and a completion ends only at its maximum
length. Every token is counted. A stream whose number of tokens differs from the requested number is
an error, and its server gets no figures.

tokens/s   rate while all streams of a batch decode; empty if they never all decode at once, as with
           `transformers serve` without continuous batching, which handles one request at a time
in all     tokens of all streams, divided by the time from the first request to the last token
TTFT       time from the request to the first token: the median and the 99th percentile

Run it on an idle machine. The last line is JSON.
"""

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import httpx
import torch

from benchmarks.peers.comparison import make_weights, random_prompts
from benchmarks.peers.foreign_server import ServerMissing
from benchmarks.peers.logitd_engine import load_gpt
from benchmarks.peers.options import Interpreters, comparison_parser
from benchmarks.peers.transformers_server import (
    asking_transformers,
    save_for_transformers,
    transformers_server,
)
from benchmarks.shapes import SHAPES, Shape
from benchmarks.spread import Spread
from benchmarks.started_server import started_server
from benchmarks.streams import (
    StreamRecord,
    asking,
    failures_of,
    full_batch_rate,
    run_streams,
)
from benchmarks.synthetic import save_with_tokenizer
from logitd.model.machine import processor_name
from logitd.service.client import AsyncClient

LOGITD, PLAIN, CONTINUOUS = "logitd serve", "transformers serve", "transformers serve, continuous"
SERVERS = (LOGITD, PLAIN, CONTINUOUS)
TIMEOUT = httpx.Timeout(600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a comparison."""

    shape: Shape
    dtypes: tuple[str, ...]
    servers: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    rounds: int
    threads: int
    peer_pythons: Interpreters


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Figures of one server at one batch size. Rates are per second, as medians over the rounds;
    times are in seconds. `tokens` is the number of tokens received in all rounds."""

    server: str
    dtype: str
    batch: int
    tokens: int
    decode_tokens_per_second: float | None
    tokens_per_second: float
    first_token_p50: float
    first_token_p99: float


class Unmeasured(Exception):
    """Raised if a stream failed; the message names the batch and the reason."""


async def measure(url: str, server: str, dtype: str, plan: Plan) -> list[Served]:
    """Measure all batch sizes on one server. Raises Unmeasured."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(plan.batches))
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=TIMEOUT) as http:
        if server == LOGITD:
            client = AsyncClient(url, max_retries=0, timeout=TIMEOUT.read, http=http)
            run = partial(run_streams, asking(client))
        else:
            run = partial(run_streams, asking_transformers(http, url))
        # Never use a prompt twice: a server may keep its results.
        count = 1 + plan.rounds * sum(plan.batches)
        prompts = iter(random_prompts(count, plan.prompt, plan.shape.vocab_size))
        await run([next(prompts)], plan.tokens)  # to warm up
        measured = []
        for batch in plan.batches:
            rounds = [
                await run(list(islice(prompts, batch)), plan.tokens) for _ in range(plan.rounds)
            ]
            measured.append(summarize(rounds, server, dtype, batch))
        return measured


def summarize(
    rounds: Sequence[Sequence[StreamRecord]], server: str, dtype: str, batch: int
) -> Served:
    """Combine the rounds of one batch size. Raises Unmeasured."""
    records = [record for records_of_round in rounds for record in records_of_round]
    failures = failures_of(records)
    if failures:
        first = failures[0]
        raise Unmeasured(
            f"batch {batch}: {len(failures)} of {len(records)} streams failed, the first with "
            f"{first.kind}: {first.message}"
        )
    together = [
        rate
        for records_of_round in rounds
        if (rate := full_batch_rate(records_of_round)) is not None
    ]
    waits = Spread.of(record.arrivals[0].at - record.sent for record in records)
    assert waits is not None, "there must be a round with a stream"
    return Served(
        server=server,
        dtype=dtype,
        batch=batch,
        tokens=sum(arrival.tokens for record in records for arrival in record.arrivals),
        decode_tokens_per_second=statistics.median(together) if together else None,
        tokens_per_second=statistics.median(
            overall_rate(records_of_round) for records_of_round in rounds
        ),
        first_token_p50=waits.p50,
        first_token_p99=waits.p99,
    )


def overall_rate(records: Sequence[StreamRecord]) -> float:
    """All tokens, divided by the time from the first request to the last token."""
    tokens = sum(arrival.tokens for record in records for arrival in record.arrivals)
    last = max(record.arrivals[-1].at for record in records)
    return tokens / (last - min(record.sent for record in records))


@contextmanager
def running(server: str, dtype: str, plan: Plan, weights: Path, folder: Path) -> Iterator[str]:
    """Start one of the servers and yield its URL."""
    largest = max(plan.batches)
    if server == LOGITD:
        checkpoint = folder / "logitd"
        save_with_tokenizer(checkpoint, load_gpt(weights))
        with started_server(
            "--checkpoint", str(checkpoint), "--dtype", dtype, "--threads", str(plan.threads),
            "--device", "cpu", "--slots", str(largest),
        ) as started:  # fmt: skip
            yield started.url
        return
    theirs = folder / "transformers"
    save_for_transformers(weights, theirs, dtype)
    with transformers_server(
        theirs,
        python=plan.peer_pythons.of(PLAIN),
        dtype=dtype,
        threads=plan.threads,
        continuous=server == CONTINUOUS,
        largest=largest,
        positions=plan.prompt + plan.tokens,
    ) as url:
        yield url


def compare(plan: Plan) -> list[Served]:
    """Run the whole comparison. Servers that cannot be measured are reported and left out."""
    results: list[Served] = []
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name)
        make_weights(plan.shape, weights)
        for dtype in plan.dtypes:
            for server in plan.servers:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        with running(server, dtype, plan, weights, Path(folder)) as url:
                            measured = asyncio.run(measure(url, server, dtype, plan))
                    except (ServerMissing, Unmeasured) as error:
                        print(f"{dtype}: {server} is left out: {error}", flush=True)
                        continue
                results += measured
                rates = ", ".join(f"{result.tokens_per_second:,.0f}" for result in measured)
                print(f"{dtype}: {server}, tokens/s in all: {rates}", flush=True)
    return results


def table(results: Sequence[Served]) -> str:
    """Results in Markdown."""
    lines = [
        "| | batch | tokens/s | in all | TTFT p50 ms | p99 ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        together = result.decode_tokens_per_second
        lines.append(
            f"| {result.server}, {result.dtype} | {result.batch} "
            f"| {'' if together is None else f'{together:,.0f}'} | {result.tokens_per_second:,.0f} "
            f"| {1e3 * result.first_token_p50:,.0f} | {1e3 * result.first_token_p99:,.0f} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> Plan:
    """Parse the command line into a plan."""
    parser = comparison_parser(__doc__, "benchmarks.peers.serving", shape="30m")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    if arguments.prompt + arguments.tokens > shape.context_length:
        parser.error(
            f"{arguments.prompt} tokens of prompt and {arguments.tokens} more exceed the shape's "
            f"{shape.context_length} positions: ask for fewer"
        )
    return Plan(
        shape=shape,
        dtypes=tuple(arguments.dtypes),
        servers=tuple(arguments.servers),
        batches=tuple(arguments.batches),
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        threads=arguments.threads,
        peer_pythons=Interpreters.of_options(arguments.peer_python),
    )


def main(argv: Sequence[str]) -> None:
    plan = parse(argv)
    print(f"{processor_name()}, {plan.threads} threads, torch {torch.__version__}; {plan.shape}")
    results = compare(plan)
    print(f"\n{table(results)}\n")
    print(json.dumps({"shape": asdict(plan.shape), "threads": plan.threads,
                      "prompt": plan.prompt, "tokens": plan.tokens,
                      "results": [asdict(result) for result in results]}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
