"""Fork server of multiprocessing that has imported the modules of `logitd`.

Importing torch and the service takes seconds of processor time, and tests start dozens of commands.
A fork has these modules and acts as a command in its own process: with arguments, an environment, a
working directory, a limit on file descriptors, standard streams, signals and an exit code. Each
process of pytest has one fork server, which starts with its first command.

Do not use it for tests of the start itself (time, imports, interrupts), of resident memory, or of
differences between interpreters. Such tests need a cold process.
"""

import contextlib
import importlib
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any

from logitd.model.openmp import spin_variables
from logitd.service.cli import main as cli

COMMANDS = ("serve", "train", "generate", "bench")
USED = (
    "httptools", "matplotlib.figure", "rustbpe", "uvicorn.lifespan.on", "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)  # fmt: skip
"""Modules that the commands import only when they begin to work."""
PRELOADED = "tests.preloaded"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([PRELOADED])


class Descriptor:
    """An open descriptor. When it is sent to a fork, the fork gets its own duplicate."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> "tuple[Callable[[Any], Descriptor], tuple[Any]]":
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True)
class Command:
    """Arguments, standard streams, environment and limits of a `logitd` process.

    descriptors  limit on open files and connections
    without      modules that cannot be imported
    """

    arguments: Sequence[str]
    stdout: Descriptor
    stderr: Descriptor
    cwd: str
    environment: Mapping[str, str]
    descriptors: int | None
    without: Sequence[str]


class ForkedProcess:
    """A forked command with the interface of `subprocess.Popen`."""

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
        command = Command(
            arguments=tuple(map(str, arguments)),
            stdout=Descriptor(stdout),
            stderr=Descriptor(stderr),
            cwd=str(cwd or Path.cwd()),
            environment=dict(os.environ if environment is None else environment),
            descriptors=descriptors,
            without=without,
        )
        with contextlib.chdir(
            Path(__file__).parents[1]
        ):  # the folder in which the server finds its modules
            forkserver.ensure_running()
        self._process = FORKS.Process(target=_become, args=(command,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("logitd", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def completed(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    timeout: float = 100,
    without: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """A finished command, with its output."""
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
    """The output that a process has written to an open file."""
    file.seek(0)
    return file.read()


def preload() -> None:
    """Import the modules of the commands, in the fork server."""
    os.environ.update(spin_variables(os.environ))
    for name in COMMANDS:
        cli.import_command(name)
    for name in USED:
        importlib.import_module(name)


def _become(command: Command) -> None:
    """Run a command in this process, like `python -m logitd`."""
    for number, stream in enumerate((command.stdout, command.stderr), start=1):
        os.dup2(stream.number, number)
        os.close(stream.number)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.path[0] = command.cwd
    sys.argv[1:] = command.arguments
    if command.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (command.descriptors, command.descriptors))
    for name in command.without:
        sys.modules[name] = None  # type: ignore[assignment]  # `import` takes it for missing
    cli.main(command.arguments)
