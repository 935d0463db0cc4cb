"""FolderLock: at most one process at a time writes to a folder.

The lock is an flock(2) on a file in the folder. The system releases it when its process ends, even
if the process is killed, so a lock never outlives its owner. The file names the owner, for the
error message that a second process shows.
"""

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

NOTE_BYTES = 4096
"""Maximum size, in bytes, of the note in a lock file. The note names the owner."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers that mean that a file system does not support locks. A folder on such a file system
can be written but is not protected."""


class FolderLocked(Exception):
    """Raised if another process has the lock; `owner` describes that process for a message."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"locked by {owner}")
        self.owner = owner


class FolderLock:
    """A lock on the file at `path`, held until `release`. Raises FolderLocked if another process
    has it, and OSError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                _lock(descriptor)
                # The previous owner may have removed the file before it was locked.
                if _is_at(descriptor, path):
                    since = datetime.now(UTC).isoformat(timespec="seconds")
                    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(note).encode() + b"\n", 0)
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._path = path
        self._descriptor: int | None = descriptor

    @property
    def replaced(self) -> bool:
        """True if the lock's path names another file now: the folder was removed or renamed, and
        another process may write to the new folder of that name. Raises OSError."""
        descriptor, path = self._descriptor, self._path
        return descriptor is not None and not _is_at(descriptor, path) and path.exists()

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
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


def _owner(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, NOTE_BYTES, 0))
        return f"process {note['pid']} on {note['host']} since {note['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
