"""Callers: what one caller's flood does to the others."""

import asyncio
import time

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


ATTACKS = (
    Attack(
        "a flood of one caller",
        "no rejection of the other caller, a token within 10 s",
        a_flood_of_one_caller,
        short=100,
        long=1000,
    ),
)
