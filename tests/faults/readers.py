"""Readers: what a client can do to others by reading slowly, or not at all."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from logitd.model.text.tokenizer import Tokenizer
from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground, resident_mib
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

SLOTS = 4
POSITIONS = 1024
PIECE = 32 * 1024
"""Bytes that a slow reader takes at a time."""
LONGEST = 10.0
"""Seconds in which a server with nothing else to compute gives four tokens."""


def slow_readers_of_large_replies(ground: Ground, seconds: int) -> str:
    """More readers than slots, each at a fraction of what is computed; the others want a token."""
    server = ground.serve(
        *("--slots", str(SLOTS), "--max-queue", "64"),
        checkpoint=_wide_checkpoint(ground.folder),
        cold=True,
    )
    before = resident_mib(server)
    stop = threading.Event()
    readers = [
        threading.Thread(target=_read_slowly, args=(server, index, stop))
        for index in range(2 * SLOTS)
    ]
    slowest, answered = 0.0, 0
    for reader in readers:
        reader.start()
    try:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
            _wait_for_slots(client)
            time.sleep(1)  # until what the sockets hold is full
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                slowest = max(slowest, _generate(client, [1]))
                answered += 1
            grown = resident_mib(server) - before
            quick = client.post(
                "/logits",
                json={"prompt": _prompt(99), "positions": "all"},
                headers={"Accept": "application/x-npy"},
                timeout=60,
            )
            assert quick.status_code == 200
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert grown < 512, f"the server grew by {grown:.0f} MiB"
    return (
        f"{answered} generations, {slowest:.2f} s at most; a quick reader of as many rows got "
        f"{len(quick.content) / 2**20:.0f} MiB; the server grew by {grown:.0f} MiB"
    )


def an_interrupted_reader_gets_the_same_bits(ground: Ground, count: int) -> str:
    """A reader that is slow while others take its slot; and the same request alone."""
    server = ground.serve(
        "--slots", "1", "--max-queue", "64", checkpoint=_wide_checkpoint(ground.folder)
    )
    evictions = 0.0
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for index in range(count):
            body = {"prompt": _prompt(index), "positions": "all"}
            headers = {"Accept": "application/x-npy"}
            parts = []
            with client.stream("POST", "/logits", json=body, headers=headers) as reply:
                for part in reply.iter_raw():
                    parts.append(part)
                    if len(parts) % 64 == 0:  # the slot is somebody else's in between
                        _generate(client, [len(parts)])
            alone = client.post("/logits", json=body, headers=headers)
            assert b"".join(parts) == alone.content, "other bits than without the others"
        evictions = _metric(client, "logitd_sequences_evicted_total")
    assert evictions, "nobody lost a slot: the test shows nothing"
    return f"{count} replies, the same bytes each; {evictions:.0f} evictions"


def _read_slowly(server: ServedProcess, index: int, stop: threading.Event) -> None:
    """Ask for every row of a prompt, and read about 100 kB/s until told to stop."""
    body = json.dumps({"prompt": _prompt(index), "positions": "all"}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        host, _, port = server.address.partition(":")
        raw.settimeout(1)
        raw.connect((host, int(port)))
        raw.sendall(
            b"POST /logits HTTP/1.1\r\nHost: a\r\nAccept: application/x-npy\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        while not stop.wait(PIECE / 100_000):
            with contextlib.suppress(TimeoutError):
                if not raw.recv(PIECE):
                    return


def _generate(client: httpx.Client, prompt: list[int]) -> float:
    """Seconds until there were four tokens; AssertionError where there were none in time."""
    started = time.perf_counter()
    try:
        response = client.post(
            "/generate", json={"prompt": prompt, "max_tokens": 4}, timeout=LONGEST
        )
    except httpx.TimeoutException as error:
        raise AssertionError(f"no four tokens within {LONGEST} s") from error
    assert response.status_code == 200, response.text
    return time.perf_counter() - started


def _wait_for_slots(client: httpx.Client) -> None:
    """Until every slot is taken."""
    deadline = time.monotonic() + 30
    while _metric(client, "logitd_kv_slots_used") < SLOTS:
        assert time.monotonic() < deadline, "the readers do not get their slots"
        time.sleep(0.05)


def _metric(client: httpx.Client, name: str) -> float:
    """A value of /metrics, of the one model that is served."""
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).split()[-1])


def _prompt(index: int) -> list[int]:
    generator = np.random.default_rng(index)
    ids: list[int] = generator.integers(0, 256, POSITIONS).tolist()
    return ids


def _wide_checkpoint(folder: Path) -> Path:
    """A model of little arithmetic whose rows are as wide as those of GPT-2."""
    path = folder / "wide"
    if not path.exists():
        config = tiny_config(n_layer=1, d_model=16, n_head=1, vocab_size=50_000,
                             context_length=POSITIONS)  # fmt: skip
        tokenizer = Tokenizer.without_text(config.vocab_size)
        save_tiny_checkpoint(path, gpt=tiny_gpt(config), tokenizer=tokenizer)
    return path


ATTACKS = (
    Attack(
        "slow readers of large replies",
        "generations of others within 10 s each, memory within 512 MiB",
        slow_readers_of_large_replies,
        short=4,
        long=120,
    ),
    Attack(
        "a reader that loses its slot",
        "the same bytes as without the others",
        an_interrupted_reader_gets_the_same_bits,
        short=2,
        long=40,
    ),
)
