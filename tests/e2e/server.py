"""A real `logitd serve` in a process of its own, for tests from the outside."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

STARTUP_SECONDS = 60
"""A start takes seconds; this long only on a machine that is busy with other things."""


class ServedProcess:
    """`logitd serve` on a free port of the loopback, from entering the block to leaving it."""

    def __init__(self, *flags: str) -> None:
        # To a file: nobody empties a pipe while a test waits for an answer.
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--port", "0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.address = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return Path(self._log.name).read_text(encoding="utf-8")

    def __enter__(self) -> "ServedProcess":
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(r"service\s+http://(127\.0\.0\.1:\d+)", self.output):
                self.address = found[1]
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not become ready:\n{self.output}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self._log.close()
