"""Run folder: how a run's directory is recognised by those who only serve or read what lies in it.

What else is in one, and how it is written: `model/training/run/directory.py`.
"""

import os
from pathlib import Path

RUN = "run.json"
"""What was asked for: a folder that has this file is a run's."""
BEST, LATEST = "best", "latest"
"""Links to the checkpoint with the lowest validation loss, and to the newest."""


def checkpoint_of(path: Path, link: str | None = None) -> Path:
    """Where the checkpoint is that a path means now: of a run the one that `link` leads to, if not
    given its best, or the latest while none is. It is the checkpoint itself, not the link to it: a
    run that goes on points it elsewhere. Any other path is its own answer."""
    if not is_run(path):
        return path
    names = (BEST, LATEST) if link is None else (link,)
    leads = next((path / name for name in names if (path / name).exists()), path / names[-1])
    return path / leads.readlink() if leads.is_symlink() else leads


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
