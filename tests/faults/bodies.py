"""Bodies: what a caller can put into a request to make the server work, grow or fail."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx
from pydantic import BaseModel

from logitd.service.schemas import (
    activations,
    attributions,
    generate,
    lens,
    openai,
    sweep,
    tensors,
    tokenizer,
)
from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground
from tests.model.factories import CHAT_TEMPLATE, save_tiny_checkpoint, tiny_config, tiny_gpt

PIECES = (
    '"prompt"', '"max_tokens"', '"a"', "[", "]", "{", "}", ":", ",", "1e400", "NaN", "-1",
    "1" * 400, "null", "true", '"\\ud800"', '"seed"', '"stop"', '""', " ",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**63, 2**64, 10**30,
    0.5, -0.5, 1e-320, 1e308, "", "a", "last", "all", "x" * 300, "\0", "\ud7ff\U0010ffff",
    "[a-z]{1,5}", "(", [], [[]], [0], [1, 2, 3], [-1], [256], [257], ["a"], ["a", "bc"],
    [[1], [2, 3]], ["a", [1]], [None], [0.5], {}, {"0": 1}, {"257": 1.5}, {"a": {}},
    {"type": "object"}, {"type": "integer"},
    ["embedding"], ["blocks.*.attention.q"],
    [{"stage": "blocks.*.output", "operation": "zero"}],
    [{"stage": "embedding", "operation": "set", "from": {"prompt": "ab"}}],
    {"stage": "blocks.*.output", "operation": "zero"}, ["layers", "positions"],
    ["integrated_gradients"], ["direct", "gradient_times_input"], "zero",
    {"from": 0, "to": 2}, {"from": 5, "to": -5}, [{"role": "user", "content": "a"}],
    "required", {"type": "json_schema"},
    [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#"}}}],
    [{"role": "tool", "content": None, "tool_calls": [{}]}], {"a": {"b": {"c": {}}}},
    "\u2028\x1b[31m\r\nX: y", {"include_usage": True},
)  # fmt: skip
"""What a field can be given: sound for one, hostile for another."""
BODIES: dict[str, type[BaseModel]] = {
    "/generate": generate.GenerateRequest,
    "/probs": tensors.ProbsRequest,
    "/score": tensors.ScoreRequest,
    "/logits": tensors.LogitsRequest,
    "/hidden_states": tensors.HiddenStatesRequest,
    "/attention": tensors.AttentionRequest,
    "/activations": activations.ActivationsRequest,
    "/sweep": sweep.SweepRequest,
    "/lens": lens.LensRequest,
    "/attributions": attributions.AttributionsRequest,
    "/tokenize": tokenizer.TokenizeRequest,
    "/detokenize": tokenizer.DetokenizeRequest,
    "/v1/completions": openai.CompletionRequest,
    "/v1/chat/completions": openai.ChatRequest,
}
PATHS = tuple(BODIES)
ANSWERS = {200, 400, 404, 429, 504}
"""504: a timeout of the request's own, which may be as short as it likes."""


def generated_bodies(ground: Ground, count: int) -> str:
    """Fields of every endpoint with values of every kind, and pieces of JSON put together."""
    path = save_tiny_checkpoint(ground.folder / "chatty", chat_template=CHAT_TEMPLATE).path
    server = ground.serve(checkpoint=path)
    generator = random.Random(time.time_ns())  # others each time; what was found became a test
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for _ in range(count):
            endpoint = generator.choice(PATHS)
            body = _body(generator, endpoint)
            response = client.post(
                endpoint, content=body.encode(), headers={"Content-Type": "application/json"}
            )
            statuses[response.status_code] += 1
            assert response.status_code in ANSWERS, (
                f"{response.status_code} of {endpoint} for {body}"
            )
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.output, server.output[-3000:]
    return ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))


def _body(generator: random.Random, path: str) -> str:
    if generator.random() < 0.2:
        return "".join(generator.choices(PIECES, k=generator.randrange(1, 30)))
    names = list(BODIES[path].model_fields)
    required: dict[str, Any] = {
        "prompt": "abc", "tokens": [1, 2], "messages": [{"role": "user", "content": "a"}],
    }  # fmt: skip
    body = {name: value for name, value in required.items() if name in names}
    body |= {"max_tokens": 5} if "max_tokens" in names else {}
    for name in generator.sample(names, k=min(len(names), generator.randrange(0, 4))):
        body[name] = generator.choice(VALUES)
    return json.dumps(body)


def deep_nesting(ground: Ground, count: int) -> str:
    """Brackets that nest as deeply as a body has room for."""
    server = ground.serve()
    slowest = 0.0
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        for depth in range(count):
            body = b'{"prompt": ' + b"[" * 4 ** (depth % 11)
            started = time.perf_counter()
            response = client.post(
                PATHS[depth % len(PATHS)],
                content=body,
                headers={"Content-Type": "application/json"},
            )
            slowest = max(slowest, time.perf_counter() - started)
            assert response.status_code == 400, response.text
    assert slowest < 5, f"{slowest:.1f} s for one body"
    return f"400 each, {1e3 * slowest:.0f} ms at most"


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
"""Small requests out of which a server makes much."""


