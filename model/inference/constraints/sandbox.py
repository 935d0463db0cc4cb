"""Sandbox: a process for each trial of a constraint, which may crash, hang or grow.

llguidance bounds what most grammars cost, and not all: with version 1.9.1 a chain of a thousand
rules in brackets overflows the stack, a few kilobytes of `multipleOf` compile for minutes, and as
many of `.?` take a gigabyte. A thread can be neither stopped nor survived. So a source is compiled
on trial in a process, before it is compiled where its masks are needed: a matcher cannot be sent.

`Sandbox` has a process that reads the vocabulary once and forks for each trial. A trial has limits
of memory and stack, answers on a socket of its own, and ends when that is closed, by whatever end.
Trials run side by side, and the system divides the processors among them: one that has run for
LONG_SECONDS gets the lowest priority when another begins.
"""

import base64
import contextlib
import fcntl
import gc
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logitd.model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Source,
)
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[4]
MODULE = "logitd.model.inference.constraints.sandbox"
STACK_BYTES = 2**20
"""Stack of a trial, less than a thread of a server has."""
MEMORY_BYTES = 2**26
"""Address space of a trial beyond that of its process at first; ordinary ones take a tenth. It
bounds the time of most sources too: what is slow grows."""
LONG_SECONDS = 0.25
LOWEST_PRIORITY = 19
TRIES, TRY_TOKENS = 2, 24
"""Random texts begun with each constraint, and their tokens: it is refused if they fail."""
ANSWER_BYTES = 2**16


class Sandbox:
    """The process for one vocabulary. One thread starts and closes it; `begin` does not wait."""

    def __init__(self, tokenizer: Tokenizer, memory: int = MEMORY_BYTES) -> None:
        self._memory = memory
        ranks = {base64.b64encode(token).decode(): rank for token, rank in tokenizer.ranks.items()}
        vocabulary = {
            "ranks": ranks,
            "pattern": tokenizer.pattern,
            "special_tokens": tokenizer.special_tokens,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text_name": tokenizer.end_of_text_name,
            "kind": tokenizer.kind,
        }
        self._vocabulary = json.dumps(vocabulary).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process, or another one if it has ended. Raises ConstraintsUnavailable if it
        does not answer."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(self._memory)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # native code prints before it crashes
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a fork loses threads
            )
        assert self._process.stdin is not None
        ready = b""
        with contextlib.suppress(OSError):  # it has ended
            with self._process.stdin as pipe:
                pipe.write(self._vocabulary)
            ready = self._control.recv(1)
        if not ready:
            self.close()
            raise ConstraintsUnavailable("the process that tries constraints does not start")

    def begin(self) -> socket.socket:
        """The socket of a new trial, which takes a request (`request_of`) and gives an answer
        (`size_of`). The trial ends when it is closed. Raises OSError if the process has ended."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """End the process. Trials end when their sockets are closed."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def request_of(source: Source) -> bytes:
    """The request for the trial of a source."""
    return json.dumps({"kind": source.kind, "text": source.text}).encode() + b"\n"


def size_of(answer: bytes) -> int:
    """The bytes of memory that the constraint of a trial takes. Raises ConstraintError for a source
    that is refused, or that ended the trial without an answer."""
    if not answer:
        raise ConstraintError("it is too large or too deeply nested to be compiled")
    document: dict[str, Any] = json.loads(answer)
    if document["error"] is not None:
        raise ConstraintError(document["error"])
    size: int = document["bytes"]
    return size


def main(control: socket.socket, memory: int) -> None:
    """The process: forks for each socket that it gets, until its own is closed."""
    vocabulary = json.load(sys.stdin.buffer)
    ranks = {base64.b64decode(token): rank for token, rank in vocabulary["ranks"].items()}
    compiler = Compiler(Tokenizer(**{**vocabulary, "ranks": ranks}))
    with contextlib.suppress(ConstraintError):  # it may not be in the vocabulary
        _try(compiler, Source("regex", "[a-z]+"))  # the first one pays for what all share
    _limit(memory)
    gc.freeze()  # what a collection touches would be copied into each fork
    control.sendall(b"\0")
    began: dict[int, float] = {}
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        _make_way(began)
        if not (trial := os.fork()):
            control.close()
            with contextlib.suppress(OSError):  # nobody waits any more
                _answer(compiler, socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        began[trial] = time.monotonic()


def _make_way(began: dict[int, float]) -> None:
    """Forget the trials that have ended, and lower the priority of those that have run for long."""
    for trial, since in list(began.items()):
        if os.waitpid(trial, os.WNOHANG)[0]:
            del began[trial]
        elif time.monotonic() - since > LONG_SECONDS:
            os.setpriority(os.PRIO_PROCESS, trial, LOWEST_PRIORITY)


def _answer(compiler: Compiler, connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as requests:
        line = requests.readline()
        # From here on SIGIO, which ends a process, comes when the other side closes.
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(connection, fcntl.F_GETFL)
        fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                return  # it was closed before
        before, error = _occupied(), None
        try:
            constraint = _try(compiler, Source(**json.loads(line)))  # kept until it is measured
        except ConstraintError as refused:
            constraint, error = None, str(refused)
        answer = {"error": error, "bytes": _occupied() - before}
        del constraint
        connection.sendall(json.dumps(answer).encode())


def _try(compiler: Compiler, source: Source) -> Constraint:
    """Compile, and begin a few texts."""
    constraint = compiler.compile(source)
    for seed in range(TRIES):
        rng, matcher = random.Random(seed), constraint.matcher()
        for _ in range(TRY_TOKENS):
            allowed = matcher.allowed()
            if matcher.complete:
                break
            matcher.advance(rng.choice(allowed.nonzero()[0].tolist()))
    return constraint


def _limit(memory: int) -> None:
    """Take from this process and its forks what a trial must not need. Some systems know fewer
    limits."""
    limits = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for name, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (limit, resource.getrlimit(name)[1]))


def _occupied() -> int:
    """The bytes of memory that this process has of its own; 0 if nothing tells."""
    status = Path("/proc/self/status")
    match = re.search(r"RssAnon:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(match[1]) if match else 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
