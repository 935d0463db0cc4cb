"""Soak: everything at once, for long. Sound requests to every endpoint, broken ones, streams that
are left in the middle, replies that are left before they come.

What has to hold at the end: the server's counters are the clients', no slot and no queue element is
held, memory is where it was after the first quarter, the log has no line that is not explained, and
the same question with the same seed has had one answer throughout.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground, resident_mib

CLIENTS = 8
ALLOWED_GROWTH = 48.0
"""MiB from the end of the first quarter to the end: allocators and caches, which have bounds."""
QUESTION = {"prompt": "the same", "max_tokens": 24, "seed": 7, "temperature": 0.9}

SOUND: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"prompt": "one", "max_tokens": 20},
        {"prompt": ["two", "of them"], "n": 2, "max_tokens": 9, "logprobs": 2},
        {"prompt": "a stream", "max_tokens": 40, "stream": True},
        {"prompt": "x", "max_tokens": 12, "regex": "[a-f]{3,9}"},
        {"prompt": "y", "max_tokens": 30, "json_schema": {"type": "boolean"}},
        {"prompt": "late", "max_tokens": 60, "priority": 5},
    ],
    "/probs": [{"prompt": "abc", "top_k": 5}],
    "/score": [{"prompt": "abcdef", "continuations": ["g", "hi"]}],
    "/logits": [{"prompt": "abcdef", "positions": "all"}, {"prompt": ["a", "bcd"]}],
    "/hidden_states": [{"prompt": "abcdef", "positions": "all"}],
    "/attention": [{"prompt": "abcdef", "positions": "all"}],
    "/attributions": [
        {"prompt": "abcdef"},
        {"prompt": ["a", "bcd"], "methods": ["integrated_gradients", "direct"], "steps": 3},
    ],
    "/tokenize": [{"prompt": "some text"}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/v1/completions": [
        {"prompt": "abc", "max_tokens": 8},
        {"prompt": "abc", "max_tokens": 30, "stream": True},
        {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
}
BROKEN: list[tuple[str, Any]] = [
    ("/generate", {"prompt": "x" * 5000}),
    ("/generate", {"prompt": "a", "temprature": 1}),
    ("/generate", {"prompt": "a", "regex": "("}),
    ("/generate", {"prompt": [10**6]}),
    ("/logits", {"prompt": "a", "positions": [99]}),
    ("/attention", {"prompt": "a", "layers": [99]}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/nowhere", {}),
]


@dataclass
class Tally:
    """What the clients saw, all together."""

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    left: int = 0
    """Requests whose client went away before the end of the answer."""
    answers: set[str] = field(default_factory=set)
    """To the one question that is always the same."""
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, status: int) -> None:
        with self._lock:
            self.answered[path, status] += 1

    def leave(self) -> None:
        with self._lock:
            self.left += 1


class Client(threading.Thread):
    """Sends its share, one request after the other."""

    def __init__(self, url: str, seed: int, requests: int, tally: Tally) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._requests, self._tally = requests, tally
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def run(self) -> None:
        actions: list[Callable[[], None]] = [self._sound, self._broken, self._leave, self._ask]
        with self._http:
            for _ in range(self._requests):
                (act,) = self._random.choices(actions, weights=(6, 2, 1, 1))
                try:
                    act()
                except (httpx.HTTPError, AssertionError) as error:
                    self._tally.problems.append(f"{act.__name__}: {error!r}")

    def _choose(self) -> tuple[str, dict[str, Any]]:
        path = self._random.choice(list(SOUND))
        return path, self._random.choice(SOUND[path])

    def _sound(self) -> None:
        path, body = self._choose()
        response = self._http.post(path, json=body)
        self._tally.answer(path, response.status_code)
        assert response.status_code in (200, 429), response.text

    def _broken(self) -> None:
        path, body = self._random.choice(BROKEN)
        response = self._http.post(path, json=body)
        self._tally.answer("other" if path == "/nowhere" else path, response.status_code)
        assert response.status_code in (400, 404, 429), response.text

    def _leave(self) -> None:
        """A stream that is left after its first bytes."""
        body = {"prompt": "and so on", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with self._http.stream("POST", "/generate", json=body) as response:
            next(response.iter_bytes(), b"")
        self._tally.leave()

    def _ask(self) -> None:
        response = self._http.post("/generate", json=QUESTION)
        self._tally.answer("/generate", response.status_code)
        assert response.status_code in (200, 429), response.text
        if response.status_code == 200:
            choice = response.json()["choices"][0]
            self._tally.answers.add(json.dumps([choice["text"], choice["token_ids"]]))


def soak(ground: Ground, count: int) -> str:
    """`count` requests by several clients, in four quarters."""
    server = ground.serve("--slots", "4")
    explained = len(server.output.splitlines())
    tally, memory = Tally(), list[float]()
    for quarter in range(4):
        clients = [
            Client(server.url, quarter * CLIENTS + place, count // (4 * CLIENTS), tally)
            for place in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        memory.append(resident_mib(server))
    assert not tally.problems, f"{len(tally.problems)} problems, the first: {tally.problems[0]}"
    assert len(tally.answers) == 1, f"the same question had {len(tally.answers)} answers"
    _compare(server, tally)
    growth = memory[-1] - memory[0]
    assert growth < ALLOWED_GROWTH, f"memory grew: {', '.join(f'{m:.0f}' for m in memory)} MiB"
    unexplained = [line for line in server.output.splitlines()[explained:] if " INFO " not in line]
    assert not unexplained, (
        f"the log has {len(unexplained)} lines more, the first: {unexplained[0]}"
    )
    answered = sum(tally.answered.values())
    return (
        f"{answered} answered, {tally.left} left in the middle, counters agree, memory "
        f"{memory[0]:.0f} -> {memory[-1]:.0f} MiB"
    )


def _compare(server: ServedProcess, tally: Tally) -> None:
    """Raise AssertionError where the server's counters are not the clients'."""
    for _ in range(200):  # those that were left end a moment later
        metrics = _metrics(server)
        if not metrics["logitd_kv_slots_used", ()] and not metrics["logitd_queue_elements", ()]:
            break
        time.sleep(0.1)
    assert metrics["logitd_kv_slots_used", ()] == 0
    assert metrics["logitd_queue_elements", ()] == 0
    assert metrics["logitd_num_sequences_waiting", ()] == 0
    counted = Counter({
        (dict(labels)["endpoint"], int(dict(labels)["status"])): int(value)
        for (name, labels), value in metrics.items()
        if name == "logitd_http_requests_total"
    })  # fmt: skip
    del counted["/metrics", 200]
    more = counted - tally.answered
    assert not tally.answered - counted, f"not counted: {tally.answered - counted}"
    assert set(more) <= {("/generate", 200), ("/generate", 499)}, f"counted too often: {more}"
    assert sum(more.values()) == tally.left, f"{tally.left} were left, counted are {more}"


def _metrics(server: ServedProcess) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


ATTACKS = (
    Attack(
        "soak",
        "counters are the clients', memory flat, no slot held, no unexplained log line, "
        "one answer to one question",
        soak,
        short=1_200,
        long=80_000,
    ),
)
