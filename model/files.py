"""Files: reads regular files up to a size limit, parses strict JSON, and writes either the complete
file or nothing.

A path may name a pipe without a writer, an endless device, a folder, a link to itself, or a file
larger than memory. Every function here checks the path first, so that reading never hangs and never
fills the memory. `FileError` names the path and the reason; for a missing file, the system's own
error is raised. Written files get the permissions that the umask allows, even if a library writes
them.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

CONFIG_BYTES = 4 * 2**20
"""Maximum size, in bytes, of a JSON file of settings: a hundred times the usual size, but small
enough that parsing takes little memory even if the file is full of tiny objects."""
VOCABULARY_BYTES = 64 * 2**20
"""Maximum size, in bytes, of a vocabulary file: ten times the size of the largest published one."""
TEXT_BYTES = 2**30
"""Maximum size, in bytes, of a text file that is read as a whole."""
PART = ".part"
"""Suffix of files and folders that are being written; their names begin with a dot."""

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class FileError(OSError):
    """Raised for a path that cannot be read or written; the message names it and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


def open_regular(path: Path, most: int | None = None) -> FileIO:
    """Open a regular file of at most `most` bytes for unbuffered reading. Raises FileError and
    OSError."""
    require_regular(path)  # before opening, which has effects on some devices
    # The file may have been replaced by a pipe since; O_NONBLOCK does not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _require_regular_mode(path, status.st_mode)
        if most is not None and status.st_size > most:
            raise FileError(f"{path} has {status.st_size:,} bytes; the limit is {most:,}")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: Path) -> None:
    """Raise FileError unless the path is a readable regular file, and OSError if it is missing."""
    try:
        _require_regular_mode(path, path.stat().st_mode)
        readable = os.access(path, os.R_OK)
    except PermissionError:
        readable = False
    if not readable:
        raise FileError(forbidden(path))


def _require_regular_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for holds, name in KINDS if holds(mode)), "something else")
        raise FileError(f"{path} is {kind}; expected a regular file")


def forbidden(path: Path) -> str:
    """A sentence for messages that says why this path cannot be read, and how its owner can make it
    readable."""
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            return f"this user may not enter {folder}: run chmod a+rx {folder} as its owner"
    how = "a+rx" if path.is_dir() else "a+r"
    return f"this user may not read {path}: run chmod {how} {path} as its owner"


def read_regular(path: Path, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes. Raises FileError and OSError."""
    with open_regular(path, most) as file:
        # The file's own size is not used: files in /proc have size 0.
        raw = bytearray()
        while len(raw) <= most and (piece := file.read(min(2**20, most + 1 - len(raw)))):
            raw += piece
    if len(raw) > most:
        raise FileError(f"{path} exceeds the limit of {most:,} bytes")
    return bytes(raw)


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark and with all line endings converted to
    "\\n". Raises FileError, OSError and UnicodeDecodeError."""
    return read_regular(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def folder_aside(path: Path) -> Path:
    """Create a temporary folder next to `path`. The caller fills it and renames it to `path`.
    Unlike a folder made by `tempfile`, its permissions follow the umask."""
    while True:
        aside = _name_aside(path)
        try:
            aside.mkdir()
        except FileExistsError:
            continue
        return aside


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for new files. At the end of the block it is synced and renamed to
    `path`, which must not exist; if the block raises, it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = folder_aside(path)
    try:
        yield aside
        share_files(aside)
        for entry in (*aside.rglob("*"), aside):  # including the owner's sources in subfolders
            _sync(entry)
        aside.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def whole_file(path: Path, aside: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a new file at the path `aside` or, if that is None, next to `path` under a random name.
    At the end of the block it is synced and renamed to `path`; if the block raises, it is removed.
    Unlike a file made by `tempfile`, its permissions follow the umask. Raises OSError."""
    aside = aside or _name_aside(path)
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file; after an error the old file, if any, is unchanged. Raises OSError."""
    with whole_file(path, path.with_name(f".{path.name}{PART}")) as file:
        file.write(content)


def require_new(destination: Path) -> None:
    """Raise FileError if something exists at `destination`, or if nothing can be written there.
    Long computations call this before they begin. No folder is left, not even a missing parent."""
    with written_to(destination):
        exists = _is_taken(destination)
        if not exists:
            folder = next(filter(_is_taken, destination.absolute().parents))
            folder_aside(folder / destination.name).rmdir()
    if exists:
        raise FileError(f"{destination} already exists: choose another path, or remove it")


def _is_taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a link to nothing is in the way too


def require_space(destination: Path, size: int) -> None:
    """Raise FileError if the disk of `destination` has no room for `size` bytes. Long computations
    call this before they begin."""
    parents = destination.absolute().parents
    free = shutil.disk_usage(next(parent for parent in parents if parent.exists())).free
    if free < size:
        raise FileError(
            f"{destination} would take {-(-size // 2**20):,} MiB, but its disk has only "
            f"{free // 2**20:,} MiB: free space, or choose another destination"
        )


@contextmanager
def written_to(destination: Path) -> Iterator[None]:
    """Convert an OSError raised in the block to a FileError. The block must write `destination`,
    and must remove it after an error."""
    try:
        yield
    except OSError as error:
        # NumPy's error for a short write has no number: "262144 requested and 128824 written".
        reason = error.strerror or f"the disk accepted only a part of the data ({error})"
        raise FileError(
            f"{destination} cannot be written: {reason}. No partial copy is left. Free space, "
            "repair the disk or choose another destination"
        ) from error


def share_files(folder: Path) -> None:
    """Give the files in a folder the folder's permissions, because safetensors makes its files
    readable only by their owner."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def _name_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")


def is_utf8(name: str) -> bool:
    """True unless a path or an argument has bytes that are not UTF-8, which Python reads as
    surrogates. Such a name cannot be written to a text file or to standard output."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_surrogates(text: str) -> str:
    """The text with question marks for surrogates, which JSON in UTF-8 cannot contain. A path has
    surrogates if its bytes are not UTF-8."""
    return text.encode(errors="replace").decode()


def parse_json(raw: bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, and for values that could not be written back
    as JSON: infinite numbers, integers beyond 64 bits, unpaired surrogates, and very deep
    nesting."""
    try:
        document = json.loads(
            raw.decode("utf-8"),
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_no_constant,
        )
        # An escape can denote an unpaired surrogate, which cannot be encoded.
        json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    return document


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) < 25 else 2**64
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{digits[:30]} does not fit in 64 bits")
    return number


def _real(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:30]} is too large for a 64-bit floating-point number")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
