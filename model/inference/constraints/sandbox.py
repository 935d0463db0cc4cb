"""The process in which a constraint is compiled first: it may crash, hang or grow.

llguidance bounds what most grammars cost, and not all: with version 1.9.1 a chain of a thousand
rules in brackets overflows the stack, a few kilobytes of `multipleOf` compile for minutes, and as
many of `.?` take a gigabyte. A thread can be neither stopped nor survived. So `Checker` has a
process for it, with limits of its own and less stack than a thread of a server has; what comes
through there is compiled again where it is used.

The process reads the vocabulary from its standard input, then one source a line, and answers a line
each. It ends when its input does, or when it has grown: then the next check starts another.
"""

import base64
import contextlib
import copy
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import resource

from logitd.model.inference.constraints.compiler import Compiler, ConstraintsUnavailable, Source
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[4]
STACK_BYTES = 2**20
MEMORY_BYTES = 2**28
"""Address space that a check may take beyond what the process has at first."""
GROWN_BYTES = 2**24
TRIES, TRY_TOKENS = 2, 24
"""Random texts begun with each constraint, and their tokens: what fails at once is refused."""


class Checker:
    """One process for one vocabulary, started by the first check. One check at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _line(
            {
                "ranks": {
                    base64.b64encode(token).decode(): rank
                    for token, rank in tokenizer.ranks.items()
                },
                "pattern": tokenizer.pattern,
                "special_tokens": tokenizer.special_tokens,
                "vocab_size": tokenizer.vocab_size,
                "end_of_text_name": tokenizer.end_of_text_name,
                "kind": tokenizer.kind,
            }
        )
        self._process: subprocess.Popen[bytes] | None = None

    def twin(self) -> "Checker":
        """Another process for the same vocabulary."""
        twin = copy.copy(self)
        twin._process = None
        return twin

    def start(self) -> None:
        """Let the process be there, so that its start is not part of a check. Raises
        ConstraintsUnavailable when it does not answer."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "logitd.model.inference.constraints.sandbox"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it writes when it crashes is not read
            start_new_session=True,  # Ctrl-C is not for it
        )
        if self._ask(self._vocabulary) is None:
            raise ConstraintsUnavailable("the process that checks constraints does not start")

    def check(self, source: Source) -> int:
        """Compile there; the bytes that it took. Raises ConstraintError for what is refused, and
        for what ends the process, as `kill` from another thread does."""
        self.start()
        answer = self._ask(_line({"kind": source.kind, "text": source.text}))
        if answer is None:
            raise ConstraintError("it is too large or too deeply nested to be compiled")
        if answer["ends"]:
            self.close()
        if answer["error"] is not None:
            raise ConstraintError(answer["error"])
        size: int = answer["bytes"]
        return size

    def kill(self) -> None:
        """End the process, and by that the check that it may be at."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and wait for that. A check that it is at ends as by `kill`."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not written any more
                    pipe.close() if pipe else None

    def _ask(self, line: bytes) -> Any:
        """The answer to a line; None from a process that has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            self.close()
            return None
        return json.loads(answer)


def main() -> None:
    """The process: answers until its input ends, or it has grown."""
    compiler = Compiler(_tokenizer(json.loads(sys.stdin.buffer.readline())))
    _limit()
    _answer({"ready": True})
    first = _peak()
    for line in sys.stdin.buffer:
        before, error = _peak(), None
        try:
            _try(compiler, Source(**json.loads(line)))
        except ConstraintError as refused:
            error = str(refused)
        grown = _peak() - first > GROWN_BYTES
        _answer({"error": error, "bytes": _peak() - before, "ends": grown})
        if grown:
            return


def _try(compiler: Compiler, source: Source) -> None:
    """Compile, and begin a few texts."""
    constraint = compiler.compile(source)
    for seed in range(TRIES):
        rng, matcher = random.Random(seed), constraint.matcher()
        for _ in range(TRY_TOKENS):
            allowed = matcher.allowed()
            if matcher.complete:
                break
            matcher.advance(rng.choice(allowed.nonzero()[0].tolist()))


def _tokenizer(vocabulary: dict[str, Any]) -> Tokenizer:
    ranks = {base64.b64decode(token): rank for token, rank in vocabulary["ranks"].items()}
    return Tokenizer(**{**vocabulary, "ranks": ranks})


def _limit() -> None:
    """Take from this process what a check must not need. Some systems know fewer limits."""
    if sys.platform != "win32":
        limits = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_CORE: 0}
        statm = Path("/proc/self/statm")
        if statm.exists():
            pages = int(statm.read_text().split()[0])
            limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY_BYTES
        for name, limit in limits.items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(name, (limit, resource.getrlimit(name)[1]))


def _peak() -> int:
    """The most bytes of memory that this process has had; 0 where nothing tells."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage begins with what the process had that started this one
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        return 1024 * int(match[1]) if match else 0
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _answer(answer: Any) -> None:
    sys.stdout.buffer.write(_line(answer))
    sys.stdout.buffer.flush()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


if __name__ == "__main__":
    main()
