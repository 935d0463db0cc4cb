"""Callers: what one caller's flood does to the others."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.faults.attack import Attack, Ground

KEYS = {"flood": "flood-flood", "other": "other-other"}
SLOTS = 4


def a_flood_of_one_caller(ground: Ground, count: int) -> str:
    """As many requests at once as asked for, sent again where they are rejected; beside them one
    caller with one request at a time."""
    path = ground.folder / "keys"
    path.write_text("\n".join(f"{name}={key}" for name, key in KEYS.items()), encoding="utf-8")
    server = ground.serve("--slots", str(SLOTS), "--max-queue", "64", "--api-key-file", str(path))
    return asyncio.run(_flood(server.url, count))


async def _flood(url: str, count: int) -> str:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=120, limits=limits
    ) as client:
        stop = asyncio.Event()
        rejected = 0

        async def flood() -> None:
            nonlocal rejected
            while not stop.is_set():
                response = await _generate(client, "flood", 100)
                if response.status_code == 429:
                    rejected += 1
                    await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(flood()) for _ in range(count)]
        await asyncio.sleep(2)
        times = []
        for _ in range(10):
            started = time.perf_counter()
            response = await _generate(client, "other", 1)
            assert response.status_code == 200, f"{response.status_code} for the other caller"
            times.append(time.perf_counter() - started)
        stop.set()
        await asyncio.gather(*tasks)
    assert rejected, "the queue was never full: the test shows nothing"
    assert max(times) < 10, f"{max(times):.1f} s for a token"
    return f"a token within {max(times):.2f} s; the flood was rejected {rejected} times"


async def _generate(client: httpx.AsyncClient, key: str, tokens: int) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    return await client.post("/generate", json=body, headers=headers)


def keys_that_go_bad(ground: Ground, count: int) -> str:
    """A file of keys that is read again and again while a caller asks: garbage, another's keys, and
    what is not a file at all."""
    path = ground.folder / "keys"
    good = "\n".join(f"{name}={key}" for name, key in KEYS.items()).encode()
    path.write_bytes(good)
    server = ground.serve("--api-key-file", str(path))
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as client:
        for turn in range(count):
            path.unlink()
            BAD_KEYS[turn % len(BAD_KEYS)](path)
            said = server.output.count("the keys before are accepted still")
            server.signal(signal.SIGHUP)
            deadline = time.monotonic() + 10
            while server.output.count("the keys before are accepted still") == said:
                assert time.monotonic() < deadline, "it says nothing of a bad file of keys"
                statuses[_ask(client)] += 1
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(good)
            statuses[_ask(client)] += 1
    assert set(statuses) == {200}, statuses
    assert "Traceback" not in server.output
    assert not any(key in server.output for key in KEYS.values()), "a key is in the log"
    return f"{statuses[200]} requests answered while {count} bad files came and went"


def _ask(client: httpx.Client) -> int:
    body = {"prompt": "a", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {KEYS['other']}"}
    return client.post("/generate", json=body, headers=headers).status_code


BAD_KEYS: tuple[Callable[[Path], object], ...] = (
    os.mkfifo,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.write_bytes(b"\xff\xfe\0" * 300),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"flood=flood-flood\nflood=other-other"),
    lambda path: path.write_bytes(b"#" * 10**7),
    os.mkdir,
    lambda path: path.symlink_to(path),
)


ATTACKS = (
    Attack(
        "keys that go bad",
        "the keys before are accepted still, nobody waits, no key in the log",
        keys_that_go_bad,
        short=8,
        long=400,
    ),
    Attack(
        "a flood of one caller",
        "no rejection of the other caller, a token within 10 s",
        a_flood_of_one_caller,
        short=100,
        long=1000,
    ),
)
