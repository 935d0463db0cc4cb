"""A second run of the same server returns the same bits."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import ServedProcess
from tests.service.serving import serving

BODIES: list[dict[str, Any]] = [
    {"prompt": f"{'the same words ' * (i % 4)}{i}", "seed": i, "max_tokens": 20, "logprobs": 2}
    | ({"temperature": 0} if i % 3 == 0 else {"top_p": 0.9, "n": 1 + i % 3})
    for i in range(16)
]


def answers(url: str, *, at_once: int) -> list[Any]:
    """The choices in the reply to each body, with `at_once` requests in flight."""
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
        ThreadPoolExecutor(at_once) as threads,
    ):
        replies = list(threads.map(lambda body: http.post("/generate", json=body), BODIES))
    assert {reply.status_code for reply in replies} == {200}
    return [reply.json()["choices"] for reply in replies]


@pytest.mark.slow
def test_second_run_returns_the_same_bits(checkpoint_path: Path) -> None:
    """The requests are sent one at a time to a server in this process, then from eight threads at
    once to a server in a process with another hash seed."""
    with serving(checkpoint_path, kernels="auto") as server:
        alone = answers(server.url, at_once=1)
    flags = ("--checkpoint", str(checkpoint_path), "--threads", "1")
    with ServedProcess(*flags, cold=True) as process:
        assert answers(process.url, at_once=8) == alone
