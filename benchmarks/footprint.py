"""Seconds until a server is ready, and its memory in addition to weights and KV cache.

    python -m benchmarks.footprint [--checkpoint DIRECTORY] [--threads N] [--slots N] [--starts N]
                                   [--dtype DTYPE] [--quantize KIND] [--ready-only]

The time is measured from the start of the process until the server reports that it is ready;
kernels are built beforehand. The median of several starts, one after the other, is printed. Memory
is the resident memory after the server has generated texts, has returned rows of logits and has
filled the whole context of every slot, minus the bytes of its weights and its KV cache. What
remains is Python, torch, the vocabulary and the service. The bytes of weights are computed from
their dtype, so the difference may be negative if they are quantized or compressed. The peak is the
largest resident memory at any time, loading included. Memory and peak are measured in the last
start. With `--ready-only` nothing is requested, and memory is measured when the server is ready.
The last line is JSON.
"""

import json
import re
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx

from benchmarks.arguments import new_parser
from benchmarks.started_server import started_server
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.options import Quantization

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
ASKED = 4
"""Number of requests of each kind that are sent before memory is measured."""


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    return _status(pid, "VmRSS")


def peak(pid: int) -> int:
    """Largest resident memory that a process ever had, in bytes."""
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = re.search(rf"{name}:\s+(\d+) kB", text)
    assert line is not None, "Linux reports it for every process"
    return int(line[1]) * 1024


def besides(held: int, info: dict[str, Any]) -> int:
    """Resident bytes that are neither weights nor KV cache; the server's /info gives the sizes of
    both."""
    return held - WIDTHS[info["dtype"]] * info["parameters"] - info["kv_cache_bytes"]


def ask(url: str) -> dict[str, Any]:
    """Request texts and rows of logits, then fill the whole context of every slot, because a cache
    takes memory only once it is used. Returns the server's /info."""
    with httpx.Client(base_url=url, trust_env=False, timeout=600) as http:
        for seed in range(ASKED):
            for path, body in (
                ("/generate", {"max_tokens": 20, "seed": seed, "n": 4, "ignore_eos": True}),
                ("/logits", {"positions": "all"}),
            ):
                http.post(path, json={"prompt": "import os", **body}).raise_for_status()
        info: dict[str, Any] = http.get("/info").json()
        longest = [0] * (info["limits"]["context_length"] - 1)
        full = {"prompt": longest, "max_tokens": 1, "n": info["slots"], "prefix_reuse": False}
        http.post("/generate", json=full).raise_for_status()
        return info


@dataclass(frozen=True, slots=True)
class Start:
    """Measurements of one server from its start to its end."""

    ready_seconds: float
    resident_bytes: int
    peak_bytes: int
    info: dict[str, Any]


def start(*flags: str, ready_only: bool) -> Start:
    began = time.monotonic()
    with started_server(*flags) as server:
        seconds = time.monotonic() - began
        info = (
            httpx.get(f"{server.url}/info", trust_env=False).json()
            if ready_only
            else ask(server.url)
        )
        return Start(seconds, resident(server.pid), peak(server.pid), info)


def measure(
    checkpoint: Path,
    threads: int,
    slots: int,
    starts: int,
    *,
    dtype: str = "auto",
    quantize: str = "none",
    ready_only: bool = False,
) -> dict[str, Any]:
    with suppress(KernelsUnavailable):
        load_library()
    flags = ["--checkpoint", str(checkpoint.resolve()), "--threads", str(threads),
             "--slots", str(slots), "--dtype", dtype, "--quantize", quantize]  # fmt: skip
    started = [start(*flags, ready_only=ready_only) for _ in range(starts)]
    last = started[-1]
    return {
        "checkpoint": checkpoint.name,
        "dtype": last.info["dtype"],
        "quantize": quantize,
        "slots": slots,
        "ready_seconds": statistics.median(server.ready_seconds for server in started),
        "each_ready_seconds": [server.ready_seconds for server in started],
        "resident_bytes": last.resident_bytes,
        "peak_bytes": last.peak_bytes,
        "besides_bytes": None if ready_only else besides(last.resident_bytes, last.info),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=get_args(Quantization), default="none")
    parser.add_argument("--ready-only", action="store_true")
    arguments = parser.parse_args()
    result = measure(
        arguments.checkpoint, arguments.threads, arguments.slots, arguments.starts,
        dtype=arguments.dtype, quantize=arguments.quantize, ready_only=arguments.ready_only,
    )  # fmt: skip
    kind = "" if arguments.quantize == "none" else f" in {arguments.quantize}"
    each = ", ".join(f"{seconds:.1f}" for seconds in sorted(result["each_ready_seconds"]))
    besides = ""
    if not arguments.ready_only:  # an unused cache takes no memory
        besides = f", {result['besides_bytes'] / 1e6:,.0f} MB in addition to weights and KV cache"
    print(f"{result['checkpoint']}, {result['dtype']}{kind}: "
          f"ready after {result['ready_seconds']:.1f} s ({each}), "
          f"{result['resident_bytes'] / 1e6:,.0f} MB resident "
          f"({result['peak_bytes'] / 1e6:,.0f} MB at its peak){besides}")  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
