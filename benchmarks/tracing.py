"""Cost of sending a trace for each request.

    python -m benchmarks.tracing [--checkpoint PATH] [--threads N] [--rounds N]

Two servers run throughout the benchmark, one with --otlp-endpoint and one without, and get the same
requests alternately: short requests one after the other, then many short streams together, for
which the spans cost most. The collector is a thread of this process that reads the spans and
replies. Ratios are computed within each round. Run it on an idle machine. The last line is JSON.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_parser
from benchmarks.front_load import FrontLoad, medians, ratios
from benchmarks.started_server import started_server

REQUESTS, STREAMS, TOKENS = 100, 64, 8


@contextmanager
def reading_collector() -> Iterator[str]:
    """Run a collector that discards everything. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    flags = ("--checkpoint", str(arguments.checkpoint.resolve()), "--slots", str(STREAMS),
             "--threads", str(arguments.threads))  # fmt: skip
    with (
        reading_collector() as collector,
        started_server(*flags) as without,
        started_server(*flags, "--otlp-endpoint", collector) as traced,
    ):
        load = FrontLoad(requests=REQUESTS, streams=STREAMS, tokens=TOKENS)
        off, on = load.compare(
            (without.url, [without.pid]), (traced.url, [traced.pid]), arguments.rounds
        )
    print(f"{REQUESTS} requests alone, then {STREAMS} streams of {TOKENS} tokens")
    for name, felt in (("without", medians(off)), ("with", medians(on))):
        print(
            f"{name:8} alone {felt.alone_ms:6.2f} ms, first {felt.first_token_ms:6.1f} ms, "
            f"{felt.tokens_per_second:6.0f} tokens/s, {felt.processor_ms:5.0f} ms of processors"
        )
    both = ratios(off, on)
    print("with traces,", ", ".join(f"{name} times {ratio:.3f}" for name, ratio in both.items()))
    print(json.dumps({"off": asdict(medians(off)), "on": asdict(medians(on)), "ratios": both}))


if __name__ == "__main__":
    main()
