"""A second run of the same server gives the same answers, to the last bit of a logprob."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import ServedProcess

BODIES: list[dict[str, Any]] = [
    {"prompt": f"{'the same words ' * (i % 4)}{i}", "seed": i, "max_tokens": 20, "logprobs": 2}
    | ({"temperature": 0} if i % 3 == 0 else {"top_p": 0.9, "n": 1 + i % 3})
    for i in range(16)
]


def answers(checkpoint: Path, *, at_once: int) -> list[Any]:
    """The choices for each body from a server of its own, asked so many at once."""
    with (
        ServedProcess("--checkpoint", str(checkpoint), "--threads", "1", cold=True) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(at_once) as threads,
    ):
        replies = list(threads.map(lambda body: client.post("/generate", json=body), BODIES))
    assert {reply.status_code for reply in replies} == {200}
    return [reply.json()["choices"] for reply in replies]


def test_a_second_run_gives_the_same_answers(checkpoint_path: Path) -> None:
    """Alone one after the other, then in another process in whatever batches the threads make."""
    assert answers(checkpoint_path, at_once=1) == answers(checkpoint_path, at_once=8)