def much_from_little(ground: Ground, count: int) -> str:
    """Small requests that stand for much, while somebody else asks for little."""
    config = tiny_config(n_layer=12, n_head=12, n_kv_head=12, d_model=96, context_length=1024)
    path = save_tiny_checkpoint(ground.folder / "deep", tiny_gpt(config)).path
    server = ground.serve(checkpoint=path)
    statuses: Counter[int] = Counter()
    with (
        Pauses(server) as pauses,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        for index in range(count):
            where, body = list(MUCH_FROM_LITTLE.values())[index % len(MUCH_FROM_LITTLE)]
            response = client.post(where, json=body)
            statuses[response.status_code] += 1
            assert response.status_code in ANSWERS, f"{response.status_code}: {response.text[:300]}"
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    return f"{answers}; {pauses.held()}"


MIB = 2**20
ALL_STRUCTURE = {
    "empty lists": b'{"prompt": [' + b"[]," * (4 * MIB // 3 - 10) + b"[]]}",
    "lists that nest": b'{"prompt": [' + (b"[" * 60 + b"]" * 60 + b",") * 34_000 + b"1]}",
    "ids": b'{"prompt": [' + b"1," * (2 * MIB - 20) + b"1]}",
    "names": b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
    "biases": b'{"prompt": "a", "logit_bias": {'
    + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
    "a schema": b'{"prompt": "a", "json_schema": {"a": [' + b"{}," * MIB + b"1]}}",
    "long numbers": b'{"prompt": [' + (b"9" * 4000 + b",") * 1000 + b"1]}",
    "escapes": b'{"prompt": "' + b"\\n" * (2 * MIB - 20) + b'"}',
}  # fmt: skip
"""Bodies of 4 MB that a parser makes most objects of, or looks at longest."""
LONGEST_PAUSE = 1.0
"""Seconds: what no pause may reach even on a busy machine; on an idle one they are tens of ms."""


class Pauses:
    """Asks for /version again and again, from a process of its own: what it waits is the server's
    doing, and from the first request on."""

    def __init__(self, server: ServedProcess) -> None:
        command = [sys.executable, "-c", ASKS, server.address]
        self._asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._asking.stdout is not None
        self._told = self._asking.stdout
        assert self._told.readline() == "asking\n"
        self._longest = 0.0

    def __enter__(self) -> "Pauses":
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.terminate()
        lines = self._told.read().splitlines()
        assert self._asking.wait() == -signal.SIGTERM, "it was not answered throughout"
        self._told.close()
        self._longest = max(map(float, lines), default=0.0)

    def held(self) -> str:
        """How it went; AssertionError where somebody waited for too long."""
        longest = self._longest
        assert longest, "nobody was answered: the test shows nothing"
        assert longest < LONGEST_PAUSE, f"another client waited {longest:.2f} s"
        return f"another client waited {1e3 * longest:.0f} ms at most"


ASKS = """
import http.client, sys, time
asks = http.client.HTTPConnection(sys.argv[1], timeout=30)
print("asking", flush=True)
longest = 0.0
while True:
    started = time.perf_counter()
    asks.request("GET", "/version")
    reply = asks.getresponse()
    reply.read()
    assert reply.status == 200
    took = time.perf_counter() - started
    if took > longest:
        print(longest := took, flush=True)
    time.sleep(0.001)
"""


def large_bodies(ground: Ground, count: int) -> str:
    """Bodies of the largest size that cost a parser most, while somebody else asks for little."""
    server = ground.serve()
    with (
        Pauses(server) as pauses,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):
        for index in range(count):
            name = list(ALL_STRUCTURE)[index % len(ALL_STRUCTURE)]
            response = client.post(
                "/generate",
                content=ALL_STRUCTURE[name],
                headers={"Content-Type": "application/json"},
            )
            assert response.status_code == 400, f"{response.status_code} for {name}"
    return f"400 each, {pauses.held()}"


ATTACKS = (
    Attack(
        "generated bodies",
        "a sound status for each, no traceback, /health stays 200",
        generated_bodies,
        short=300,
        long=20_000,
    ),
    Attack(
        "large bodies",
        f"400 each, nobody else waits {LONGEST_PAUSE:g} s",
        large_bodies,
        short=8,
        long=400,
    ),
    Attack(
        "much from little",
        f"a sound status for each, nobody else waits {LONGEST_PAUSE:g} s",
        much_from_little,
        short=6,
        long=120,
    ),
    Attack("deep nesting", "400 within 5 s each", deep_nesting, short=22, long=440),
)
