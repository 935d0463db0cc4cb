"""Files: regular ones alone, no more of them than was said before, JSON that stays small, and names
aside for what is being written.

What a path names may be a pipe on which nobody writes, a device without an end, a folder, a link to
itself, or a file larger than memory. Everything here looks first and reads then, so that no such
thing makes a program wait or grow: `FileError` names the path and says what is there, or that this
user may not read it. A file that is missing is the system's own error. What is written is for whom
the umask says, whatever a library would rather do. Knows nothing of what the bytes mean.
"""

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CONFIG_BYTES = 4 * 2**20
"""Of a JSON file of settings: a hundred times what is usual, and little beside a model even where
each two bytes become an object."""
VOCABULARY_BYTES = 64 * 2**20
"""Of a vocabulary: ten times the largest that is published."""
TEXT_BYTES = 2**30
"""Of a text that is read at once."""
PART = ".part"
"""How the name of a file or folder ends that is being written; it begins with a dot."""

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class FileError(OSError):
    """A path that cannot be read or written as it should be; the message names it and says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message

    def __str__(self) -> str:
        return str(self.args[0])


def open_regular(path: Path, most: int | None = None) -> BinaryIO:
    """A regular file of at most so many bytes, unbuffered, opened to be read. Raises FileError, and
    OSError where the system does."""
    try:
        # Some devices do something when they are opened.
        _require_regular(path, path.stat().st_mode)
        # What is there now may be a pipe all the same, and must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise FileError(forbidden(path)) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        if most is not None and status.st_size > most:
            raise FileError(f"{path} has {status.st_size:,} bytes; {most:,} are the most it may")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: Path) -> None:
    """Raise FileError unless a path names a regular file that may be read, for libraries that open
    it themselves."""
    try:
        _require_regular(path, path.stat().st_mode)
    except PermissionError as error:
        raise FileError(forbidden(path)) from error
    if not os.access(path, os.R_OK):
        raise FileError(forbidden(path))


def forbidden(path: Path) -> str:
    """What keeps this user from a path that the system does not let him read, and what its owner
    can do about that."""
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            return f"{folder} may not be entered by this user: chmod a+rx {folder}, as its owner"
    how = "a+rx" if path.is_dir() else "a+r"
    return f"{path} may not be read by this user: chmod {how} {path}, as its owner"


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file that has at most so many. Raises FileError and OSError."""
    with open_regular(path, most) as file:
        # Not all that reads as a regular file tells its size: those of /proc have 0.
        raw = bytearray()
        while len(raw) <= most and (piece := file.read(min(2**20, most + 1 - len(raw)))):
            raw += piece
    if len(raw) > most:
        raise FileError(f"{path} has more than {most:,} bytes, which are the most it may")
    return bytes(raw)


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """A regular file as UTF-8, with line ends as "\\n". Raises FileError, OSError and
    UnicodeDecodeError."""
    return read_regular(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def folder_aside(path: Path) -> Path:
    """A new folder beside `path`, for what is renamed when it is complete. Others may read it if
    the umask lets them, as no folder of `tempfile`."""
    while True:
        aside = _name_aside(path)
        try:
            aside.mkdir()
        except FileExistsError:
            continue
        return aside


@contextmanager
def whole_file(path: Path, aside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file next to `path`, `aside` or one of a random name. It is synced and renamed to
    `path` at the end of the block, or removed if the block raises. Others may read it if the umask
    lets them, unlike a file of `tempfile`. Raises OSError."""
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
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # so that the rename outlives a loss of power
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with whole_file(path, path.with_name(f".{path.name}{PART}")) as file:
        file.write(content)


@contextmanager
def written_to(destination: Path) -> Iterator[None]:
    """Turns an error of the disk in the block that writes `destination` whole or not at all into a
    FileError: a full disk, a folder of somebody else's, a name that cannot be one."""
    try:
        yield
    except OSError as error:
        # NumPy, whose write was cut short, gives no number: "262144 requested and 128824 written".
        reason = error.strerror or f"the disk took less than was to be written ({error})"
        raise FileError(
            f"{destination} cannot be written: {reason}. Nothing is there: make room or mend it, "
            "or name another destination"
        ) from error


def share_files(folder: Path) -> None:
    """Let those read the files of a folder that the umask let read the folder itself: safetensors
    writes for the owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def _name_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")


def parse_json(raw: bytes) -> Any:
    """JSON whose numbers and texts can be written again: finite ones of 64 bits, and Unicode.
    Raises ValueError, for what nests too deeply too."""
    try:
        document = json.loads(
            raw.decode("utf-8"),
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_no_constant,
        )
        # An escape may stand for half a character, which no text can hold.
        json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    return document


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for holds, name in KINDS if holds(mode)), "something else")
        raise FileError(f"{path} is {kind}; expected a regular file")


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) < 25 else 2**64
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{digits[:30]} does not fit into 64 bits")
    return number


def _real(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:30]} is more than a number can be")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
