"""Latency and throughput for clients that send their next request when the previous one has ended,
or for requests at a fixed rate.

    python -m benchmarks.closed_loop [--serve FLAGS ...] [--url URL ...] [--peer SERVER ...]
                                     [--clients 8 32] [--rate R ...] [--prompt-tokens N]
                                     [--tokens N] [--shared S] [--seconds S] [--rounds N]
                                     [--checkpoint PATH | --shape 124m] [--json]

    python -m benchmarks.closed_loop --serve="" --serve="--target-gap none" --clients 8
    python -m benchmarks.closed_loop --url http://127.0.0.1:8080 --clients 1 8 32
    python -m benchmarks.closed_loop --shape 124m --serve="--quantize int8" --clients 1 8 32 \
        --peer vllm:bfloat16=PYTHON --peer llama-server:int8=BINARY

A target is one of three: `logitd serve`, started with the given flags; a server of another project,
started with the same random weights (--shape; benchmarks/peers/servers.py); or a running server
that has OpenAI's `/v1/completions`. The same client requests streams from all of them, with prompts
of random token ids. Completions end only at their maximum length. Tokens are counted as the servers
count them. A request has failed if the server's count of prompt tokens differs from the number
sent. All targets stay up during the whole measurement. Each load is applied to each target in turn,
round by round, so that other work on the machine affects all targets alike. While one target is
under load, the others are idle.

clients   number of concurrent clients (a closed loop); each sends a new prompt when its stream ends
rate      requests per second, sent at random moments, however many are still open (an open loop)
shared    share of the prompt that is the same in all prompts

Streams begin one after the other during a warm-up, which is not counted.

tokens/s  tokens of all streams that arrived in the counted time, per second
TTFT      time from a request to its first token, for the requests sent in the counted time
gap       time between two pieces of a stream that have tokens, for pieces in the counted time
good/s    goodput: good requests per second, of those sent in the counted time. A request is good if
          its TTFT is at most 1 s and 99 % of its gaps are at most 150 ms.

The client runs on the same machine: `client CPU` is the average number of processors that it keeps
busy. To stay cheap, it parses only as much of a stream as it needs to count tokens
(`benchmarks/raw_client.py`).
"""

import asyncio
import itertools
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from uvicorn.loops.auto import auto_loop_factory

from benchmarks.arguments import new_parser
from benchmarks.peers.servers import PeerServer, Room, peer_server
from benchmarks.peers.weights import LOGITD
from benchmarks.raw_client import RawClient
from benchmarks.shapes import SHAPES
from benchmarks.spread import Spread
from benchmarks.started_server import started_server
from benchmarks.streams import (
    Ask,
    StreamFailed,
    StreamRecord,
    gaps,
    run_streams,
)
from logitd.model.machine import processor_name
from logitd.service.client.calls import EVENTS, Request

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "checkpoints" / "python-small"
MOST_AT_A_RATE = 32
"""Number of slots that other projects' servers get if requests arrive at a fixed rate."""
TIMEOUT = httpx.Timeout(600.0)
GOOD_TTFT, GOOD_GAP = 1.0, 0.15
"""Limits for a good request, in seconds: the time to the first token, and the 99th percentile of
the gaps."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and its name in the table."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Model:
    """The served model, and its name in requests."""

    name: str
    owner: str


@dataclass(frozen=True, slots=True)
class Load:
    """A number of clients in a closed loop, or a rate of requests per second in an open loop."""

    clients: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s" if self.clients is None else str(self.clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Size of each request, and duration of the load. The load is measured for `seconds` seconds,
    after a warm-up of `warm_up` seconds."""

    prompt_tokens: int
    tokens: int
    shared: float
    seconds: float
    warm_up: float


