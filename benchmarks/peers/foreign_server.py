"""Starts the server process of another project, waits until it is ready, and ends it with its child
processes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

READY_SECONDS, LOOK_SECONDS, END_SECONDS = 900.0, 0.2, 20.0
"""In seconds: time limit of a start, in which vLLM compiles its model; pause between two checks of
whether the server is ready; time limit for the server to end."""


class ServerMissing(Exception):
    """Raised if the server did not start. If the server exited, the message contains the end of its
    output."""


def free_port() -> int:
    """A port that is free now. Not every server can choose a port and report it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def foreign_server(
    command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the URL of the server that `command` starts on `port`, once it is ready. Raises
    ServerMissing."""
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # to end its child processes too
            )
        except OSError as error:
            raise ServerMissing(f"{command[0]} cannot be started: {error}") from error
    try:
        wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the leader of a process group, then kill what is left of the group."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:  # even after another interrupt
        with suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    with httpx.Client(trust_env=False, timeout=5) as http:
        while True:
            try:
                if http.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                code = process.poll()
                if code is not None:
                    last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                    raise ServerMissing(f"the server exited with code {code}:\n{last}") from None
            if time.monotonic() > end:
                raise ServerMissing(f"the server was not ready after {READY_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)
