"""Run folder: finds the checkpoints in the directory of a training run.

`model/training/run/directory.py` writes the directory and its other files.
"""

import os
import re
from pathlib import Path

RUN = "run.json"
"""File with the settings of a run; a folder that contains it is a run."""
BEST, LATEST = "best", "latest"
"""Two links: to the checkpoint with the lowest validation loss, and to the newest checkpoint."""
HISTORY = "history"
"""Folder of the checkpoints that `--keep-every` keeps."""
BASE = "base"
"""Folder with a copy of the checkpoint whose adapters a run trains."""
STEP = re.compile(r"step-(\d{6,})")
"""Matches the name of a checkpoint in a run or in its history."""
LOCK = "run.lock"
"""Lock file of the process that trains the run. It is the first file of a run."""


def checkpoint_of(path: Path, link: str | None = None) -> Path:
    """Resolve a path to a checkpoint. The path of a run resolves to the target of `link`, by
    default `best`, or `latest` if there is no best. A link in a run resolves to its target, because
    a run moves its links while it trains. Other paths are returned unchanged."""
    if is_run(path):
        names = (BEST, LATEST) if link is None else (link,)
        path = next((path / name for name in names if (path / name).exists()), path / names[-1])
    elif not is_run(path.parent):
        return path
    return path.parent / path.readlink() if path.is_symlink() else path


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run, or of its history, keyed by step in ascending order."""
    by_step = {
        int(match[1]): child
        for child in (folder.iterdir() if folder.is_dir() else ())
        if (match := STEP.fullmatch(child.name)) and child.is_dir()
    }
    return dict(sorted(by_step.items()))


def may_become_run(path: Path) -> bool:
    """True if the path is missing, an empty folder, a run, or a run in preparation."""
    if not path.is_dir():
        return not path.exists()
    return is_run(path) or (path / LOCK).exists() or not any(path.iterdir())


def is_run(path: Path) -> bool:
    """True if a folder is a run. False if the user may not read the folder."""
    try:
        return (path / RUN).is_file()
    except PermissionError:
        return False


def run_of(path: Path) -> Path | None:
    """The run that wrote a checkpoint in its folder; None if there is none, and for the base of a
    run's adapters, which another training wrote. Links are followed."""
    path = path.resolve()
    run = path.parent.parent if path.parent.name == HISTORY else path.parent
    return run if path.name != BASE and is_run(run) else None


def name_of(path: Path) -> str:
    """The name of a checkpoint in replies and log lines: its run's name, or its folder's if it is
    not in a run. Links are followed. Characters that are not UTF-8 or not printable become U+FFFD.
    """
    folder = run_of(path) or path.resolve()
    name = os.fsencode(folder.name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in name)
