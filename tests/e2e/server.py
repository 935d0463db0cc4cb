"""A real `logitd serve` in a process of its own, for tests from the outside."""

import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx

from tests.zygote import ForkedProcess

STARTUP_SECONDS = 60
"""A start takes seconds; this long only on a machine that is busy with other things."""


class ServedProcess:
    """`logitd serve` on a free port of the loopback, from making this to leaving its block.
    Entering the block waits until it is ready."""

    def __init__(
        self,
        *flags: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: int | None = None,
        cold: bool = False,
    ) -> None:
        """`descriptors`: how many files and connections the process may have open.
        `cold`: by an interpreter of its own, as on a command line; not by the zygote."""
        # To a file: nobody empties a pipe while a test waits for an answer.
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
        """What it has printed so far."""
        return Path(self._log.name).read_text(encoding="utf-8")

    @property
    def address(self) -> str:
        """Where it listens, as far as it has said so."""
        port = re.search(r"listening on port (\d+)", self.output)
        return f"127.0.0.1:{port[1]}" if port else ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def sample(self, name: str) -> float:
        """The sum of a metric's series."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=STARTUP_SECONDS).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def wait_for(self, text: str) -> None:
        """Until it has printed this."""
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
        raise AssertionError(f"{text!r} did not come:\n{output}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait until it has ended."""
        return self.process.wait(timeout=STARTUP_SECONDS)

    def __enter__(self) -> "ServedProcess":
        self.wait_for("logitd is ready")
        self.wait_for("try it:")
        return self

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
            self.close()

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._log.close()


def _limit(descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
