"""Library: builds and loads the native kernels.

The sources in native/ are compiled for this machine's processor, or for the requested target
(`targets.py`), by the machine's compiler or, if it has none, by the Zig compiler. The first build
takes seconds. The file name contains a hash of the sources, the compiler, its flags and the
processor's features, so a change to any of them causes a new build. If prebuilt/ holds kernels, as
in the container image, nothing is compiled: the most capable target that the processor can run is
loaded. If no kernels can be built or loaded, KernelsUnavailable has the reason, and callers fall
back to plain torch.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from logitd.model.inference.kernels.cpu.targets import (
    Target,
    refusal,
    runnable,
    target_named,
    targets_of,
)
from logitd.model.inference.options import KernelTarget
from logitd.model.processor import processor_features

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of kernels that `python -m logitd.model.inference.kernels.cpu.prebuild` built."""
MAIN_SOURCE = "decoder.cpp"
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 900
"""Time limit of a build. Half a minute is usual, but Zig's first build also compiles its own
library, which took more than five minutes on busy cores."""
ZIGS_NAMES = {"armv8-a": "generic"}
"""Zig's names for processors, by GCC's names. By default, Zig's name is GCC's name with underscores
instead of dashes."""

Origin = Literal["compiled now", "compiled before", "prebuilt"]


class KernelsUnavailable(RuntimeError):
    """Raised if no native kernels can be built or loaded on this machine; the message gives the
    reason."""


class TargetRefused(KernelsUnavailable):
    """Raised if this processor cannot run the requested target."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded native kernels.

    target  the target that they were built for; None: this machine's processor
    origin  whether they were prebuilt, compiled by this call, or compiled before
    """

    functions: ctypes.CDLL
    target: Target | None
    origin: Origin

    @property
    def features(self) -> frozenset[str]:
        """Processor features that the code may use, by their names in Linux."""
        return processor_features() if self.target is None else self.target.features

    @property
    def description(self) -> str:
        """The target and the origin: "x86-64-v3, prebuilt"."""
        return f"{_name(self.target)}, {self.origin}"

    @property
    def instructions(self) -> str:
        """Name of the most capable instruction set that the kernels use."""
        function = self.functions.logitd_instructions
        function.restype = ctypes.c_char_p
        name: bytes = function()
        return name.decode()

    @property
    def has_tiles(self) -> bool:
        """True if the kernels multiply with AMX tiles."""
        return bool(self.functions.logitd_has_tiles())


def load_library(
    log: Callable[[str], None] = lambda line: None, *, target: KernelTarget = "auto"
) -> NativeLibrary:
    """Load the kernels for a target; "auto" loads the best ones for this processor. Calls `log`
    with a line of text before a build, because a build takes a while.

    Raises KernelsUnavailable, or TargetRefused for a target that this processor cannot run.
    """
    machine, features = platform.machine(), processor_features()
    wanted = None if target == "auto" else target_named(target)
    if wanted is not None and (reason := refusal(wanted, machine, features)):
        raise TargetRefused(reason)
    prebuilt = tuple(one for one in targets_of(machine) if prebuilt_path(one).exists())
    fitting = runnable(machine, features, prebuilt if wanted is None else {wanted} & {*prebuilt})
    if fitting:
        return NativeLibrary(_loaded(prebuilt_path(fitting[-1])), fitting[-1], "prebuilt")
    path, origin = _compiled(wanted, log)
    return NativeLibrary(_loaded(path), wanted, origin)


def prebuilt_path(target: Target) -> Path:
    """Path of a target's prebuilt kernels. Its name contains a hash of the sources."""
    flags = (*FLAGS, target.processor, *target.extra)
    return PREBUILT / f"kernels-{target.name}-{_hash(*flags)}.so"


def build_kernels(target: Target, path: Path) -> None:
    """Compile the kernels for a target into a file. Raises KernelsUnavailable."""
    compiler = _compiler()
    _build(compiler, (*FLAGS, *_flags_for(target, compiler)), path)


def _compiled(target: Target | None, log: Callable[[str], None]) -> tuple[Path, Origin]:
    """Path of the kernels for a target (None: this processor) in the user's cache. Builds them if
    they do not exist."""
    compiler = _compiler()
    flags = (*FLAGS, *_flags_for(target, compiler))
    here = platform.machine(), platform.processor(), *sorted(processor_features())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    name = _hash(*compiler, version.decode(errors="replace"), *flags, *here)
    path = kernel_cache() / f"kernels-{name}.so"
    if not path.exists():
        with _building_alone(path.parent):
            if not path.exists():  # another process may have built it in the meantime
                log(f"building the native kernels for {_name(target)}, once")
                _build(compiler, flags, path)
                return path, "compiled now"
    return path, "compiled before"


def _name(target: Target | None) -> str:
    return "this processor" if target is None else target.name


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the built kernels cannot be loaded: {error}") from error


def _compiler() -> tuple[str, ...]:
    """The compiler's command: CXX, a compiler on the PATH, or the Clang of the package ziglang. All
    of them produce the same bits."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if not chosen and importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise KernelsUnavailable(
        f"no C++ compiler was found ({chosen or ', '.join(COMPILERS)}); install one, set CXX, or "
        "install the package ziglang, which contains one"
    )


def kernel_cache() -> Path:
    """Folder of compiled kernels: in the user's cache folder or, if that is not writable, in the
    temporary directory."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    for folder in (Path(home) / "logitd", Path(tempfile.gettempdir()) / f"logitd-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # A library is code, so load it only from a folder that this user owns.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise KernelsUnavailable(
        "built kernels cannot be stored: this user can write to neither the cache folder nor the "
        "temporary folder; set XDG_CACHE_HOME"
    )


def _flags_for(target: Target | None, compiler: tuple[str, ...]) -> tuple[str, ...]:
    """The compiler flags that select the processor."""
    name = "native" if target is None else target.processor
    extra = () if target is None else target.extra
    if "ziglang" in compiler:
        return f"-mcpu={ZIGS_NAMES.get(name, name.replace('-', '_'))}", *extra
    # Some compilers for Arm do not support -march=native.
    option = "-mcpu" if target is None and platform.machine() != "x86_64" else "-march"
    return f"{option}={name}", *extra


def _hash(*words: str) -> str:
    """A hash of the sources and these words, for use in a file name."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:20]


@contextmanager
def _building_alone(folder: Path) -> Iterator[None]:
    """Hold the lock that lets only one process build in `folder`. On a file system without locks,
    several processes may compile at the same time, which only costs time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(compiler: tuple[str, ...], flags: tuple[str, ...], target: Path) -> None:
    """Compile into a temporary file and rename it, so that no process loads an incomplete file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "kernels.so"
        command = [*compiler, *flags, "-o", str(built), str(SOURCES / MAIN_SOURCE)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(
                f"the compiler did not finish within {BUILD_SECONDS} seconds"
            ) from error
        except OSError as error:
            raise KernelsUnavailable(f"the compiler failed to start: {error}") from error
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), "")
            raise KernelsUnavailable(f"the compiler rejected the kernels: {first[:300]}")
        built.replace(target)
