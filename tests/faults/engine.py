"""The engine's process: what is left when it is killed in the middle of its work."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx

from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground

CLIENTS = 4


def killed_engines(ground: Ground, count: int) -> str:
    """Kill it while clients generate; each time it has to come back, and everybody an answer."""
    server = ground.serve("--engine", "process", "--engine-restarts", str(count))
    stop = threading.Event()
    statuses: dict[int, int] = {}
    clients = [
        threading.Thread(target=_ask, args=(server.url, statuses, stop)) for _ in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    longest = 0.0
    try:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
            for kill in range(count):
                time.sleep(0.5)
                os.kill(_worker(server), signal.SIGKILL)
                killed = time.monotonic()
                while (
                    server.output.count("was started again") <= kill
                    or http.get("/health").status_code != 200
                ):
                    assert time.monotonic() - killed < 90, "it does not come back"
                    time.sleep(0.05)
                longest = max(longest, time.monotonic() - killed)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert statuses.keys() <= {200, 503}, statuses
    assert statuses.get(200), "nobody was answered"
    assert "Traceback" not in server.output
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    return f"{answers}; back after {longest:.1f} s at most"


def _ask(url: str, statuses: dict[int, int], stop: threading.Event) -> None:
    """Generate until told to stop; a status of 0 is a request without an answer."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        while not stop.is_set():
            try:
                status = http.post(
                    "/generate", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True}
                ).status_code
            except httpx.HTTPError:
                status = 0
            statuses[status] = statuses.get(status, 0) + 1
            if status != 200:
                time.sleep(0.1)


def _worker(server: ServedProcess) -> int:
    """The engine's process: of the server's children, the one that runs the worker."""
    for children in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            if b"logitd.service.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError("there is no process of the engine")


ATTACKS = (
    Attack(
        "killed engine processes",
        "200 or 503 for each request, and answers again after each kill",
        killed_engines,
        short=2,
        long=12,
    ),
)
