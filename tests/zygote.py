"""A zygote: a process that has imported what `logitd` consists of, and forks to become a command.

To import torch and the service takes seconds of a core, and tests start commands by the dozen. A
fork has those modules and nothing else: from there on it is the command in a process of its own,
with arguments, an environment, a working directory, a limit of descriptors, standard streams,
signals, an exit code and the end of an interpreter. Each process of pytest has one zygote, which is
started by its first command and ends with it.

Not for tests of a start itself (how long it takes, what it imports, an interrupt meanwhile), of
resident memory, or of what differs from one interpreter to the next: those start a cold one.

    test --socket--> zygote --fork--> keeper --fork--> command
      ^------------- pid, exit code ----'

The keeper waits for the command and tells its exit code, so that the zygote serves on.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

from logitd.model.openmp import spin_variables
from logitd.service.cli import main as cli

COMMANDS = ("serve", "train", "generate", "bench")
BESIDES = (
    "httptools", "matplotlib.figure", "rustbpe", "uvicorn.lifespan.on", "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)  # fmt: skip
"""What these commands import when they begin to work."""


@dataclass(frozen=True)
class Command:
    """Arguments and surroundings of a process of `logitd`.

    descriptors  how many files and connections it may have open
    without      modules that are not installed for it
    """

    arguments: Sequence[str]
    cwd: str
    environment: Mapping[str, str]
    descriptors: int | None
    without: Sequence[str]


class ForkedProcess:
    """A command, in the terms of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: int | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """`stdout`, `stderr`: open descriptors. All others are those of a `Command`."""
        command = Command(
            arguments=tuple(map(str, arguments)),
            cwd=str(cwd or Path.cwd()),
            environment=dict(os.environ if environment is None else environment),
            descriptors=descriptors,
            without=without,
        )
        self.returncode: int | None = None
        self._told, tell = os.pipe()
        try:
            _send(_zygote()[0], command, [stdout, stderr, tell])
        finally:
            os.close(tell)
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._line())
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has one. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("logitd", timeout or 0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the process, if it is there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _line(self) -> bytes:
        """One line of what the keeper tells."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self._told, 1)
            assert piece, "the zygote is gone"
            line += piece
        return line


def completed(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    timeout: float = 100,
    without: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """A command from its beginning to its end, with what it printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = ForkedProcess(
            arguments, stdout=out.fileno(), stderr=err.fileno(), cwd=cwd, without=without
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, written(out), written(err))


def written(file: IO[str]) -> str:
    """All that a process wrote into a file that was opened here."""
    file.seek(0)
    return file.read()


@cache
def _zygote() -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """The way to the zygote of this process, and the zygote, which ends when that is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours, process


def end() -> None:
    """End the zygote of this process, if it has one."""
    if _zygote.cache_info().currsize:
        ours, process = _zygote()
        ours.close()
        process.wait()
        _zygote.cache_clear()


def _send(zygote: socket.socket, command: Command, descriptors: list[int]) -> None:
    body = json.dumps(asdict(command)).encode()
    socket.send_fds(zygote, [len(body).to_bytes(4, "little")], descriptors)
    zygote.sendall(body)


def _received(tests: socket.socket) -> tuple[Command, list[int]] | None:
    """The next command with its stdout, stderr and the keeper's pipe; None when nobody is left to
    send one."""
    size, descriptors, _, _ = socket.recv_fds(tests, 4, 3)
    if not size:
        return None
    with tests.dup().makefile("rb", buffering=0) as stream:
        body, wanted = b"", int.from_bytes(size, "little")
        while len(body) < wanted:
            body += stream.read(wanted - len(body)) or b""
    return Command(**json.loads(body)), descriptors


def _serve(tests: socket.socket) -> Command | None:
    """Fork for each command that is asked for. Returns it in its own process, and None in the
    zygote when there will be no other."""
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's are for the tests
    while (received := _received(tests)) is not None:
        command, (stdout, stderr, tell) = received
        if os.fork() == 0:
            tests.close()
            if (pid := os.fork()) == 0:
                os.close(tell)
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                os.close(stdout)
                os.close(stderr)
                signal.signal(signal.SIGINT, interrupts)
                return command
            _keep(pid, tell)
        for descriptor in (stdout, stderr, tell):
            os.close(descriptor)
        _bury()
    _bury()
    return None


def _bury() -> None:
    """Wait for the keepers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(pid: int, tell: int) -> None:
    """Tell who the command is and how it ends, holding no stream of its open."""
    os.write(tell, b"%d\n" % pid)
    os.closerange(0, tell)
    os.closerange(tell + 1, tell + 100)
    _, status = os.waitpid(pid, 0)
    os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(command: Command) -> None:
    """Run it, in this process, as `python -m logitd.service.cli.main` would."""
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.path[0] = command.cwd
    sys.argv[1:] = command.arguments
    if command.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (command.descriptors, command.descriptors))
    for name in command.without:
        sys.modules[name] = None  # type: ignore[assignment]  # what `import` takes for missing
    cli.main(command.arguments)


def main() -> None:
    # Importing numpy starts threads, which its own handlers of a fork take care of.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    os.environ.update(spin_variables(os.environ))
    for name in COMMANDS:
        cli.import_command(name)
    for name in BESIDES:
        importlib.import_module(name)
    command = _serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        _become(command)


if __name__ == "__main__":
    main()
