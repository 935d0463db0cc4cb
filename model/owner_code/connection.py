"""Connection: starts the process that runs an owner's code, and exchanges frames with it.

For an import, the process runs once, to compute logits for random ids or to measure facts. The
process has no network access (`process/network.py`) and no environment variables whose names
begin with LOGITD_. A `CodeModel` gives it the verified source files in a temporary folder, and the
verified weight file as an open file descriptor. If this process ends, hangs or breaks the protocol,
the request fails, and the next request starts the process again.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.owner_code.config import CodeConfig
from logitd.model.owner_code.process.__main__ import REQUEST, WEIGHTS, Job
from logitd.model.owner_code.process.build import Request
from logitd.model.owner_code.process.wire import Wire

MODULE = "logitd.model.owner_code.process"
ROOT = Path(__file__).parents[3]
START_SECONDS, PASS_SECONDS = 300.0, 60.0
"""Time limits, in seconds, for starting the process or running a job, and for a pass. If a limit is
exceeded, the process is killed."""
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
    """A sequence and its slot, whose cached state is used; without a slot, none is. The logits of
    the positions [first, end) are requested. A sequence that continues a prompt has the length of
    the `prompt`; the last request of its slot was the sequence without its last id."""

    token_ids: Sequence[int]
    first: int
    end: int
    slot: int | None = None
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """The duration of a pass, in milliseconds, and the number of positions in that pass."""

    milliseconds: float
    length: int


def request_to_repeat(config: CodeConfig, folder: Path) -> Request:
    """The request to create a model again, with the source files in `folder`."""
    return Request(
        file=str(folder / config.file),
        expression=config.expression,
        call=config.call,
        chosen=asdict(config.values),
    )


def write_sources(folder: Path, sources: Mapping[str, bytes]) -> None:
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source)


class CodeProcess:
    """A process that runs an owner's code.

    name     the owner's code, for messages
    folder   folder of the process, which is removed with it
    job      the request to the program
    files    open files that the process inherits
    """

    def __init__(
        self, name: str, folder: "tempfile.TemporaryDirectory[str]", job: Job, *files: int
    ) -> None:
        self._name, self._scratch = name, folder
        self.folder = Path(folder.name)
        (self.folder / REQUEST).write_text(json.dumps(asdict(job)), encoding="utf-8")
        ours, theirs = socket.socketpair()
        with theirs, (self.folder / STDERR).open("ab") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-B", "-m", MODULE, folder.name, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno(), *files],
                start_new_session=True,  # so that Ctrl-C does not stop it
                env={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("LOGITD_")  # they may contain keys
                },
            )
        self._wire = Wire(ours)

    def send(self, header: Mapping[str, Any], array: Tensor | None = None) -> None:
        try:
            self._wire.send(header, array)
        except OSError as error:
            raise self.ended() from error

    def receive(self, seconds: float) -> tuple[dict[str, Any], Tensor]:
        """The next frame. Raises CodeError if the owner's code has failed, if the process has ended
        or broken the protocol, or, after the process was killed, if it took longer than
        `seconds`."""
        try:
            header, array = self._wire.receive(seconds)
        except TimeoutError as error:
            self.close()
            raise CodeError(
                f"{self._name} did not answer within {seconds:.0f} seconds; its process was "
                "killed. Does the file contain a long computation that the model does not need?"
            ) from error
        except (EOFError, OSError, ValueError) as error:
            raise self.ended() from error
        if "error" in header:
            raise CodeError(f"{self._name}: {header['error']}")
        return header, array

    def empty_stderr(self) -> None:
        """Empty the file with the process's stderr if it is large."""
        stderr = self.folder / STDERR
        with suppress(FileNotFoundError):  # a cleanup of temporary files may have removed it
            if stderr.stat().st_size > STDERR_BYTES:
                os.truncate(stderr, 0)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._wire.close()
        self.popen.kill()
        self.popen.wait()
        self._scratch.cleanup()

    def ended(self) -> CodeError:
        """Close the process, and return the error to raise after it has ended or broken the
        protocol."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(1)
        self.popen.kill()
        status = self.popen.wait()
        stderr = ""
        with suppress(FileNotFoundError):
            stderr = (self.folder / STDERR).read_text(encoding="utf-8", errors="replace").strip()
        self.close()
        lines = " / ".join(stderr.splitlines()[-STDERR_LINES:])[:600]
        return CodeError(
            f"the process of {self._name} ended with status {status}{lines and ': '}{lines}"
        )


@dataclass(frozen=True)
class Comparison:
    """Ids and the logits of the owner's model for them.

    token_ids  two sequences of random ids, and one of ids that are often special (3, T)
    logits     their logits (3, T, V)
    changed    their logits after the last id of each was replaced
    long_ids   a longer sequence (1, L)
    late       logits (1, N, V) of the last positions of the longer sequence
    kept       the code's own values of parameters that nothing in the request has replaced
    """

    token_ids: Tensor
    logits: Tensor
    changed: Tensor
    long_ids: Tensor
    late: Tensor
    kept: Mapping[str, Any]


def compare(
    name: str,
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    rows: int,
    length: int,
    longest: int = 0,
    special_ids: Collection[int] = (),
    timeout: float = START_SECONDS,
) -> Comparison:
    """Run the owner's model on sequences of `length` ids below `rows`, two of random ids and one or
    more of ids that may be special, such as `special_ids`, and on one of up to `longest` ids.
    `name` is the owner's code, for messages. Raises CodeError."""
    options = {"rows": rows, "length": length, "longest": longest, "special_ids": [*special_ids]}
    job = Job("compare", asdict(request), options)
    with _running_job(name, job, weights) as process:
        header, (logits, changed) = process.receive(timeout)
        long, late = process.receive(timeout)
    ids, long_ids = (torch.tensor(each["token_ids"]) for each in (header, long))
    return Comparison(ids, logits, changed, long_ids, late, header["kept"])


