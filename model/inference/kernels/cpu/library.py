"""Library: the native kernels, built once by the machine's own compiler, or by Zig's where it has
none, and loaded.

The sources in native/ are compiled for the processor at hand, or for the target that was asked for
(`targets.py`), which takes seconds the first time, and kept under a name that holds the hash of the
sources, the compiler, its flags and the processor's features: whatever changes, another file is
built. Where there are kernels in prebuilt/, as in the container image, nothing is compiled: the
greatest target that the processor can run is taken. Without any of this, or when compiling fails,
there is a KernelsUnavailable that says why, and the callers take the plain torch path.
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
"""Kernels of several targets, from `python -m logitd.model.inference.kernels.cpu.prebuild`."""
MAIN_SOURCE = "decoder.cpp"
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 900
"""Half a minute is usual. Zig's first build makes a library of its own before: where others had the
cores, five minutes were not enough."""
ZIGS_NAMES = {"armv8-a": "generic"}
"""Of processors; those that are not here have underlines for dashes."""

Origin = Literal["compiled now", "compiled before", "prebuilt"]


class KernelsUnavailable(RuntimeError):
    """There are no native kernels on this machine; the message says why."""


class TargetRefused(KernelsUnavailable):
    """This processor cannot run what is built for the target that was asked for."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernels that were loaded.

    target  what they were built for; None for the processor at hand
    origin  whether they were built now or before, here or elsewhere
    """

    functions: ctypes.CDLL
    target: Target | None
    origin: Origin

    @property
    def features(self) -> frozenset[str]:
        """What the code uses, in Linux's words, as far as the processor has it."""
        return processor_features() if self.target is None else self.target.features

    @property
    def description(self) -> str:
        """For people: "x86-64-v3, prebuilt"."""
        return f"{_name(self.target)}, {self.origin}"


def load_library(
    log: Callable[[str], None] = lambda line: None, *, target: KernelTarget = "auto"
) -> NativeLibrary:
    """The kernels for a target; for "auto" those that are best on this processor. `log` is told
    when they are being built, which takes a moment.

    Raises KernelsUnavailable, also for a target that this processor cannot run.
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
    """Where the kernels of a target are when they are prebuilt, from these very sources."""
    flags = (*FLAGS, target.processor, *target.extra)
    return PREBUILT / f"kernels-{target.name}-{_hash(*flags)}.so"


def build_kernels(target: Target, path: Path) -> None:
    """Compile the kernels for a target into a file. Raises KernelsUnavailable."""
    compiler = _compiler()
    _build(compiler, (*FLAGS, *_flags_for(target, compiler)), path)


def _compiled(target: Target | None, log: Callable[[str], None]) -> tuple[Path, Origin]:
    """The kernels for a target, or with None for this processor, in the user's cache."""
    compiler = _compiler()
    flags = (*FLAGS, *_flags_for(target, compiler))
    path = _cache_folder() / f"kernels-{_hash(*compiler, _version(compiler), *flags, *_here())}.so"
    if not path.exists():
        with _building_alone(path.parent):
            if not path.exists():  # another process may have built it while this one waited
                log(f"building the native kernels for {_name(target)}, once")
                _build(compiler, flags, path)
                return path, "compiled now"
    return path, "compiled before"


def _name(target: Target | None) -> str:
    return "this processor" if target is None else target.name


def _version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


def _here() -> tuple[str, ...]:
    """What a compiler looks at when it is told to build for the processor at hand."""
    return platform.machine(), platform.processor(), *sorted(processor_features())


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the built kernels cannot be loaded: {error}") from error


def _compiler() -> tuple[str, ...]:
    """The command that compiles. The package ziglang carries a Clang for machines that have no
    compiler of their own; from it come the same bits."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if not chosen and importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise KernelsUnavailable(
        f"no C++ compiler was found ({chosen or ', '.join(COMPILERS)}); install one, or name it in "
        "CXX, or install the package ziglang, which carries one"
    )


def _cache_folder() -> Path:
    """Where the built library is kept: the user's cache, else a folder of this boot."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    for folder in (Path(home) / "logitd", Path(tempfile.gettempdir()) / f"logitd-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # A library is code: only our own folder may give it.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise KernelsUnavailable(
        "no folder can be written to keep the built kernels in: neither the user's cache nor the "
        "temporary folder"
    )


def _flags_for(target: Target | None, compiler: tuple[str, ...]) -> tuple[str, ...]:
    """How a compiler is told the processor."""
    name = "native" if target is None else target.processor
    extra = () if target is None else target.extra
    if "ziglang" in compiler:
        return f"-mcpu={ZIGS_NAMES.get(name, name.replace('-', '_'))}", *extra
    # On Arm -march=native is not known to every compiler.
    option = "-mcpu" if target is None and platform.machine() != "x86_64" else "-march"
    return f"{option}={name}", *extra


def _hash(*words: str) -> str:
    """A name for what is built of the sources with these."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:20]


@contextmanager
def _building_alone(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`: those that start together would all compile.
    Where the file system has no locks they do, which costs time and nothing else."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(compiler: tuple[str, ...], flags: tuple[str, ...], target: Path) -> None:
    """Compile aside and rename, so that a second process never loads half a file."""
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
            raise KernelsUnavailable(f"the compiler does not run: {error}") from error
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), "")
            raise KernelsUnavailable(f"the compiler rejected the kernels: {first[:300]}")
        built.replace(target)
