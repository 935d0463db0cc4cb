"""FolderLock: one process at a time writes a folder.

An flock(2) on a file in the folder: the system releases it when the process that has it ends,
however that comes about, so nothing stale is left to clean up. The file says who has it, for the
message that another process gets. Knows nothing of what the folder is for: whoever takes a lock
makes a sentence of `FolderLocked`.
"""

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

NOTE_BYTES = 4096
"""More than a note has."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""A file system that has no locks: there a folder is not protected, rather than not writable."""


class FolderLocked(Exception):
    """Another process has the lock; `owner` says which, for people."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"locked by {owner}")
        self.owner = owner


class FolderLock:
    """The lock that the file at `path` is, taken at once and kept until `release`. Raises
    FolderLocked where another process has it, and OSError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                _lock(descriptor)
                # What was locked may have been removed meanwhile, by an owner that was done.
                if _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, _note(), 0)
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let others have it. Does nothing the second time."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderLocked(_owner(descriptor)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _note() -> bytes:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    return (json.dumps(note) + "\n").encode()


def _owner(descriptor: int) -> str:
    """Who has the lock, as far as the note says so: it is written a moment after locking."""
    try:
        note = json.loads(os.pread(descriptor, NOTE_BYTES, 0))
        return f"process {note['pid']} on {note['host']} since {note['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
