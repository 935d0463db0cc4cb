"""Connection: starts the process that runs an owner's code, and asks it for logits.

The process gets the verified source files in a temporary folder, and the verified weight file as an
open file descriptor. It has no network access (`process/network.py`) and no environment variables
whose names begin with LOGITD_. If it ends, hangs or breaks the protocol, the request fails, and the
next request starts the process again.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.owner_code.config import CodeConfig
from logitd.model.owner_code.process.__main__ import PROBLEM, REQUEST, Job
from logitd.model.owner_code.process.build import Request
from logitd.model.owner_code.process.wire import Wire, floats

MODULE = "logitd.model.owner_code.process"
ROOT = Path(__file__).parents[3]
START_SECONDS, PASS_SECONDS = 300.0, 60.0
"""Time limits, in seconds, for starting the process and for a pass. If a limit is exceeded, the
process is killed."""
STDERR, STDERR_LINES, STDERR_BYTES = "stderr", 3, 2**20
"""The name of the file with the process's stderr, the number of its last lines that an error
message contains, and the size in bytes above which the file is emptied."""

Visit = Callable[[str, Tensor], Tensor]
"""Receives the name and the value (1, T, ...) of a stage, and returns the value to continue
with."""


class CodeError(Exception):
    """Raised if the owner's code or its process has failed. The message gives the reason."""


@dataclass(frozen=True)
class Wanted:
    """A sequence and its slot. The logits of the positions [first, end) are requested."""

    token_ids: Sequence[int]
    first: int
    end: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """The duration of a pass, in milliseconds, and the number of positions in that pass."""

    milliseconds: float
    length: int


def command(folder: Path, *more: str) -> list[str]:
    """The command line of the program that runs an owner's code. `folder` is the folder of its
    request."""
    return [sys.executable, "-B", "-m", MODULE, str(folder), *more]


def environment() -> dict[str, str]:
    """The environment variables for the process. Variables of logitd (LOGITD_...) are omitted,
    because they may contain keys."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOGITD_")}


def write_sources(folder: Path, sources: Mapping[str, bytes]) -> None:
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source)


def last_lines(text: str) -> str:
    """The last lines of a program's output, for a message."""
    return " / ".join(text.strip().splitlines()[-STDERR_LINES:])[:600]


