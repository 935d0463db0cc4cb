"""Slow readers of replies take no slots from other clients."""

import contextlib
import json
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from logitd.model.text.tokenizer import Tokenizer
from tests.e2e.server import ServedProcess
from tests.faults.measures import resident_mib, times
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import eventually

pytestmark = pytest.mark.slow

SLOTS = 4
POSITIONS = 1024
PIECE = 32 * 1024
"""Bytes per read of a slow reader."""
LONGEST = 10.0
"""Maximum time, in seconds, for an idle server to return four tokens."""


def test_slow_readers_take_no_slot_from_others(tmp_path: Path) -> None:
    """There are twice as many readers as slots, and each reads its rows far more slowly than they
    are computed."""
    flags = [*("--checkpoint", _wide_checkpoint(tmp_path), "--threads", "1")]
    flags += ["--slots", str(SLOTS), "--max-queue", "64"]
    stop = threading.Event()
    with ServedProcess(*flags, cold=True) as server:
        before = resident_mib(server)
        readers = [
            threading.Thread(target=_read_slowly, args=(server, index, stop))
            for index in range(2 * SLOTS)
        ]
        for reader in readers:
            reader.start()
        try:
            eventually(lambda: server.sample("logitd_kv_slots_used") == SLOTS, timeout=30)
            time.sleep(1)  # until the buffers of the sockets are full
            deadline = time.monotonic() + times(4, 120)
            with httpx.Client(base_url=server.url, trust_env=False, timeout=LONGEST) as client:
                while time.monotonic() < deadline:
                    body = {"prompt": [1], "max_tokens": 4}
                    assert client.post("/generate", json=body).status_code == 200
            assert resident_mib(server) - before < 512
        finally:
            stop.set()
            for reader in readers:
                reader.join()


def _read_slowly(server: ServedProcess, seed: int, stop: threading.Event) -> None:
    """Request the logits at every position of a prompt, and read about 100 kB/s until `stop` is
    set."""
    prompt = np.random.default_rng(seed).integers(0, 256, POSITIONS).tolist()
    body = json.dumps({"prompt": prompt, "positions": "all"}).encode()
    with server.connect(receive_buffer=PIECE, timeout=1) as raw:
        raw.sendall(
            b"POST /logits HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-npy\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        while not stop.wait(PIECE / 100_000):
            with contextlib.suppress(TimeoutError):
                if not raw.recv(PIECE):
                    return


def _wide_checkpoint(folder: Path) -> str:
    """A small model with a vocabulary as large as GPT-2's."""
    config = tiny_config(
        n_layer=1, d_model=16, n_head=1, vocab_size=50_000, context_length=POSITIONS
    )
    tokenizer = Tokenizer.without_text(config.vocab_size)
    return str(
        save_tiny_checkpoint(folder / "wide", gpt=tiny_gpt(config), tokenizer=tokenizer).path
    )
