"""Started server: runs `logitd serve` in a separate process for the duration of a block.

The server listens on a free port of the loopback interface. It gets its settings only from its
flags, not from the environment or a .env file. It ends with the block, even after an error or a
signal.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]


class ServerError(Exception):
    """Raised if the server did not start. The message contains the server's output."""


@dataclass(frozen=True, slots=True)
class StartedServer:
    url: str
    pid: int


@contextmanager
def started_server(*flags: str) -> Iterator[StartedServer]:
    """Start `logitd serve` with these flags, and yield its URL and process id once it is ready.
    Paths in flags must be absolute, because the server runs in a separate folder. Call it only in
    the main thread. Raises ServerError."""
    environment = {k: value for k, value in os.environ.items() if not k.startswith("LOGITD_")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    words = ["serve", "--host", "127.0.0.1", "--port", "0", "--drain-timeout", "0", *flags]
    before = {
        number: signal.signal(number, _exit)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # as SIGHUP is under nohup
    }
    with tempfile.TemporaryDirectory(prefix="logitd-server-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "logitd", *words],
                cwd=folder,
                env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        try:
            yield StartedServer(_url_when_ready(process, log), process.pid)
        finally:
            process.terminate()
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _url_when_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the server's banner is complete, which takes longer if kernels must be compiled
    first. Returns the server's URL."""
    while True:
        code = process.poll()  # before the log is read, so that the log is complete
        said = log.read_text(encoding="utf-8", errors="replace")
        port = re.search(r"listening on port (\d+)", said)
        if port is not None and "try it:" in said:
            return f"http://127.0.0.1:{port[1]}"
        if code is not None:
            raise ServerError(f"the server exited with code {code} before it was ready:\n{said}")
        time.sleep(0.05)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
