"""Lock: one trainer at a time writes a run directory.

A `FolderLock` on `run.lock` in the directory. Only writers take it: a run may be served, inspected
and started from while it is trained. Of several processes of one run the main one has it.
"""

from pathlib import Path

from logitd.model.folder_lock import FolderLock, FolderLocked
from logitd.model.training.configuration.config import TrainingError

LOCK = "run.lock"


class RunLock:
    """The lock of the run directory at `path`, taken at once and kept until `release`. Raises
    TrainingError where another process has it, and OSError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._lock = FolderLock(path / LOCK)
        except FolderLocked as error:
            raise TrainingError(
                f"{path} is being trained by {error.owner}: wait until that has ended, stop it "
                "(SIGTERM lets it save), or choose another --out"
            ) from error

    def release(self) -> None:
        """Let others have it. Does nothing the second time."""
        self._lock.release()