@dataclass
class CodeModel:
    """A model that runs in a separate process. If the process has ended, the next request starts it
    again. Not thread-safe.

    sources   contents of the source files by name
    weights   the open weight file, whose hash the caller has verified. Each start of the process
              reads this file, even if a newer file has replaced it at its path
    threads   number of torch's threads in the process
    together  True to compute the sequences of a request in one batch, padded on the right
    seconds   time limit of a pass
    speed     duration of a pass, measured when the process starts
    """

    config: CodeConfig
    sources: Mapping[str, bytes]
    weights: FileIO
    threads: int
    together: bool = False
    seconds: float = PASS_SECONDS
    speed: Speed | None = field(default=None, init=False)
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _wire: Wire | None = field(default=None, init=False)
    _scratch: "tempfile.TemporaryDirectory[str] | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Not in `close`, after which the process may be started again.
        weakref.finalize(self, self.weights.close)

    def start(self) -> None:
        """Start the process unless it is running. Raises CodeError if the model cannot be
        created."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._scratch = tempfile.TemporaryDirectory(prefix="logitd-code-")
        folder = Path(self._scratch.name)
        write_sources(folder / "code", self.sources)
        (folder / REQUEST).write_text(json.dumps(asdict(self._job(folder))), encoding="utf-8")
        ours, theirs = socket.socketpair()
        with theirs, (folder / STDERR).open("ab") as stderr:
            self._process = subprocess.Popen(
                command(folder, str(theirs.fileno())),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno(), self.weights.fileno()],
                start_new_session=True,  # so that Ctrl-C does not stop it
                env=environment(),
            )
        self._wire = Wire(ours)
        header, _ = self._receive(START_SECONDS)
        ready = header["ready"]
        self.speed = Speed(ready["milliseconds"], ready["timed_length"])

    def logits(
        self,
        sequences: Sequence[Wanted],
        stages: Sequence[str] = (),
        visit: Visit = lambda name, value: value,
    ) -> Tensor:
        """Logits (rows, V) of the requested positions, one sequence after the other. If there are
        `stages`, there must be only one sequence, and `visit` is called for each stage. Raises
        CodeError."""
        self.start()
        header = {
            "lengths": [len(one.token_ids) for one in sequences],
            "firsts": [one.first for one in sequences],
            "ends": [one.end for one in sequences],
            "slots": [one.slot for one in sequences],
            "visit": list(stages),
        }
        ids = [token_id for one in sequences for token_id in one.token_ids]
        self._send(header, torch.tensor(ids, dtype=torch.int64))
        logits = self._logits(visit)
        self._empty_stderr()
        return logits

    def lens(self, stream: Tensor) -> Tensor:
        """Logits (P, V) that the final norm and the head compute from a stream (P, d). Raises
        CodeError."""
        self.start()
        self._send({"lens": list(stream.shape)}, stream)
        return self._logits(lambda name, value: value)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        if self._wire is not None:
            self._wire.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._wire = self._process = self._scratch = None

    def _job(self, folder: Path) -> Job:
        config = self.config
        request = Request(
            file=str(folder / "code" / config.file),
            expression=config.expression,
            call=config.call,
            chosen=asdict(config.values),
        )
        options = {
            "rows": config.rows,
            "vocabulary": config.vocab_size,
            "order": config.order,
            "together": self.together,
            "lens": config.lens,
            "context": config.context_length,
        }
        return Job(
            "serve", asdict(request), options, f"/dev/fd/{self.weights.fileno()}", self.threads
        )

    def _logits(self, visit: Visit) -> Tensor:
        while True:
            header, payload = self._receive(self.seconds)
            if "stage" not in header:
                return self._floats(payload, header.get("logits"))
            value = self._floats(payload, header.get("shape"))
            changed = visit(header["stage"], value)
            if changed is value:
                self._send({"changed": False})
            else:
                self._send({"changed": True}, changed)

    def _send(self, header: Mapping[str, Any], array: Tensor | None = None) -> None:
        assert self._wire is not None
        try:
            self._wire.send(header, array)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, seconds: float) -> tuple[dict[str, Any], bytearray]:
        assert self._wire is not None
        try:
            header, payload = self._wire.receive(seconds)
        except TimeoutError as error:
            self.close()
            raise CodeError(
                f"{self.config.code} did not answer within {seconds:.0f} seconds; its process was "
                "killed and will be restarted by the next request"
            ) from error
        except (EOFError, OSError, ValueError) as error:
            raise self._ended() from error
        if "error" in header:
            raise CodeError(f"{self.config.code}: {header['error']}")
        return header, payload

    def _floats(self, payload: bytearray, shape: Any) -> Tensor:
        try:
            return floats(payload, shape)
        except (TypeError, ValueError) as error:
            raise self._ended() from error

    def _empty_stderr(self) -> None:
        assert self._scratch is not None
        stderr = Path(self._scratch.name) / STDERR
        if stderr.stat().st_size > STDERR_BYTES:
            os.truncate(stderr, 0)

    def _ended(self) -> CodeError:
        """Kill the process if it is still running. Returns the error to raise after the process has
        ended or broken the protocol."""
        assert self._process is not None
        assert self._scratch is not None
        folder = Path(self._scratch.name)
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        problem = folder / PROBLEM
        stderr = (folder / STDERR).read_text(encoding="utf-8", errors="replace")
        said = problem.read_text(encoding="utf-8") if problem.is_file() else ""
        self.close()
        if said:
            return CodeError(f"{self.config.code}: {said}")
        lines = f": {last_lines(stderr)}" if stderr.strip() else ""
        return CodeError(
            f"the process of {self.config.code} ended with status {status}{lines}; it starts again "
            "with the next request"
        )
