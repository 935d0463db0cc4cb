"""Sends the requests of a simulation to real servers, at the moments of the simulation."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from benchmarks.fleet.simulate import Load, Outcome, StepTimes

ALONE = 8
"""Number of sequential requests whose median time is used to compute the cost of HTTP."""


@dataclass(frozen=True)
class Reply:
    """Seconds from sending a request to its first and to its last token."""

    status: int
    first_token: float = 0.0
    last_token: float = 0.0


def overhead_of(url: str, times: StepTimes, load: Load) -> float:
    """Seconds from sending a lone request to its first token, minus the predicted time of its
    steps."""
    replies = asyncio.run(_one_by_one(url, load))
    steps = load.prompt_tokens * times.prefill_token
    return max(0.0, statistics.median(reply.first_token for reply in replies) - steps)


def measure(urls: Sequence[str], load: Load, moments: Sequence[float]) -> Outcome:
    """At each of these moments, send a request to one of the servers. The share of time in which
    servers are busy is not measured, so `busy` is 0."""
    begun = time.perf_counter()
    replies = asyncio.run(_at_their_moments(urls, load, moments))
    seconds = time.perf_counter() - begun - moments[0]
    good = [reply for reply in replies if reply.status == 200]
    pauses = sum(reply.last_token - reply.first_token for reply in good)
    gaps = len(good) * (load.tokens - 1)
    return Outcome(
        tuple(sorted(reply.first_token for reply in good)),
        pauses / gaps if gaps else 0.0,
        len(good) * load.tokens,
        len(replies) - len(good),
        seconds,
        0.0,
    )


async def _one_by_one(url: str, load: Load) -> list[Reply]:
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        return [await _ask(client, url, load, number) for number in range(ALONE)]


async def _at_their_moments(
    urls: Sequence[str], load: Load, moments: Sequence[float]
) -> list[Reply]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    opened = dict.fromkeys(urls, 0)
    start = time.perf_counter()

    async def send(client: httpx.AsyncClient, number: int, moment: float) -> Reply:
        await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
        url = min(urls, key=opened.__getitem__)
        opened[url] += 1
        try:
            return await _ask(client, url, load, number)
        finally:
            opened[url] -= 1

    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:
        tasks = [send(client, number, moment) for number, moment in enumerate(moments)]
        return await asyncio.gather(*tasks)


async def _ask(client: httpx.AsyncClient, url: str, load: Load, number: int) -> Reply:
    """Send a request with a new prompt, of which nothing is cached."""
    prompt = [(7 * number + 3 * place) % 250 + 1 for place in range(load.prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": load.tokens, "ignore_eos": True, "stream": True}
    begun, first = time.perf_counter(), 0.0
    async with client.stream("POST", f"{url}/generate", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and not first and json.loads(line[6:]).get("choices"):
                first = time.perf_counter() - begun
    return Reply(reply.status_code, first, time.perf_counter() - begun)
