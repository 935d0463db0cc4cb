"""Front load: latency and throughput of a server as a client sees them, proxies included.

The load consists of short requests, one after another, and then several streams at once. Prompts
are new each time, so no cached prefix is reused. The client is `benchmarks/raw_client.py`, on the
same machine. This module does not start servers.
"""

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.raw_client import RawClient
from benchmarks.streams import failures_of, run_streams

Server = tuple[str, Sequence[int]]
"""The URL of a server and the ids of its processes."""
PROMPT_TOKENS = 32
SHORT = 1
"""Number of tokens that a short request generates. Network and prefill take most of its time."""


@dataclass(frozen=True, slots=True)
class Felt:
    """Figures of one round, as a client sees them.

    alone_ms           median time of a lone request for one token
    first_token_ms     median time to the first token of streams that run together
    tokens_per_second  rate of these streams, from the first request to the last token
    processor_ms       processor time of the server for the whole load; least affected by other
                       programs
    """

    alone_ms: float
    first_token_ms: float
    tokens_per_second: float
    processor_ms: float


class FrontLoad:
    """The same load each round, with different prompts."""

    def __init__(self, *, requests: int, streams: int, tokens: int) -> None:
        """The load is `requests` short requests, one after another, then `streams` streams of
        `tokens` tokens each, all at once."""
        self._requests, self._streams, self._tokens = requests, streams, tokens
        self._prompts = _prompts()

    def compare(self, first: Server, second: Server, rounds: int) -> tuple[list[Felt], list[Felt]]:
        """Measure two servers alternately, after a warm-up round of each. The order is reversed
        after every round. Raises RuntimeError if a stream fails."""
        felt: list[list[Felt]] = [[], []]
        order = list(zip(felt, (first, second), strict=True))
        for _, server in order:
            asyncio.run(self._round(*server))
        for _ in range(rounds):
            for figures, server in order:
                figures.append(asyncio.run(self._round(*server)))
            order.reverse()
        return felt[0], felt[1]

    async def _round(self, url: str, processes: Sequence[int]) -> Felt:
        ask, before = RawClient(url), processor_seconds(processes)
        try:
            alone = [await self._timed(ask, 1, SHORT) for _ in range(self._requests)]
            together = await self._timed(ask, self._streams, self._tokens)
        finally:
            ask.close()
        return Felt(
            alone_ms=1e3 * statistics.median(one.seconds for one in alone),
            first_token_ms=1e3 * together.first_token,
            tokens_per_second=self._streams * self._tokens / together.seconds,
            processor_ms=1e3 * (processor_seconds(processes) - before),
        )

    async def _timed(self, ask: RawClient, streams: int, tokens: int) -> "_Timed":
        prompts = list(itertools.islice(self._prompts, streams))
        begun = time.perf_counter()
        records = await run_streams(ask, prompts, tokens)
        seconds = time.perf_counter() - begun
        if failed := failures_of(records):
            raise RuntimeError(f"{len(failed)} of {streams} streams failed: {failed[0]}")
        first = statistics.median(record.arrivals[0].at - record.sent for record in records)
        return _Timed(seconds, first)


@dataclass(frozen=True, slots=True)
class _Timed:
    seconds: float
    first_token: float


def _prompts() -> Iterator[Sequence[int]]:
    """An endless sequence of prompts with different beginnings."""
    for number in itertools.count():
        yield [(7 * number + 3 * place) % 250 + 1 for place in range(PROMPT_TOKENS)]


def processor_seconds(processes: Sequence[int]) -> float:
    """Processor seconds of the processes so far, in steps of 0.01 s, because the kernel counts
    hundredths."""
    ticks = 0
    for pid in processes:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])  # user mode and kernel mode
    return ticks / os.sysconf("SC_CLK_TCK")


def medians(rounds: Sequence[Felt]) -> Felt:
    """Median of each figure over the rounds."""
    return Felt(
        *(statistics.median(getattr(one, part.name) for one in rounds) for part in fields(Felt))
    )


def ratios(first: Sequence[Felt], second: Sequence[Felt]) -> dict[str, float]:
    """For each figure, the median over the rounds of the ratio of the second server to the
    first."""
    return {
        part.name: statistics.median(
            getattr(b, part.name) / getattr(a, part.name)
            for a, b in zip(first, second, strict=True)
        )
        for part in fields(Felt)
    }
