"""Server: a real `logitd serve` in a process of its own, for as long as it is measured.

It listens on the loopback, on a port that is free. No settings of the environment or of a .env file
reach it, only the flags that are given. It is ended when the block ends, however that comes: an
error, Ctrl-C, or a signal that would end this process.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[5]
START_SECONDS = 900.0
"""A start reads the weights, and may compile the native kernels first."""
END_SECONDS = 30.0
LOOK_SECONDS = 0.05
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ServerError(Exception):
    """The server did not start; the message has what it said."""


@dataclass(frozen=True, slots=True)
class StartedServer:
    url: str
    pid: int


@contextmanager
def started_server(*flags: str) -> Iterator[StartedServer]:
    """`logitd serve` with these flags, ready when the block begins. Paths in them are absolute: it
    runs in a folder of its own. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="logitd-bench-") as folder, _signals_as_exits():
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:  # to a file: nobody empties a pipe meanwhile
            process = subprocess.Popen(
                [sys.executable, "-m", "logitd", "serve", "--host", "127.0.0.1",
                 "--port", "0", "--drain-timeout", "0", *flags],
                cwd=folder,
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who end it
            )  # fmt: skip
        try:
            yield StartedServer(_url_when_ready(process, log), process.pid)
        finally:
            _end(process)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """That of this process less what sets a server up; these sources are found from any folder."""
    kept = {name: value for name, value in ours.items() if not name.startswith("LOGITD_")}
    paths = (str(ROOT), kept.get("PYTHONPATH", ""))
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _url_when_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while True:
        code = process.poll()  # before the log is read, so that its last words are in it
        said = log.read_text(encoding="utf-8", errors="replace")
        port = re.search(r"listening on port (\d+)", said)
        if port is not None and "try it:" in said:
            return f"http://127.0.0.1:{port[1]}"
        if code is not None:
            raise ServerError(f"the server ended with {code} before it was ready:\n{said}")
        if time.monotonic() > end:
            raise ServerError(f"the server was not ready after {START_SECONDS:g} s:\n{said}")
        time.sleep(LOOK_SECONDS)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:  # also when we are interrupted once more
        process.kill()
        process.wait()


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let signals that would end this process at once leave the block first. Those that somebody
    handles or ignores stay with them."""
    ours = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
