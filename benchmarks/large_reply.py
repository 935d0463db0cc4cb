"""Cost of a large reply of logits for the server and other clients.

    python -m benchmarks.large_reply [--threads N]

Serves a synthetic model with a vocabulary of 50,257 in a separate process, streams tokens from it,
and meanwhile requests the logits of all 1,024 positions of a prompt (206 MB as float32). Prints by
how much the reply increased the server's memory, and the time between two tokens of the stream
before and during the reply. The last line is JSON.
"""

import json
import statistics
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import new_parser
from benchmarks.footprint import resident
from benchmarks.started_server import StartedServer, started_server
from benchmarks.streams import gaps_between
from benchmarks.synthetic import save_synthetic
from logitd.model.transformer.shapes import gpt2_shape

CONTEXT, VOCABULARY = 1024, 50_257
PROMPT = [i % VOCABULARY for i in range(CONTEXT)]
REPLY_BYTES = CONTEXT * VOCABULARY * 4


def served(checkpoint: Path, threads: int) -> AbstractContextManager[StartedServer]:
    """Serve a checkpoint in a separate process."""
    return started_server(
        "--checkpoint", str(checkpoint.resolve()), "--slots", "4", "--threads", str(threads),
        "--dtype", "float32",
    )  # fmt: skip


class MemoryWatch:
    """Watches the largest resident memory of a process until `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before = self.peak = resident(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching. Returns the number of bytes by which the memory rose."""
        self._over.set()
        self._thread.join()
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, resident(self._pid))


class TokenWatch:
    """Reads a stream of tokens, and records the arrival time of each."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        body = {"prompt": [1], "max_tokens": CONTEXT - 1, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=600) as client:
            while not self._over.is_set():
                with client.stream("POST", "/generate", json=body) as reply:
                    for line in reply.iter_lines():
                        if line.startswith('data: {"id'):
                            self.times.append(time.perf_counter())
                        if self._over.is_set():
                            break


def ask(url: str, accept: str) -> tuple[float, float]:
    """Read the whole reply without keeping it. Returns the times at which it began and ended."""
    began, size = time.perf_counter(), 0
    body = {"prompt": PROMPT, "positions": "all"}
    with httpx.stream(
        "POST", f"{url}/logits", json=body, headers={"Accept": accept}, timeout=600
    ) as reply:
        reply.raise_for_status()
        for part in reply.iter_raw(2**20):
            size += len(part)
    assert size >= REPLY_BYTES or accept == "application/json", size
    return began, time.perf_counter()


def measure(url: str, pid: int, accept: str) -> dict[str, Any]:
    """Read one large reply while also reading a stream of tokens, and return the figures."""
    tokens = TokenWatch(url)
    while len(tokens.times) < 20:
        time.sleep(0.05)
    quiet = time.perf_counter()
    time.sleep(3)
    memory = MemoryWatch(pid)
    began, ended = ask(url, accept)
    rose = memory.stop()
    tokens.stop()
    before = gaps_between(tokens.times, quiet, began)
    during = gaps_between(tokens.times, began, ended)
    return {
        "accept": accept,
        "seconds": ended - began,
        "rose_mb": rose / 1e6,
        "token_ms_before": 1e3 * statistics.mean(before),
        "token_ms_during": 1e3 * statistics.mean(during),
        "tokens_during": len(during),
        "ratio": statistics.mean(during) / statistics.mean(before),
        "worst_gap_ms": 1e3 * max(during),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    arguments = parser.parse_args()
    config = gpt2_shape(
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        n_layer=arguments.layers,
        n_head=arguments.width // 64,
        d_model=arguments.width,
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_synthetic(Path(folder) / "wide", config)
        with served(checkpoint.path, arguments.threads) as server:
            ask(server.url, "application/x-npy")  # one-time allocations do not belong to a reply
            results = [
                measure(server.url, server.pid, accept)
                for accept in ("application/x-npy", "application/vnd.safetensors",
                               "application/json")
            ]  # fmt: skip
    heads = ("s", "rose MB", "ms/token", "during", "ratio", "worst")
    print(f"{'form':28} " + " ".join(f"{head:>8}" for head in heads))
    for result in results:
        figures = ("seconds", "rose_mb", "token_ms_before", "token_ms_during", "ratio",
                   "worst_gap_ms")  # fmt: skip
        print(f"{result['accept']:28} " + " ".join(f"{result[name]:8.2f}" for name in figures))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
