"""Two trainers on one run directory; the second is another process."""

import json
import os
import re
import socket
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from logitd.model.checkpoint.run_folder import LOCK
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.run.directory import RunDirectory


def _hold(path: Path, locked: "Connection[str, str]") -> None:
    """Take the lock and keep it, in a child process."""
    RunDirectory(path).lock()
    locked.send("locked")
    locked.recv()


def test_lock_names_its_owner_and_ends_with_it(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    here, there = processes.Pipe()
    process = processes.Process(target=_hold, args=(tmp_path, there))
    process.start()
    assert here.recv() == "locked"
    note = json.loads((tmp_path / LOCK).read_text())
    sentence = (
        f"is being trained by process {process.pid} on {socket.gethostname()} "
        f"since {note['since']}: wait until"
    )
    for take in (RunDirectory(tmp_path).lock, lambda: RunDirectory.create(tmp_path)):
        with pytest.raises(TrainingError, match=re.escape(sentence)):
            take()
    process.kill()
    process.join()
    run = RunDirectory(tmp_path)
    for _ in range(2):
        run.lock()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        run.release()
        run.release()


def test_lock_with_a_damaged_note_keeps_others_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.lock()
    (tmp_path / LOCK).write_text('{"pid": ')
    with pytest.raises(TrainingError, match="is being trained by another process: wait"):
        RunDirectory(tmp_path).lock()
    run.release()


def test_lock_of_a_removed_run_does_not_lock_a_new_one(tmp_path: Path) -> None:
    """A run may be deleted and created again after a process opened its lock file. A lock on the
    old file then does not lock the new run."""
    path = tmp_path / "run"
    first = RunDirectory.create(path)
    (path / LOCK).rename(tmp_path / "aside")
    again = RunDirectory(path)
    again.lock()  # the name is free, so this is another file
    with pytest.raises(TrainingError, match="is being trained by"):
        RunDirectory(path).lock()
    first.discard()  # its folder was replaced, so nothing is removed
    assert path.exists()
    again.release()
    again = RunDirectory(path)
    again.lock()
    again.discard()
    assert not path.exists()


def test_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(precious)
    with pytest.raises(TrainingError, match="the run cannot be prepared in"):
        RunDirectory.create(tmp_path / "run")
    assert precious.read_text() == "text"


def test_file_system_without_locks_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("logitd.model.folder_lock.fcntl.flock", flock)
    RunDirectory.create(tmp_path / "run").discard()


def test_foreign_folder_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("text")
    with pytest.raises(TrainingError, match=r"already exists and has no run\.json"):
        RunDirectory.create(tmp_path)
    assert [child.name for child in tmp_path.iterdir()] == ["letter.txt"]
