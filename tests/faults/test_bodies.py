"""Expensive request bodies, during which another client must not wait long."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import ServedProcess
from tests.faults.measures import times
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

pytestmark = pytest.mark.slow

MIB = 2**20
ALL_STRUCTURE = {
    "empty lists": b'{"prompt": [' + b"[]," * (4 * MIB // 3 - 10) + b"[]]}",
    "lists that nest": b'{"prompt": [' + (b"[" * 60 + b"]" * 60 + b",") * 34_000 + b"1]}",
    "brackets": b'{"prompt": ' + b"[" * (4 * MIB - 20),
    "ids": b'{"prompt": [' + b"1," * (2 * MIB - 20) + b"1]}",
    "names": b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
    "biases": b'{"prompt": "a", "logit_bias": {'
    + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
    "a schema": b'{"prompt": "a", "json_schema": {"a": [' + b"{}," * MIB + b"1]}}",
    "long numbers": b'{"prompt": [' + (b"9" * 4000 + b",") * 1000 + b"1]}",
    "escapes": b'{"prompt": "' + b"\\n" * (2 * MIB - 20) + b'"}',
}  # fmt: skip
"""Bodies of 4 MB with the most objects or the longest parsing time."""

CHANGE = {"stage": "blocks.*.attention.heads", "operation": "zero"}
MUCH_FROM_LITTLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a grid": (
        "/sweep",
        {"prompt": [5] * 110, "vary": CHANGE, "over": ["layers", "heads", "positions"],
         "timeout": 0.5},
    ),
    "a grid of all layers": (
        "/sweep",
        {"prompt": [5] * 1000, "vary": CHANGE, "over": ["heads", "positions"], "timeout": 0.5},
    ),
    "interventions": (
        "/generate", {"prompt": ["a"] * 64, "interventions": [CHANGE] * 256, "max_tokens": 1},
    ),
    "interventions that fit": (
        "/generate", {"prompt": ["a"] * 8, "interventions": [CHANGE] * 80, "max_tokens": 1},
    ),
    "patterns": (
        "/activations", {"prompt": "a", "stages": ["*" * (i % 90 + 1) for i in range(1000)]},
    ),
    "unknown fields": ("/generate", {f"tempratur{i}": 1 for i in range(900)}),
}  # fmt: skip
"""Small requests that cause a lot of work."""
ANSWERS = {200, 400, 504}
"""Accepted statuses. 504 means that the request reached its own timeout."""

LONGEST_PAUSE = 1.0
"""Longest time in seconds that another client may wait on a busy machine. On an idle machine it
waits tens of milliseconds."""
ASKS = """
import http.client, select, sys, time
asks = http.client.HTTPConnection(sys.argv[1], timeout=30)
print("asking", flush=True)
longest = 0.0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    started = time.perf_counter()
    asks.request("GET", "/version")
    reply = asks.getresponse()
    reply.read()
    assert reply.status == 200
    longest = max(longest, time.perf_counter() - started)
print(longest)
"""
"""Source code of a client. It runs in its own process, so that only the server can delay it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server whose model has 12 layers with 12 heads each, and a context of 1,024 tokens."""
    config = tiny_config(n_layer=12, n_head=12, n_kv_head=12, d_model=96, context_length=1024)
    path = save_tiny_checkpoint(tmp_path_factory.mktemp("deep") / "saved", tiny_gpt(config)).path
    # Without this flag expensive requests are refused at once.
    unbounded = ("--max-request-tokens", str(2**40))
    with ServedProcess("--checkpoint", str(path), "--threads", "1", *unbounded) as running:
        yield running


@pytest.fixture
def pauses(server: ServedProcess) -> Iterator[None]:
    """Fail the test if another client waits for LONGEST_PAUSE or longer."""
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKS, server.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"
        yield
        longest, _ = asking.communicate()
    assert 0 < float(longest) < LONGEST_PAUSE, f"another client waited {longest} s"


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("name", ALL_STRUCTURE)
def test_large_body_is_refused_without_delaying_others(server: ServedProcess, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        for _ in range(times(1, 50)):
            response = client.post("/generate", content=ALL_STRUCTURE[name], headers=headers)
            assert response.status_code == 400, response.text


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("name", MUCH_FROM_LITTLE)
def test_expensive_small_body_does_not_delay_others(server: ServedProcess, name: str) -> None:
    path, body = MUCH_FROM_LITTLE[name]
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for _ in range(times(1, 20)):
            response = client.post(path, json=body)
            assert response.status_code in ANSWERS, response.text[:300]
