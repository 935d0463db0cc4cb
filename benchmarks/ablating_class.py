"""Measures the slowdown of streams while a classroom of other clients ablates heads.

    python -m benchmarks.ablating_class [--threads N] [--checkpoint DIR] [--clients 20]

Serves a checkpoint in a separate process and reads streams from it. Then a classroom of clients
requests next-token probabilities. Each client has its own prompt, ablates the heads in turn, one in
each request, and sends its next request as soon as it gets a reply. Prints the time between two
tokens of a stream, before and during these requests, and the number of the classroom's requests
that complete per second. Compares every complete stream, bit for bit, with the same request sent
alone. The last line is JSON.
"""

import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import new_parser
from benchmarks.started_server import started_server
from benchmarks.streams import gaps_between

ROOT = Path(__file__).parent.parent
SECONDS = 6.0
"""Duration in seconds of each of the two measurements: before and during the ablations."""
MAX_TOKENS = 400


class Reader:
    """Reads the same stream again and again, and records the tokens and their arrival times."""

    def __init__(self, url: str, seed: int, over: threading.Event) -> None:
        self.times: list[float] = []
        self.texts: list[str] = []  # complete streams: ids and logprobs as JSON
        self._url = url
        self._over = over
        self._body = {
            "prompt": f"def function_{seed}(",
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
        }

    def alone(self) -> str:
        """Read the stream once, while nothing else runs."""
        with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client:
            return self._read(client)

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client:
            while not self._over.is_set():
                text = self._read(client)
                if not self._over.is_set():
                    self.texts.append(text)

    def _read(self, client: httpx.Client) -> str:
        tokens: list[Any] = []
        with client.stream("POST", "/generate", json={**self._body, "stream": True}) as reply:
            for line in reply.iter_lines():
                if not line.startswith('data: {"id'):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    new = choice["tokens"] or []
                    self.times += [time.perf_counter()] * len(new)
                    tokens += [(token["id"], token["logprob"]) for token in new]
                if self._over.is_set():
                    break
        return json.dumps(tokens)


def ablate(url: str, client: int, heads: list[tuple[int, int]], over: threading.Event) -> int:
    """Request probabilities again and again, each time with a different head ablated. Returns the
    number of replies."""
    answered = 0
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while not over.is_set():
            layer, head = heads[(client + answered) % len(heads)]
            change = {"stage": f"blocks.{layer}.attention.heads", "heads": [head]}
            body = {
                "prompt": f"class Client{client}:\n    def __init__(self, value):\n        self.",
                "interventions": [{**change, "operation": "zero"}],
            }
            reply = http.post("/probs", json=body)
            if reply.status_code == 429:
                time.sleep(float(reply.headers["Retry-After"]))
                continue
            reply.raise_for_status()
            answered += 1
    return answered


def measure(url: str, clients: int, streams: int) -> dict[str, Any]:
    """Measure the streams for SECONDS alone, then for SECONDS while the classroom sends
    requests."""
    config = httpx.get(f"{url}/info", trust_env=False).json()["config"]
    heads = [
        (layer, head) for layer in range(config["n_layer"]) for head in range(config["n_head"])
    ]
    over = threading.Event()
    readers = [Reader(url, seed, over) for seed in range(streams)]
    expected = [reader.alone() for reader in readers]
    for reader in readers:
        reader.times.clear()
    with ThreadPoolExecutor(clients + streams) as pool:
        reading = [pool.submit(reader.run) for reader in readers]
        time.sleep(1)
        quiet = time.perf_counter()
        time.sleep(SECONDS)
        began = time.perf_counter()
        asking = [pool.submit(ablate, url, client, heads, over) for client in range(clients)]
        time.sleep(SECONDS)
        ended = time.perf_counter()
        over.set()
        answered = sum(task.result() for task in asking)
        for task in reading:
            task.result()
    before = [gap for reader in readers for gap in gaps_between(reader.times, quiet, began)]
    during = [gap for reader in readers for gap in gaps_between(reader.times, began, ended)]
    whole = [
        (text, alone)
        for reader, alone in zip(readers, expected, strict=True)
        for text in reader.texts
    ]
    return {
        "clients": clients,
        "streams": streams,
        "token_ms_before": 1e3 * statistics.mean(before),
        "token_ms_during": 1e3 * statistics.mean(during),
        "ratio": statistics.mean(during) / statistics.mean(before),
        "p99_ms_before": 1e3 * statistics.quantiles(before, n=100)[-1],
        "p99_ms_during": 1e3 * statistics.quantiles(during, n=100)[-1],
        "ablations_per_second": answered / (ended - began),
        "streams_compared": len(whole),
        "streams_with_other_bits": sum(text != alone for text, alone in whole),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints" / "python-small")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--streams", type=int, default=4)
    arguments = parser.parse_args()
    flags = ("--checkpoint", str(arguments.checkpoint.resolve()), "--slots", "32",
             "--threads", str(arguments.threads))  # fmt: skip
    with started_server(*flags) as server:
        result = measure(server.url, arguments.clients, arguments.streams)
    for name, value in result.items():
        print(f"{name:24} {value:10.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
