"""Predict how many servers a load needs, from the results of `logitd bench` on one server.

    logitd bench --threads 1 --batches 1,4,8,16 | tail -1 > bench.json
    python -m benchmarks.fleet bench.json --rates 5,10,20,40 --replicas 1,2,4

prints the time to the first token and the tokens per second in a simulation, for each rate of
requests and each number of servers. `simulate.py` says what the simulation leaves out.

    python -m benchmarks.fleet bench.json --rates 2,4 --replicas 2 --against-real

also starts 2 servers on this machine, each with `--threads` threads (default 1). It sends them the
requests of the simulation at the same moments, and each request goes to the server with the fewest
open requests. Both results are printed. The servers and the clients share the processors, so use
fewer servers than processors, and an idle machine. The last line is JSON.
"""

import json
import sys
from argparse import ArgumentTypeError
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import new_parser
from benchmarks.fleet.real import measure, overhead_of
from benchmarks.fleet.simulate import Load, Outcome, Server, StepTimes, arrivals, simulate
from benchmarks.started_server import started_server
from logitd.service.settings.common import BUNDLED_CHECKPOINT

WIDTH = 110
COLUMNS = (
    *("servers", "requests/s", "", "first token p50", "p95"),
    *("token to token", "tokens/s", "busy", "429"),
)


def main() -> int:
    parser = new_parser(__doc__, "benchmarks.fleet")
    parser.set_defaults(threads=1)  # for each server
    parser.add_argument(
        "bench", type=read_times, help="file with the last line that `logitd bench` prints"
    )
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED_CHECKPOINT)
    parser.add_argument("--rates", default="2,4,8", help="total requests per second")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--against-real", action="store_true")
    arguments = parser.parse_args()
    times = arguments.bench
    fleets = [int(number) for number in arguments.replicas.split(",")]
    rates = [float(rate) for rate in arguments.rates.split(",")]
    table = Table(*COLUMNS)
    found = []
    with ExitStack() as stack:
        flags = (
            *("--checkpoint", str(arguments.checkpoint.resolve()), "--no-prefix-reuse"),
            *("--threads", str(arguments.threads), "--slots", str(arguments.slots)),
        )
        urls = [
            stack.enter_context(started_server(*flags)).url
            for _ in range(max(fleets) if arguments.against_real else 0)
        ]
        server = Server(slots=arguments.slots)
        if urls:
            load = Load(1.0, arguments.prompt_tokens, arguments.tokens)
            server = replace(server, overhead=overhead_of(urls[0], times, load))
            print(f"a request alone: {1000.0 * server.overhead:.1f} ms in addition to its steps")
        for replicas in fleets:
            for rate in rates:
                load = Load(rate, arguments.prompt_tokens, arguments.tokens)
                moments = arrivals(load, arguments.requests, seed=1)
                outcomes = {"predicted": simulate(times, load, server, replicas, moments)}
                if urls:
                    outcomes["measured"] = measure(urls[:replicas], load, moments)
                for how, outcome in outcomes.items():
                    table.add_row(str(replicas), f"{rate:g}", how, *shown(outcome))
                    found.append(
                        {"replicas": replicas, "rate": rate, "how": how} | summary(outcome)
                    )
    Console(width=WIDTH).print(table)
    print(json.dumps({"times": asdict(times), "server": asdict(server), "found": found}))
    return 0


def read_times(path: str) -> StepTimes:
    """Read step times from a file that contains the last line of the output of `logitd bench`.
    Raises ArgumentTypeError for other files."""
    try:
        return StepTimes.of_bench(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{path} does not hold the last line that `logitd bench` prints"
        ) from error


def summary(outcome: Outcome) -> dict[str, float]:
    """Figures of an outcome for the report; times are in seconds."""
    answered = bool(outcome.first_tokens)
    return {
        "first_token_p50": outcome.quantile(0.5) if answered else 0.0,
        "first_token_p95": outcome.quantile(0.95) if answered else 0.0,
        "inter_token": outcome.inter_token,
        "tokens_per_second": outcome.tokens_per_second if answered else 0.0,
        "busy": outcome.busy,
        "rejected": outcome.rejected,
    }


def shown(outcome: Outcome) -> list[str]:
    """Format the figures of an outcome for a row of the table. `busy` is a dash if it is 0."""
    numbers = summary(outcome)
    return [
        f"{1e3 * numbers['first_token_p50']:.0f} ms",
        f"{1e3 * numbers['first_token_p95']:.0f} ms",
        f"{1e3 * numbers['inter_token']:.2f} ms",
        f"{numbers['tokens_per_second']:.0f}",
        f"{numbers['busy']:.0%}" if numbers["busy"] else "-",
        str(outcome.rejected),
    ]


if __name__ == "__main__":
    sys.exit(main())
