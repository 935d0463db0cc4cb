"""The engine in a thread of the server and in a process of its own: tokens per second over HTTP.

    python -m benchmarks.engine_place [--checkpoint PATH] [--threads N] [--batches 1 8 32]
                                      [--rounds N]

Both servers run all the time, and one batch of streams is asked of each in turns, so that what else
the machine does meets both alike; the one that is not asked does nothing. The client is
`service/cli/commands/benchmark/raw_client.py`, on the same machine. A process pays where the
interpreter is what is short and processors are not: where the model computes on all of them, there
is little to gain. Run it on a machine that does nothing else; the last line is JSON.
"""

import asyncio
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_parser
from logitd.model.benchmark.workload import Workload, choose_workload
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.service.cli.commands.benchmark.load import DecodeLoad, measure_server
from logitd.service.cli.commands.benchmark.raw_client import RawClient
from logitd.service.cli.commands.benchmark.server import started_server

PLACES = ("thread", "process")
TOKENS = 128
ATTEMPTS = 3


class NotMeasured(Exception):
    """A batch of streams has no speed; the message says why."""


@contextmanager
def served_twice(*flags: str) -> Iterator[dict[str, str]]:
    """Servers with these flags; where each is, by the place of its engine. Whole batches are asked
    for, so nobody waits for a gap."""
    with ExitStack() as stack:
        yield {
            place: stack.enter_context(
                started_server(*flags, "--target-gap", "none", "--engine", place)
            ).url
            for place in PLACES
        }


async def decode(url: str, workload: Workload) -> DecodeLoad:
    """The load of one batch of streams, which is asked for again where the first had ended before
    the last began: beside other work that happens."""
    ask = RawClient(url)
    try:
        for _ in range(ATTEMPTS):
            (load,) = (await measure_server(ask, workload)).decode
            if load.failures:
                raise NotMeasured(f"{len(load.failures)} streams failed: {load.failures}")
            if load.tokens_per_second is not None:
                return load
    finally:
        ask.close()
    raise NotMeasured(
        f"{workload.batches[0]} streams of {workload.tokens} tokens were never all at once, in "
        f"{ATTEMPTS} attempts: ask for more tokens"
    )


def compare(urls: dict[str, str], workload: Workload, rounds: int) -> dict[str, Any]:
    """Medians of the rounds, and of the ratios within each; every other round the other begins."""
    rounds_done: list[dict[str, DecodeLoad]] = []
    order = list(PLACES)
    for _ in range(rounds):
        rounds_done.append({place: asyncio.run(decode(urls[place], workload)) for place in order})
        order.reverse()
    rates = {
        place: [loads[place].tokens_per_second or 0.0 for loads in rounds_done] for place in PLACES
    }
    ratios = [ours / theirs for ours, theirs in zip(rates["process"], rates["thread"], strict=True)]
    first = {
        place: statistics.median(_p50(loads[place]) for loads in rounds_done) for place in PLACES
    }
    return {
        "batch": workload.batches[0],
        **{place: statistics.median(rates[place]) for place in PLACES},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "first_token_p50": first,
    }


def _p50(load: DecodeLoad) -> float:
    return load.first_token.p50 if load.first_token is not None else 0.0


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    path = arguments.checkpoint.resolve()
    config = read_checkpoint(path).config
    flags = ("--checkpoint", str(path), "--threads", str(arguments.threads),
             "--slots", str(max(arguments.batches)))  # fmt: skip
    results = []
    with served_twice(*flags) as urls:
        print("streams    thread   process  ratio (least to most)")
        for batch in arguments.batches:
            workload = choose_workload(
                config, batches=[batch], prompt_tokens=None, tokens=TOKENS, rounds=1,
                prefill_chunk=256,
            )  # fmt: skip
            compared = compare(urls, workload, arguments.rounds)
            results.append(compared)
            print(
                "{batch:7} {thread:9.0f} {process:9.0f}  {ratio:5.2f} ".format_map(compared)
                + f"({min(compared['ratios']):.2f} to {max(compared['ratios']):.2f})",
                flush=True,
            )
    print(json.dumps({"checkpoint": path.name, "threads": arguments.threads, "results": results}))


if __name__ == "__main__":
    main()
