"""Run folder: how a run's directory is recognised by those who only serve or read what lies in it.

What else is in one, and how it is written: `model/training/run/directory.py`.
"""

import os
from pathlib import Path

RUN = "run.json"
"""What was asked for: a folder that has this file is a run's."""
BEST, LATEST = "best", "latest"
"""Links to the checkpoint with the lowest validation loss, and to the newest."""
LOCK = "run.lock"
"""Held by the process that trains the run; the first file of a run."""


def checkpoint_of(path: Path, link: str | None = None) -> Path:
    """The checkpoint that a path means now: of a run the one that `link` leads to, if not given its
    best, or the latest if there is no best; of a link in a run its target, because a run that goes
    on moves its links. Any other path is returned as it is."""
    if is_run(path):
        names = (BEST, LATEST) if link is None else (link,)
        path = next((path / name for name in names if (path / name).exists()), path / names[-1])
    elif not is_run(path.parent):
        return path
    return path.parent / path.readlink() if path.is_symlink() else path


def may_become_run(path: Path) -> bool:
    """True if a training may still make a run here: nothing is here, or a run that is being
    prepared."""
    if not path.is_dir():
        return not path.exists()
    return is_run(path) or (path / LOCK).exists() or not any(path.iterdir())


def is_run(path: Path) -> bool:
    """Whether a folder is a run's; one that may not be entered is not known to be."""
    try:
        return (path / RUN).is_file()
    except PermissionError:
        return False


def name_of(path: Path) -> str:
    """What a checkpoint is called: the name of its folder, or of the run that it lies in, whose
    checkpoints are called after steps. A link is what it points to. Replies and log lines hold this
    name, and a folder may be called by anything: what is not UTF-8 or not printable is U+FFFD."""
    resolved = path.resolve()
    folder = resolved.parent if is_run(resolved.parent) else resolved
    name = os.fsencode(folder.name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in name)
