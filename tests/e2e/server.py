"""A real `logitd serve` process."""

import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import httpx

from tests.zygote import ForkedProcess

STARTUP_SECONDS = 60
"""Time limit for startup, long enough for a busy machine."""


class ServedProcess:
    """A `logitd serve` process on a free loopback port. It starts when this object is created. The
    `with` block begins once the server is ready, and the process is killed at the end of the
    block."""

    def __init__(
        self,
        *flags: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: int | None = None,
        cold: bool = False,
    ) -> None:
        """`descriptors`: limit on open files and connections. `cold`: start a new interpreter, as
        on a command line, instead of forking."""
        # A file, because a full pipe would block the server.
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        arguments = ("serve", "--port", "0", *flags)
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if cold:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "logitd", *arguments],
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
                preexec_fn=None if descriptors is None else partial(_limit, descriptors),
            )
        else:
            log = self._log.fileno()
            self.process = ForkedProcess(
                arguments, stdout=log, stderr=log, cwd=cwd, environment=environment,
                descriptors=descriptors,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """The output so far."""
        return Path(self._log.name).read_text(encoding="utf-8")

    @property
    def address(self) -> str:
        """Host and port, as soon as they are printed."""
        port = re.search(r"listening on port (\d+)", self.output)
        return f"127.0.0.1:{port[1]}" if port else ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self, receive_buffer: int | None = None, timeout: float = 60) -> socket.socket:
        """A raw connection. With a small receive buffer, the server soon notices a slow reader."""
        return raw_connection(int(self.address.partition(":")[2]), receive_buffer, timeout)

    def sample(self, name: str) -> float:
        """The sum of a metric's series."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=STARTUP_SECONDS).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def wait_for(self, text: str) -> None:
        """Wait until the output contains a text."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if text in self.output:
                return
            if ended:
                break
            time.sleep(0.02)
        output = self.output
        self.close()
        raise AssertionError(f"{text!r} is not in the output:\n{output}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for the exit code."""
        return self.process.wait(timeout=STARTUP_SECONDS)

    def __enter__(self) -> "ServedProcess":
        self.wait_for("logitd is ready")
        self.wait_for("try it:")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self._log.close()


def raw_connection(
    port: int, receive_buffer: int | None = None, timeout: float = 60
) -> socket.socket:
    """A connection to a loopback port."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(timeout)
    raw.connect(("127.0.0.1", port))
    return raw


def _limit(descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
