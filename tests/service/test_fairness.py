"""Fairness: each caller of a busy server gets its turn and its share of the queue."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.serving import TEST_TIMEOUT, Serving, eventually, request_bytes, serving
from tests.service.spelling import CONTEXT_LENGTH

QUEUE = 4


@pytest.fixture
def server(spelling_path: Path) -> Iterator[Serving]:
    """A server with one slot, a queue of four, and two callers."""
    with serving(
        spelling_path, slots=1, max_queue=QUEUE, slow_reader_timeout=TEST_TIMEOUT,
        api_keys="many=many-many,few=few-few-few",
    ) as running:  # fmt: skip
        yield running


KEYS = {"many": "Bearer many-many", "few": "Bearer few-few-few"}


class Askers:
    """Sends requests from threads, and records the order in which they are answered."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.order: list[str] = []
        self.statuses: list[int] = []
        self._threads: list[threading.Thread] = []

    def ask(self, key: str, **fields: Any) -> None:
        def post() -> None:
            body = {"prompt": "a", "max_tokens": 20, **fields}
            headers = {"Authorization": KEYS[key]}
            with httpx.Client(
                base_url=self.server.url, trust_env=False, timeout=TEST_TIMEOUT
            ) as http:
                response = http.post("/generate", json=body, headers=headers)
            self.order.append(key)
            self.statuses.append(response.status_code)

        thread = threading.Thread(target=post)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(TEST_TIMEOUT)


def occupy(server: Serving, stack: ExitStack) -> None:
    """Hold the slot with a generation of the caller `many`."""
    raw = stack.enter_context(server.connect())
    body = {"prompt": "a", "max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True, "stream": True}
    raw.sendall(request_bytes("/generate", body, f"Authorization: {KEYS['many']}"))
    eventually(lambda: server.sample("logitd_kv_slots_used") == 1)


def test_queue_filled_by_one_caller_admits_another(server: Serving) -> None:
    askers = Askers(server)
    with ExitStack() as stack:
        occupy(server, stack)
        for waiting in range(1, QUEUE + 1):
            askers.ask("many")
            eventually(lambda: server.sample("logitd_num_sequences_waiting") == waiting)  # noqa: B023
        refused = server.post("/generate", {"prompt": "a"}, Authorization=KEYS["many"])
        assert refused.status_code == 429
        askers.ask("few")
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == QUEUE + 1)
    askers.wait()
    assert askers.statuses == [200] * (QUEUE + 1)
    assert askers.order.index("few") <= 1, askers.order
    server.wait_idle()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"max_tokens": 1}), ("/v1/completions", {"max_tokens": 1}), ("/logits", {}),
        ("/probs", {"perplexity": True}), ("/score", {}), ("/hidden_states", {"layers": [0]}),
        ("/attention", {"layers": [0]}),
        ("/attributions", {"methods": ["integrated_gradients"], "steps": 512}),
    ],
)  # fmt: skip
def test_every_endpoint_knows_its_caller(server: Serving, path: str, fields: Any) -> None:
    """If the queue is full of another caller's requests, this caller's request is still
    admitted."""
    statuses = []
    with ExitStack() as stack:
        occupy(server, stack)
        body = {"prompt": "a", "n": QUEUE, "max_tokens": 1, "stream": True}
        raw = stack.enter_context(server.connect())
        raw.sendall(request_bytes("/generate", body, f"Authorization: {KEYS['many']}"))
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == QUEUE)
        for key in ("many", "few"):
            ask = {"prompt": "aa", "timeout": 0.05, **fields}
            statuses.append(server.post(path, ask, Authorization=KEYS[key]).status_code)
    assert statuses == [429, 504], (
        "the queue has no room for one caller; the other gets in and times out"
    )
    server.wait_idle()
