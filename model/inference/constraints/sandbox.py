"""Sandbox: tries each new constraint in a separate process, which may crash, hang or run out of
memory.

llguidance 1.9.1 does not bound the cost of every grammar: a chain of a thousand rules in brackets
overflows the stack, a few kilobytes of `multipleOf` compile for minutes, and a few kilobytes of
`.?` take a gigabyte of memory. A thread cannot be stopped, and a crash in it ends the server. So
each source is compiled twice: first as a trial in a separate process, then in the server, because a
compiled matcher cannot be sent between processes.

The process of a `Sandbox` reads the vocabulary once and forks for each trial. A trial has limits on
memory, stack size and processor time. It answers on its own socket, and ends when its client
disconnects. Trials run in parallel. When a trial begins, the trials that have run for LONG_SECONDS
get the lowest priority. The limit on processor time counts only the trial's own time, so other
trials do not affect whether a source is accepted.
"""

import base64
import contextlib
import fcntl
import gc
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from logitd.model.inference.constraints.compiler import Compiler, ConstraintsUnavailable, Source
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[4]
MODULE = "logitd.model.inference.constraints.sandbox"
STACK_BYTES = 2**20
"""Stack size of a trial. It is smaller than the stack of a server's thread, so a source that would
overflow the server's stack fails in its trial."""
MEMORY_BYTES = 2**24
"""Address space that a trial may add to its process. Ordinary sources need a tenth of it. The
server needs as much memory as the trial for each sequence with the constraint. The limit also
bounds the compile time of most sources, because slow ones need a lot of memory."""
LONG_SECONDS = 0.25
LOWEST_PRIORITY = 19
TRIES, TRY_TOKENS = 2, 24
"""Number of random texts that a trial generates, and the number of tokens in each text."""
ANSWER_BYTES = 2**16
SLOW = bytes([signal.SIGPROF])
"""First byte of the answer of a trial that ran out of time. The interpreter's signal handler writes
it, because no Python code can run until the compiler returns."""


class TooSlow(ConstraintError):
    """Raised if a trial exceeded its limit on processor time."""


class Sandbox:
    """The sandbox process of one vocabulary. A single thread must start and close it; `begin` does
    not block."""

    def __init__(self, tokenizer: Tokenizer, memory: int = MEMORY_BYTES) -> None:
        self._memory = memory
        ranks = {base64.b64encode(token).decode(): rank for token, rank in tokenizer.ranks.items()}
        vocabulary = {"ranks": ranks, "description": tokenizer.description()}
        self._vocabulary = json.dumps(vocabulary).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process unless it is running. Raises ConstraintsUnavailable if it does not
        answer."""
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
                stderr=subprocess.DEVNULL,  # native code prints when it crashes
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C does not end it
                env=os.environ
                | {"OPENBLAS_NUM_THREADS": "1"},  # forking needs a process without threads
            )
        assert self._process.stdin is not None
        ready = b""
        with contextlib.suppress(OSError):  # it has already ended
            with self._process.stdin as pipe:
                pipe.write(self._vocabulary)
            ready = self._control.recv(1)
        if not ready:
            self.close()
            raise ConstraintsUnavailable("the sandbox process for constraints failed to start")

    @contextlib.contextmanager
    def begin(self) -> Iterator[socket.socket]:
        """A context that begins a trial and provides its socket. The trial reads a request
        (`request_of`) from the socket, writes an answer (`check`) to it, and ends when the context
        exits. Raises OSError if the process has ended."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        held, holds = os.pipe()
        try:
            with ours:
                try:
                    with theirs:
                        socket.send_fds(self._control, [b"\0"], [theirs.fileno(), held])
                finally:
                    os.close(held)
                yield ours
        finally:
            os.close(holds)

    def close(self) -> None:
        """End the process. Running trials end when their contexts exit."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def request_of(source: Source, seconds: float) -> bytes:
    """The request that starts the trial of a source, with the limit on the trial's processor
    time."""
    return json.dumps([source.kind, source.text, seconds]).encode() + b"\n"


def check(answer: bytes) -> None:
    """Check the answer of a trial. Raises ConstraintError if the source was refused or the trial
    ended without an answer, and TooSlow if the trial ran out of time."""
    if not answer:
        raise ConstraintError("the constraint is too large or too deeply nested to compile")
    if answer.startswith(SLOW):
        raise TooSlow("the constraint takes too long to compile")
    error: str | None = json.loads(answer)
    if error is not None:
        raise ConstraintError(error)


def main(control: socket.socket, memory: int) -> None:
    """Run the sandbox process: fork for each socket received on `control`, until `control` is
    closed."""
    vocabulary = json.load(sys.stdin.buffer)
    ranks = {base64.b64decode(token): rank for token, rank in vocabulary["ranks"].items()}
    compiler = Compiler(Tokenizer.described(vocabulary["description"], ranks))
    with contextlib.suppress(ConstraintError):  # the vocabulary may lack letters
        _try(compiler, Source("regex", "[a-z]+"))  # warm up the parts shared by all trials
    _limit(memory)
    gc.freeze()  # a collection would copy pages into each fork
    control.sendall(b"\0")
    began: dict[int, float] = {}
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            return
        _make_way(began)
        if not (trial := os.fork()):
            control.close()
            with contextlib.suppress(OSError):  # the client has disconnected
                _answer(compiler, socket.socket(fileno=descriptors[0]), descriptors[1])
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        began[trial] = time.monotonic()


def _make_way(began: dict[int, float]) -> None:
    """Forget ended trials, and lower the priority of trials that have run for LONG_SECONDS."""
    for trial, since in list(began.items()):
        if os.waitpid(trial, os.WNOHANG)[0]:
            del began[trial]
        elif time.monotonic() - since > LONG_SECONDS:
            os.setpriority(os.PRIO_PROCESS, trial, LOWEST_PRIORITY)


def _answer(compiler: Compiler, connection: socket.socket, held: int) -> None:
    """Try the requested source. The process ends when the other end of the pipe `held` is
    closed."""
    # SIGIO ends this process when the pipe closes. Nothing is ever written to it.
    fcntl.fcntl(held, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(held, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(held, 1)
        return  # already closed
    with connection, connection.makefile("rb") as requests:
        kind, text, seconds = json.loads(requests.readline())
        connection.setblocking(False)
        signal.signal(signal.SIGPROF, lambda *_: os._exit(1))
        signal.set_wakeup_fd(connection.fileno())  # a signal writes its number: SLOW
        signal.setitimer(signal.ITIMER_PROF, seconds)
        error = None
        try:
            _try(compiler, Source(kind, text))
        except ConstraintError as refused:
            error = str(refused)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.set_wakeup_fd(-1)
        connection.setblocking(True)
        connection.sendall(json.dumps(error).encode())


def _try(compiler: Compiler, source: Source) -> None:
    constraint = compiler.compile(source)
    for seed in range(TRIES):
        rng, matcher = random.Random(seed), constraint.matcher()
        for _ in range(TRY_TOKENS):
            allowed = matcher.allowed()
            if matcher.complete:
                break
            matcher.advance(rng.choice(allowed.nonzero()[0].tolist()))


def _limit(memory: int) -> None:
    """Limit the stack, core dumps and memory of this process and its forks, as far as the system
    supports such limits. `memory` is the number of bytes that each may add to its address space."""
    limits = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for name, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (limit, resource.getrlimit(name)[1]))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
