"""Bodies: what a caller can put into a request to make the server work, grow or fail."""

import random
import time

import httpx

from tests.faults.attack import Attack, Ground

PIECES = (
    '"prompt"', '"max_tokens"', '"a"', "[", "]", "{", "}", ":", ",", "1e400", "NaN", "-1",
    "1" * 400, "null", "true", '"\\ud800"', '"seed"', '"stop"', '""', " ",
)  # fmt: skip
PATHS = (
    "/generate", "/probs", "/score", "/logits", "/hidden_states", "/attention", "/tokenize",
    "/detokenize", "/v1/completions", "/v1/chat/completions",
)  # fmt: skip


def generated_bodies(ground: Ground, count: int) -> str:
    """Pieces of JSON put together at random, to every endpoint."""
    server = ground.serve()
    generator = random.Random(0)
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        for _ in range(count):
            body = "".join(generator.choices(PIECES, k=generator.randrange(1, 30)))
            if generator.random() < 0.7:
                body = '{"prompt": ' + body + "}"
            response = client.post(
                generator.choice(PATHS),
                content=body.encode(),
                headers={"Content-Type": "application/json"},
            )
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400), f"{response.status_code} for {body}"
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.output
    return ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))


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


ATTACKS = (
    Attack(
        "generated bodies",
        "200 or 400 for each, no traceback, /health stays 200",
        generated_bodies,
        short=300,
        long=20_000,
    ),
    Attack("deep nesting", "400 within 5 s each", deep_nesting, short=22, long=440),
)
