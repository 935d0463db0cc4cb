"""Constraints: what slow ones do to those of others."""

import json
import threading
import time

import httpx

from tests.faults.attack import Attack, Ground
from tests.model.inference.constraints.test_sandbox import SLOW

ATTACKERS = 3
TIMEOUT = 2.0
"""Seconds that the server gives to a constraint."""


def slow_constraints(ground: Ground, count: int) -> str:
    """Clients that send one slow schema after another, half of them without waiting for the answer;
    and new regular expressions of somebody with the same address."""
    server = ground.serve("--constraint-timeout", f"{TIMEOUT:g}")
    stop = threading.Event()
    attackers = [
        threading.Thread(target=_attack, args=(server.url, index, stop))
        for index in range(ATTACKERS)
    ]
    for attacker in attackers:
        attacker.start()
    slowest = 0.0
    try:
        time.sleep(2 * TIMEOUT)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
            for index in range(count):
                started = time.perf_counter()
                body = {"prompt": "x", "max_tokens": 4, "regex": f"a{{{index + 1}}}b*"}
                response = client.post("/generate", json=body)
                slowest = max(slowest, time.perf_counter() - started)
                assert response.status_code == 200, response.text
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join()
    return f"{count} of {count} answered, {slowest:.2f} s at most"


def _attack(url: str, index: int, stop: threading.Event) -> None:
    """Slow schemas, each new, until told to stop; an impatient client leaves soon."""
    leaves = index % 2 == 0
    with httpx.Client(base_url=url, trust_env=False, timeout=0.3 if leaves else 30) as client:
        number = index
        while not stop.is_set():
            schema = {**json.loads(SLOW.text), "title": str(number)}
            number += ATTACKERS
            try:
                response = client.post(
                    "/generate", json={"prompt": "x", "max_tokens": 2, "json_schema": schema}
                )
            except httpx.TimeoutException:
                continue
            assert response.status_code in (400, 429), response.text


ATTACKS = (
    Attack(
        "slow constraints",
        "new regular expressions of others are compiled",
        slow_constraints,
        short=8,
        long=200,
    ),
)
