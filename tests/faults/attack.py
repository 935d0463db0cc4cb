"""Attack: one way to break a service or a trainer, and what has to hold while it is tried.

An attack knows its size for CI and its size by hand, and runs on a `Ground`: a folder of its own
and real `logitd serve` processes. It says in a sentence what came out, or fails an assertion. What
one mechanism does is tested beside that mechanism; here is what an attacker or a bad day would do.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.e2e.server import ServedProcess
from tests.model.factories import save_tiny_checkpoint


@dataclass(frozen=True)
class Attack:
    """One row of the table."""

    name: str
    expected: str
    """What has to hold, in a sentence."""
    run: Callable[["Ground", int], str]
    """Tries it this many times; what came out, in a sentence. AssertionError if it did not hold."""
    short: int
    """How many times in CI: seconds."""
    long: int
    """How many times by hand: minutes."""


@dataclass
class Ground:
    """Where an attack takes place: entered, it ends its servers when it is left."""

    folder: Path
    _stack: ExitStack = field(default_factory=ExitStack)

    def checkpoint(self) -> Path:
        """A tiny checkpoint with random weights and a vocabulary of bytes."""
        path = self.folder / "tiny"
        return path if path.exists() else save_tiny_checkpoint(path).path

    def serve(
        self,
        *flags: str,
        checkpoint: Path | None = None,
        descriptors: int | None = None,
        cold: bool = False,
    ) -> ServedProcess:
        """A server of its own that is ready; on the loopback, on a free port. `cold` where its
        memory is looked at: what the zygote forks has what others left there."""
        path = checkpoint or self.checkpoint()
        flags = ("--checkpoint", str(path), "--threads", "1", *flags)
        return self._stack.enter_context(ServedProcess(*flags, descriptors=descriptors, cold=cold))

    def __enter__(self) -> "Ground":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def resident_mib(process: ServedProcess) -> float:
    """Memory of the server's process that is in use, as the kernel counts it."""
    status = Path(f"/proc/{process.process.pid}/status").read_text(encoding="ascii")
    kib = next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]
    return int(kib) / 1024
