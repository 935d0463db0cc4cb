"""Cost of putting Ray Serve between clients and a server.

    python -m benchmarks.ray_serve [--checkpoint PATH] [--threads N] [--rounds N] [--replicas N]

Compares the application alone (`logitd serve`) with the application behind Ray Serve on this
machine (`deploy/ray_serve.py`), with the same flags. Both run throughout the benchmark and get
requests alternately, so that other work on the machine affects both alike. Times are medians, and
ratios are medians of the ratios within a round. Memory is measured after the load: the sum over all
processes of a setup, with shared pages counted once (PSS). With `--replicas 2`, Ray gets two
replicas with half the threads each. Run it on an idle machine. The last line is JSON.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arguments import new_parser
from benchmarks.front_load import Felt, FrontLoad, medians, ratios
from benchmarks.peers.foreign_server import free_port
from benchmarks.started_server import started_server

ROOT = Path(__file__).parents[1]
MARK = "LOGITD_BENCHMARK_OF_RAY"
"""Environment variable by which Ray's processes are found, because they inherit it."""
READY_SECONDS = 180.0
REQUESTS, STREAMS, TOKENS = 100, 8, 128


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one setup, with or without Ray Serve: the clients' figures, the number of
    processes, and their memory."""

    felt: Felt
    processes: int
    mebibytes: float


@contextmanager
def on_ray(*flags: str) -> Iterator[tuple[str, list[int]]]:
    """Run `deploy.ray_serve` with these flags; yield its address and processes when it is ready.
    Raises RuntimeError if it does not start."""
    port = free_port()
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if "LOGITD_" not in name}
    environment |= {MARK: mark, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.ray_serve", "--port", str(port), *flags],
            env=environment, stderr=said, stdout=said, start_new_session=True,
        )  # fmt: skip
        try:
            end = time.monotonic() + READY_SECONDS
            while b"ready at" not in (text := os.pread(said.fileno(), 2**16, 0)):
                if process.poll() is not None or time.monotonic() > end:
                    output = text.decode(errors="replace")
                    raise RuntimeError(f"Ray Serve did not start:\n{output}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", processes_of(mark)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()


def processes_of(mark: str) -> list[int]:
    """Processes that inherited the environment variable MARK."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def held(processes: list[int]) -> float:
    """Memory of processes in MiB. A page shared by several processes is divided among them."""
    kilobytes = 0
    for pid in processes:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        line = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        assert line is not None, "Linux reports it for every process"
        kilobytes += int(line[1])
    return kilobytes / 1024


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()
    path, replicas = str(arguments.checkpoint.resolve()), arguments.replicas
    slots = ["--slots", str(STREAMS)]
    ray = [
        path, "--threads", str(max(1, arguments.threads // replicas)), *slots,
        "--min-replicas", str(replicas), "--max-replicas", str(replicas),
    ]  # fmt: skip
    flags = ["--checkpoint", path, "--threads", str(arguments.threads), *slots]
    alone, front = "logitd serve", "Ray Serve" + (f", {replicas} replicas" if replicas > 1 else "")
    load = FrontLoad(requests=REQUESTS, streams=STREAMS, tokens=TOKENS)
    with started_server(*flags) as server, on_ray(*ray) as (url, processes):
        pids = {alone: [server.pid], front: processes}
        first, second = load.compare((server.url, pids[alone]), (url, processes), arguments.rounds)
        results = {
            name: Measured(medians(felt), len(pids[name]), held(pids[name]))
            for name, felt in ((alone, first), (front, second))
        }
    compared = ratios(first, second)
    print(
        f"| | a request alone p50 | first token of {STREAMS} streams p50 | tokens/s | processes | "
        "memory | processor time |\n|---|---|---|---|---|---|---|"
    )
    for name, one in results.items():
        print(
            f"| {name} | {one.felt.alone_ms:.1f} ms | {one.felt.first_token_ms:.0f} ms | "
            f"{one.felt.tokens_per_second:.0f} | {one.processes} | {one.mebibytes:.0f} MiB | "
            f"{one.felt.processor_ms:.0f} ms |"
        )
    print("ratios", ", ".join(f"{figure} {ratio:.2f}" for figure, ratio in compared.items()))
    figures = {name: asdict(one) for name, one in results.items()}
    print(json.dumps({**figures, "ratios": compared}))


if __name__ == "__main__":
    main()