def measure(
    name: str,
    request: Request,
    weights: Mapping[str, Tensor],
    *,
    context: int | None,
    lens: Sequence[str] | None,
) -> dict[str, Any]:
    """Measure the facts of a model (`process/measure.py`). `name` is the owner's code, for
    messages. Raises CodeError."""
    job = Job("measure", asdict(request), {"context": context, "lens": lens})
    with _running_job(name, job, weights) as process:
        return process.receive(START_SECONDS)[0]


def storable(tensor: Tensor) -> Tensor:
    """A copy that safetensors can store: it has complex numbers of 32-bit floats only."""
    copy = tensor.to(torch.complex64) if tensor.is_complex() else tensor.clone()
    return copy.contiguous()


@contextmanager
def _running_job(name: str, job: Job, weights: Mapping[str, Tensor]) -> Iterator[CodeProcess]:
    own = {name: storable(tensor) for name, tensor in weights.items()}
    scratch = tempfile.TemporaryDirectory(prefix="logitd-code-")
    try:
        save_file(own, Path(scratch.name) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        scratch.cleanup()
        raise CodeError(
            f"{name} cannot run, because its weights cannot be written to {scratch.name}: {error}; "
            "free space there, or set TMPDIR to another folder"
        ) from error
    process = CodeProcess(name, scratch, job)
    try:
        yield process
    finally:
        process.close()


@dataclass
class CodeModel:
    """A model that runs in a separate process. If the process has ended, the next request starts it
    again. Not thread-safe.

    sources   contents of the source files by name
    weights   the open weight file, whose hash the caller has verified. Each start of the process
              reads this file, even if a newer file has replaced it at its path
    threads   number of torch's threads in the process
    together  True to compute the sequences of a request in one batch, padded on the right
    seconds   time limit of a pass, or of the passes that compute a lost state again
    speed     duration of a pass, measured when the process starts
    """

    config: CodeConfig
    sources: Mapping[str, bytes]
    weights: FileIO
    threads: int
    together: bool = False
    seconds: float = PASS_SECONDS
    speed: Speed | None = field(default=None, init=False)
    _process: CodeProcess | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Not in `close`, after which the process may be started again.
        weakref.finalize(self, self.weights.close)

    def start(self) -> CodeProcess:
        """Start the process unless it is running. Raises CodeError if the model cannot be
        created."""
        if self._process is not None and self._process.popen.poll() is None:
            return self._process
        self.close()
        scratch = tempfile.TemporaryDirectory(prefix="logitd-code-")
        folder, weights = Path(scratch.name), self.weights.fileno()
        write_sources(folder / "code", self.sources)
        process = CodeProcess(self.config.code, scratch, self._job(folder, weights), weights)
        self._process = process
        try:
            ready = process.receive(START_SECONDS)[0]["ready"]
        except CodeError:
            self.close()
            raise
        self.speed = Speed(ready["milliseconds"], ready["timed_length"])
        return process

    def logits(
        self,
        sequences: Sequence[Wanted],
        stages: Sequence[str] = (),
        visit: Visit = lambda name, value: value,
    ) -> Tensor:
        """Logits (rows, V) of the requested positions, one sequence after the other. If there are
        `stages`, there must be only one sequence, and `visit` is called for each stage. Raises
        CodeError."""
        process = self.start()
        header = {
            "lengths": [len(one.token_ids) for one in sequences],
            "firsts": [one.first for one in sequences],
            "ends": [one.end for one in sequences],
            "slots": [one.slot for one in sequences],
            "prompts": [one.prompt for one in sequences],
            "visit": list(stages),
        }
        ids = [token_id for one in sequences for token_id in one.token_ids]
        process.send(header, torch.tensor(ids, dtype=torch.int64))
        logits = self._logits(process, visit)
        process.empty_stderr()
        return logits

    def lens(self, stream: Tensor) -> Tensor:
        """Logits (P, V) that the final norm and the head compute from a stream (P, d). Raises
        CodeError."""
        process = self.start()
        process.send({"lens": True}, stream)
        return self._logits(process, lambda name, value: value)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _job(self, folder: Path, weights: int) -> Job:
        config, request = self.config, request_to_repeat(self.config, folder / "code")
        options = {
            "rows": config.rows,
            "vocabulary": config.vocab_size,
            "order": config.order,
            "together": self.together,
            "lens": config.lens,
            "context": config.context_length,
        }
        return Job("serve", asdict(request), options, f"/dev/fd/{weights}", self.threads)

    def _logits(self, process: CodeProcess, visit: Visit) -> Tensor:
        while True:
            header, value = process.receive(self.seconds)
            if "stage" not in header:
                return value
            changed = visit(header["stage"], value)
            if changed is value:
                process.send({"changed": False})
            else:
                process.send({"changed": True}, changed)
