"""Soak: valid and broken requests to all endpoints, clients that disconnect early, and reloads, all
at once and for a long time.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import ServedProcess
from tests.faults.measures import resident_mib, times
from tests.model.factories import CHAT_TEMPLATE, save_tiny_checkpoint, tiny_gpt, training_record

CLIENTS = 8
STEPS = (1, 2, 3)
"""Step numbers of the checkpoints that are served in turn."""
MISSING = 9
"""The step number of a reload that is refused: there is no such checkpoint."""
ADMIN = "the-key-of-the-admin"
BETWEEN_RELOADS = 0.3
ALLOWED_GROWTH = 48.0
"""Maximum growth of memory, in MiB, from the end of the first quarter of the run to the end of the
run. Allocators and caches, which are bounded, may still be filling up during this time."""
QUESTION = {"prompt": "the same", "max_tokens": 24, "seed": 7, "temperature": 0.9}

ABLATION = {"stage": "blocks.0.attention.heads", "heads": [1], "operation": "zero"}
STEERING = {"stage": "blocks.*.output", "operation": "add", "positions": "generated",
            "from": {"prompt": "a"}, "minus": {"prompt": "b"}}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}}}]  # fmt: skip

SOUND: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"prompt": "one", "max_tokens": 20},
        {"prompt": ["two", "of them"], "n": 2, "max_tokens": 9, "logprobs": 2},
        {"prompt": "a stream", "max_tokens": 40, "stream": True},
        {"prompt": "x", "max_tokens": 12, "regex": "[a-f]{3,9}"},
        {"prompt": "y", "max_tokens": 30, "json_schema": {"type": "boolean"}},
        {"prompt": "late", "max_tokens": 60, "priority": 5},
        {"prompt": "without a head", "max_tokens": 12, "interventions": [ABLATION]},
        {"prompt": "steered", "max_tokens": 12, "interventions": [STEERING], "stream": True},
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
    "/activations": [
        {"prompt": "abcdef", "stages": ["blocks.*.mlp.*", "embedding"]},
        {"prompt": ["a", "bcd"], "stages": ["*"], "positions": "all", "interventions": [ABLATION]},
    ],
    "/lens": [{"prompt": "abcdef", "positions": "all"}],
    "/sweep": [
        {"prompt": "abc", "over": ["layers", "heads"],
         "vary": {"stage": "blocks.*.attention.heads", "operation": "zero"}},
        {"prompt": "abc", "over": ["layers", "positions"], "stream": True,
         "vary": {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": "abd"}}},
    ],
    "/tokenize": [{"prompt": "some text"}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/v1/completions": [
        {"prompt": "abc", "max_tokens": 8},
        {"prompt": "abc", "max_tokens": 30, "stream": True},
        {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, "max_tokens": 8},
        {"messages": MESSAGES, "max_tokens": 20, "stream": True, "logprobs": True},
        {"messages": MESSAGES, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
    ],
}  # fmt: skip
OVERFLOW = {"stage": "embedding", "operation": "scale", "factor": 3e38}
BROKEN: list[tuple[str, Any]] = [
    ("/generate", {"prompt": "x" * 5000}),
    ("/generate", {"prompt": "a", "temprature": 1}),
    ("/generate", {"prompt": "a", "regex": "("}),
    ("/generate", {"prompt": [10**6]}),
    ("/logits", {"prompt": "a", "positions": [99]}),
    ("/attention", {"prompt": "a", "layers": [99]}),
    ("/activations", {"prompt": "a", "stages": ["blocks.99.output"]}),
    ("/generate", {"prompt": "a", "interventions": [OVERFLOW, OVERFLOW]}),
    ("/sweep", {"prompt": "a", "over": ["heads"],
                "vary": {"stage": "embedding", "operation": "zero"}}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/nowhere", {}),
]  # fmt: skip


@dataclass
class Tally:
    """The answers that all clients got."""

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    left: int = 0
    """Requests whose client disconnected before the end of the answer."""
    answers: set[tuple[str, str]] = field(default_factory=set)
    """Answers to QUESTION, each with the hash of its checkpoint."""
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, status: int) -> None:
        with self._lock:
            self.answered[path, status] += 1

    def leave(self) -> None:
        with self._lock:
            self.left += 1


class Client(threading.Thread):
    """Sends requests one after another for `seconds` seconds."""

    def __init__(self, url: str, seed: int, seconds: float, tally: Tally) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._seconds, self._tally = seconds, tally
        self._asked = ""
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def run(self) -> None:
        actions: list[Callable[[], None]] = [self._sound, self._broken, self._leave, self._ask]
        end = time.monotonic() + self._seconds
        with self._http:
            while time.monotonic() < end:
                (act,) = self._random.choices(actions, weights=(6, 2, 1, 1))
                try:
                    act()
                except (httpx.HTTPError, AssertionError) as error:
                    self._tally.problems.append(f"{act.__name__} {self._asked}: {error!r}")

    def _post(self, path: str, body: Any, expected: tuple[int, ...]) -> httpx.Response:
        self._asked = f"{path} {body}"
        response = self._http.post(path, json=body)
        self._tally.answer("other" if path == "/nowhere" else path, response.status_code)
        assert response.status_code in expected, response.text
        return response

    def _sound(self) -> None:
        path = self._random.choice(list(SOUND))
        self._post(path, self._random.choice(SOUND[path]), (200, 429))

    def _broken(self) -> None:
        self._post(*self._random.choice(BROKEN), (400, 404, 429))

    def _leave(self) -> None:
        """Open a stream and disconnect after its first bytes."""
        body = {"prompt": "and so on", "max_tokens": 100, "ignore_eos": True, "stream": True}
        self._asked = "/generate, to leave it"
        with self._http.stream("POST", "/generate", json=body) as response:
            next(response.iter_bytes(), b"")
        self._tally.leave()

    def _ask(self) -> None:
        response = self._post("/generate", QUESTION, (200, 429))
        if response.status_code == 200:
            reply = response.json()
            choice = reply["choices"][0]
            answer = json.dumps([choice["text"], choice["token_ids"]])
            self._tally.answers.add((reply["checkpoint"]["weights_sha256"], answer))


class Administrator(threading.Thread):
    """Reloads one checkpoint after another, and sometimes a missing one."""

    def __init__(self, url: str, tally: Tally, stop: threading.Event) -> None:
        super().__init__()
        self._tally, self._stop_asking = tally, stop
        key = {"Authorization": f"Bearer {ADMIN}"}
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=90, headers=key)
        self.swaps = 0

    def run(self) -> None:
        with self._http:
            for turn in count(1):
                if self._stop_asking.wait(BETWEEN_RELOADS):
                    return
                step = MISSING if turn % 5 == 0 else STEPS[turn % len(STEPS)]
                try:
                    self._reload(step)
                except httpx.HTTPError as error:
                    self._tally.problems.append(f"the reload of step {step}: {error!r}")

    def _reload(self, step: int) -> None:
        response = self._http.post("/admin/reload", json={"checkpoint": f"step-{step}"})
        self._tally.answer("/admin/reload", response.status_code)
        if response.status_code != (200 if step in STEPS else 409):
            self._tally.problems.append(f"the reload of step {step}: {response.text}")
        self.swaps += response.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_counters_memory_and_answers_hold_under_load(tmp_path: Path) -> None:
    """The growth of memory is measured from the end of the first quarter of the run."""
    seconds = times(8, 1200)
    for step in STEPS:
        record = training_record(step=step)
        save_tiny_checkpoint(
            tmp_path / f"step-{step}", tiny_gpt(seed=step), training=record,
            chat_template=CHAT_TEMPLATE,
        )  # fmt: skip
    flags = ("--checkpoint", str(tmp_path / f"step-{STEPS[0]}"), "--threads", "1", "--slots", "4")
    with ServedProcess(*flags, "--admin-key", ADMIN, cold=True) as server:
        explained = len(server.output.splitlines())
        tally, memory, stop = Tally(), list[float](), threading.Event()
        administrator = Administrator(server.url, tally, stop)
        administrator.start()
        try:
            for quarter in range(4):
                clients = [
                    Client(server.url, quarter * CLIENTS + place, seconds / 4, tally)
                    for place in range(CLIENTS)
                ]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join()
                memory.append(resident_mib(server))
        finally:
            stop.set()
            administrator.join()
        assert not tally.problems, f"{len(tally.problems)} problems, the first: {tally.problems[0]}"
        askers = {checkpoint for checkpoint, _ in tally.answers}
        assert len(tally.answers) == len(askers) <= len(STEPS), "one question had several answers"
        assert administrator.swaps
        _compare(server, tally)
        assert memory[-1] - memory[0] < ALLOWED_GROWTH, f"memory in MiB: {memory}"
        lines = server.output.splitlines()[explained:]
        refused = f"there is no checkpoint 'step-{MISSING}'"
        assert not [line for line in lines if " INFO " not in line and refused not in line]


def _compare(server: ServedProcess, tally: Tally) -> None:
    """Assert that the server's counters equal the clients' own counts."""
    held = ("logitd_kv_slots_used", "logitd_queue_elements", "logitd_num_sequences_waiting")
    deadline = time.monotonic() + 20
    while any(map(server.sample, held)):  # abandoned requests end a moment later
        assert time.monotonic() < deadline, {name: server.sample(name) for name in held}
        time.sleep(0.1)
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30).text
    counted = Counter({
        (sample.labels["endpoint"], int(sample.labels["status"])): int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "logitd_http_requests_total"
    })  # fmt: skip
    del counted["/metrics", 200]
    more = counted - tally.answered
    assert not tally.answered - counted, f"not counted: {tally.answered - counted}"
    assert set(more) <= {("/generate", 200), ("/generate", 499)}, f"counted too often: {more}"
    assert sum(more.values()) == tally.left, (
        f"the client left {tally.left} times, but the server counted {more}"
    )
