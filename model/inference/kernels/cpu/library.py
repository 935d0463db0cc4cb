"""Library: the native kernels, built once by the machine's own compiler, or by Zig's where it has
none, and loaded.

The sources in native/ are compiled for the processor at hand (seconds, the first time) and kept
under a name that holds the hash of the sources, the compiler, its flags and the processor's
features: whatever changes, another file is built. Without a compiler, or when it fails, there is a
KernelsUnavailable that says why, and the callers take the plain torch path.
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
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
MAIN_SOURCE = "decoder.cpp"
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300


class KernelsUnavailable(RuntimeError):
    """There are no native kernels on this machine; the message says why."""


def load_library(
    log: Callable[[str], None] = lambda line: None, *, processor: str = "native"
) -> ctypes.CDLL:
    """The compiled kernels. `log` is told when they are being built, which takes a moment.
    `processor` is the compiler's name for one that this machine can stand in for, such as
    x86-64-v3.

    Raises KernelsUnavailable.
    """
    compiler = _compiler()
    option = "-march" if platform.machine() == "x86_64" else "-mcpu"
    if "ziglang" in compiler:  # whose names of processors have no dashes
        processor = processor.replace("-", "_")
    flags = (*FLAGS, f"{option}={processor}")
    target = _cache_folder() / f"kernels-{_fingerprint(compiler, flags)}.so"
    if not target.exists():
        with _building_alone(target.parent):
            if not target.exists():  # another process may have built it while this one waited
                log("building the native kernels for this processor, once")
                _build(compiler, flags, target)
    try:
        return ctypes.CDLL(str(target))
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


def _fingerprint(compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(
        b"\0".join(
            [*(word.encode() for word in compiler), version, *(flag.encode() for flag in flags)]
        )
    )
    digest.update(_processor().encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What -march=native looks at: the processor's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


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
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsUnavailable(f"the compiler did not finish: {error}") from error
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), "")
            raise KernelsUnavailable(f"the compiler rejected the kernels: {first[:300]}")
        built.replace(target)