@dataclass(slots=True)
class Observed:
    """Times and token counts of one target under one load, from all rounds so far."""

    seconds: float = 0.0
    tokens: int = 0
    busy: float = 0.0  # processor time of this process
    good: int = 0
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, records: Sequence[StreamRecord], begin: float, end: float) -> None:
        """Add the observations made between the times `begin` and `end`, and all failures."""
        self.seconds += end - begin
        for record in records:
            if record.failure is not None:
                self.failures.append(f"{record.failure.kind}: {record.failure.message}")
                continue
            times = [arrival.at for arrival in record.arrivals]
            if begin <= record.sent < end:
                first, gap = times[0] - record.sent, Spread.of(gaps(record))
                self.first_tokens.append(first)
                self.good += first <= GOOD_TTFT and (gap is None or gap.p99 <= GOOD_GAP)
            inside = [begin <= at < end for at in times]
            self.tokens += sum(
                arrival.tokens for arrival, counts in zip(record.arrivals, inside, strict=True)
                if counts
            )  # fmt: skip
            self.gaps += [
                gap for gap, counts in zip(gaps(record), inside[1:], strict=True) if counts
            ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Rates per second and times in seconds. `first_token` and `gap` are None if no such time was
    measured."""

    target: str
    load: str
    requests: int
    failed: int
    tokens_per_second: float
    good_per_second: float
    first_token: Spread | None
    gap: Spread | None
    client_cpu: float


def figures_of(target: str, load: Load, observed: Observed) -> Figures:
    return Figures(
        target=target,
        load=load.name,
        requests=len(observed.first_tokens),
        failed=len(observed.failures),
        tokens_per_second=observed.tokens / observed.seconds,
        good_per_second=observed.good / observed.seconds,
        first_token=Spread.of(observed.first_tokens),
        gap=Spread.of(observed.gaps),
        client_cpu=observed.busy / observed.seconds,
    )


# Requests


class Completions:
    """The `Dialect` of servers with OpenAI's `/v1/completions`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # llama-server includes counts in each event only if its own option requests them, and it
        # closes connections that it promised to keep alive, even while a request is on its way.
        theirs = model.owner == "llamacpp"
        self._extra = {"timings_per_token": True} if theirs else {}
        self.headers: Mapping[str, str] = {"Connection": "close"} if theirs else {}

    def request(self, prompt: Sequence[int], tokens: int, seed: int) -> Request:
        body = {
            "model": self._model.name,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._extra,
        }
        return Request("POST", "/v1/completions", body, accept=EVENTS)

    def counter(self, prompt: Sequence[int]) -> Callable[[Any], int]:
        came = 0

        def count(event: Any) -> int:
            nonlocal came
            before, came = came, tokens_after(event, came, len(prompt))
            return came - before

        return count


def tokens_after(event: Any, came: int, prompt: int) -> int:
    """Number of tokens of a stream received up to this event. Servers that count tokens report the
    count in each event; for other servers, each event with text is one token. Raises StreamFailed
    if the event is an error, or if the server counts a different number of prompt tokens."""
    if "error" in event:
        raise StreamFailed("error", str(event["error"]))
    usage = event.get("usage")
    if usage is not None:
        if usage.get("prompt_tokens", prompt) != prompt:
            raise StreamFailed(
                "Miscounted", f"the prompt has {prompt} tokens, but usage is {usage}"
            )
        return int(usage["completion_tokens"])
    if "timings" in event:
        return int(event["timings"]["predicted_n"])
    return came + any(choice.get("text") for choice in event["choices"])


async def model_of(url: str) -> Model:
    """The first model that a server lists."""
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as http:
        response = await http.get(f"{url}/v1/models")
    response.raise_for_status()
    first = response.json()["data"][0]
    return Model(first["id"], first.get("owned_by", ""))


def prompts_of(question: Question, vocab_size: int, seed: str) -> Iterator[list[int]]:
    """An endless sequence of prompts, all of them different."""
    drawn = random.Random(seed)
    ids = range(vocab_size)
    common = random.Random("shared").choices(ids, k=int(question.shared * question.prompt_tokens))
    while True:
        yield common + drawn.choices(ids, k=question.prompt_tokens - len(common))


# A load


async def run_load(
    ask: Ask, load: Load, question: Question, prompts: Iterator[list[int]], observed: Observed
) -> None:
    """Apply a load to a target for the duration that the question sets. The observations are added
    to the target's earlier observations."""
    start, busy = time.perf_counter(), time.process_time()
    begin = start + question.warm_up
    end = begin + question.seconds
    records: list[StreamRecord] = []

    async def one() -> None:
        records.extend(await run_streams(ask, [next(prompts)], question.tokens))

    async def client(delay: float) -> None:
        await asyncio.sleep(delay)
        while time.perf_counter() < end:
            await one()

    async with asyncio.TaskGroup() as group:
        if load.clients is not None:
            for index in range(load.clients):
                group.create_task(client(question.warm_up * index / load.clients))
        else:
            assert load.rate is not None
            moments = random.Random("arrivals")
            while True:
                await asyncio.sleep(moments.expovariate(load.rate))
                if time.perf_counter() >= end:
                    break
                group.create_task(one())
    stopped = time.perf_counter()
    observed.add(records, begin, end)
    observed.busy += (time.process_time() - busy) * question.seconds / (stopped - start)


async def measure(
    targets: Sequence[Target],
    loads: Sequence[Load],
    question: Question,
    *,
    vocab_size: int,
    rounds: int,
) -> list[Figures]:
    """Measure each load on each target in turn, `rounds` times."""
    observed = {(target, load): Observed() for load in loads for target in targets}
    with ExitStack() as stack:
        asks = {
            target: stack.enter_context(
                closing(RawClient(target.url, Completions(await model_of(target.url))))
            )
            for target in targets
        }
        for number, (target, load) in itertools.product(range(rounds), observed):
            prompts = prompts_of(question, vocab_size, f"{target.name} {load.name} {number}")
            print(f"round {number + 1}: {target.name}, {load.name}", file=sys.stderr, flush=True)
            await run_load(asks[target], load, question, prompts, observed[target, load])
    for (target, load), seen in observed.items():
        for reason, count in Counter(seen.failures).most_common(1):
            print(f"{target.name}, {load.name}: {count} times {reason}", file=sys.stderr)
    return [figures_of(target.name, load, seen) for (target, load), seen in observed.items()]


def table(results: Sequence[Figures]) -> str:
    """Results in Markdown."""
    lines = [
        "| | clients | requests | failed | tokens/s | good/s | TTFT p50 ms | p99 | gap p50 ms "
        "| p99 | p99/p50 | client CPU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        first, gap = result.first_token, result.gap
        cells = [
            result.target, result.load, str(result.requests), str(result.failed),
            f"{result.tokens_per_second:,.1f}", f"{result.good_per_second:.2f}",
            *_milliseconds(first), *_milliseconds(gap),
            "" if gap is None else f"{gap.p99 / gap.p50:.1f}", f"{result.client_cpu:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _milliseconds(times: Spread | None) -> tuple[str, str]:
    return ("", "") if times is None else (f"{1e3 * times.p50:,.0f}", f"{1e3 * times.p99:,.0f}")


@contextmanager
def models_of(shape: str, peers: Sequence[PeerServer]) -> Iterator[Path]:
    """Yield a folder with random weights of a shape, in the formats that the servers need. A
    separate process writes them, so that all memory is free for the servers."""
    with tempfile.TemporaryDirectory(prefix="logitd-models-") as name:
        folder = Path(name) / shape
        gguf = sorted({peer.gguf for peer in peers if peer.gguf is not None})
        command = [sys.executable, "-m", "benchmarks.peers.models", "--shape", shape]
        subprocess.run(
            [*command, "--out", str(folder), "--gguf", *gguf], check=True, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip
        yield folder


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__, "benchmarks.closed_loop")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--checkpoint", type=Path, default=BUNDLED)
    weights.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--serve", action="append", metavar="FLAGS", help="start a logitd serve")
    parser.add_argument(
        "--url", action="append", default=[], help="a server that is already running"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="SERVER", type=PeerServer.of_option,
        help="start a server of another project: vllm[:DTYPE]=PYTHON, "
             "llama-server[:DTYPE]=BINARY",
    )  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="*", default=[])
    parser.add_argument("--rate", type=float, nargs="*", default=[])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shared", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="counted seconds of each load")
    parser.add_argument(
        "--warm-up", type=float, default=10.0, help="seconds before the counted ones"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--vocab-size", type=int, default=256, help="prompts have ids below this number"
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    given = parser.parse_args(argv)
    if given.peer and given.shape is None:
        parser.error("--peer needs weights in all formats: name a --shape")
    if not 0 <= given.shared <= 1:
        parser.error(f"--shared is {given.shared:g}; it must be a share of the prompt, from 0 to 1")
    if min([given.prompt_tokens, given.tokens, given.rounds, *given.clients]) < 1:
        parser.error("--clients, --prompt-tokens, --tokens and --rounds must be at least 1")
    if min([given.seconds, *given.rate]) <= 0:
        parser.error("--seconds and --rate must be above 0")
    loads = [Load(clients=count) for count in given.clients]
    loads += [Load(rate=rate) for rate in given.rate]
    question = Question(
        prompt_tokens=given.prompt_tokens,
        tokens=given.tokens,
        shared=given.shared,
        seconds=given.seconds,
        warm_up=given.warm_up,
    )
    loads = loads or [Load(clients=8), Load(clients=32)]
    started = given.serve if given.serve is not None else [""] * (not given.url)
    with ExitStack() as stack:
        targets = [Target(url, url.rstrip("/")) for url in given.url]
        checkpoint = given.checkpoint.resolve()
        if given.shape is not None:
            models = stack.enter_context(models_of(given.shape, given.peer))
            checkpoint = models / LOGITD
        for flags in started:
            server = stack.enter_context(
                started_server(
                    *("--checkpoint", str(checkpoint)),
                    *("--threads", str(given.threads), *shlex.split(flags)),
                )
            )
            targets.append(Target(f"logitd serve {flags}".strip(), server.url))
        room = Room(
            slots=max((load.clients for load in loads if load.clients), default=MOST_AT_A_RATE),
            positions=question.prompt_tokens + question.tokens,
            threads=given.threads,
        )
        for peer in given.peer:
            print(f"{peer.name} has started", file=sys.stderr, flush=True)
            url = stack.enter_context(peer_server(peer, models, room))
            targets.append(Target(peer.name, url))
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            results = runner.run(
                measure(
                    targets,
                    loads,
                    question,
                    vocab_size=given.vocab_size,
                    rounds=given.rounds,
                )
            )
    if not given.json:
        print(f"{processor_name()}, {given.threads} threads; {asdict(question)}\n")
        print(f"{table(results)}\n")
    print(json.dumps({"question": asdict(question), "results": [asdict(r) for r in results]}))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
