"""Servable: finds the checkpoint that `logitd serve PATH` means, or says which command to try.

It recognizes checkpoints, runs, folders of these, files within them and mistyped names.
`import_model.py` handles models trained elsewhere.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CARD, CONFIG, RANKS, WEIGHTS, is_checkpoint
from logitd.model.checkpoint.run_folder import (
    BASE,
    BEST,
    RUN,
    checkpoint_of,
    checkpoints_in,
    is_run,
    may_become_run,
)
from logitd.model.files import CONFIG_BYTES, FileError, parse_json, read_regular, require_regular
from logitd.service.cli.program_name import command
from logitd.service.settings.common import BUNDLED_CHECKPOINT

KEPT_IN = (Path("checkpoints"), Path("runs"))
"""The usual folders of checkpoints and runs, below the working directory."""
MOST_NAMED = 6
"""Maximum number of paths that a message lists."""
TEXTS = (".txt", ".md", ".py", ".jsonl", ".parquet")
"""Suffixes of text files, which are for training and cannot be served."""


class NotServable(Exception):
    """Raised if a path cannot be served. The message gives the reason and a command that helps."""


class NotFollowed(Exception):
    """Raised if --follow is set but the path is not a run."""


def checkpoint_at(path: Path, follow: str | None = None) -> Path:
    """The folder of the checkpoint to serve: the path itself, the best checkpoint of a run, or the
    checkpoint to which a run's link `follow` points.

    Three kinds of path are returned unchanged: a followed run whose first checkpoint the server
    will wait for; an unreadable path; and a path that may be another program's model.

    Raises NotServable and NotFollowed.
    """
    try:
        if is_run(path):
            return _of_run(path, follow)
        if follow is not None and not may_become_run(path):
            raise NotFollowed(_not_a_run(path, follow))
        if follow is None and (problem := _problem(path)) is not None:
            raise NotServable(problem)
    except PermissionError:
        return path
    return path


def _of_run(run: Path, link: str | None) -> Path:
    """The checkpoint to serve for a run, or the run itself if it is followed and has no checkpoint
    yet."""
    checkpoint = checkpoint_of(run, link)
    if (checkpoint / CONFIG).exists():
        if _is_adapter(checkpoint):
            raise NotServable(_adapter(run / (link or BEST), _base_of(run)))
        return checkpoint
    if link is not None:
        return run
    if kept := [*checkpoints_in(run).values()]:
        raise NotServable(
            f"{run} is a run whose links to its checkpoints are missing, as in a copy without "
            f"links; serve a checkpoint:\n\n  {command('serve', kept[-1])}"
        )
    raise NotServable(
        f"{run} is a run that has no checkpoint yet. If it is training, wait for the first one with"
        f"\n\n  {command('serve', run, '--follow', BEST)}\n\n"
        f"Otherwise continue the run with\n\n  {command('train', '--resume', '--out', run)}"
    )


def _not_a_run(path: Path, link: str) -> str:
    if is_run(path.parent):
        follow = command("serve", path.parent, "--follow", link)
        return f"{path} is one checkpoint of a run; follow the run instead:\n\n  {follow}"
    return f"--follow {link} needs the folder of a run, but {path} is not one"


def _problem(path: Path) -> str | None:
    """The reason why a path that is not a run cannot be served; None if it may be servable."""
    if is_checkpoint(path):
        return _adapter(path, "BASE") if _is_adapter(path) else None
    if not path.exists():
        return _mistyped(path)
    if path.is_dir():
        return _folder(path)
    try:
        require_regular(path)
    except FileError as error:
        return str(error)
    return _file(path)


def _is_adapter(path: Path) -> bool:
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
    except (OSError, ValueError):
        return False  # loading the checkpoint reports the fault
    return isinstance(document, dict) and document.get("kind") == "adapter"


def _adapter(path: Path, base: str) -> str:
    merged = path.resolve().with_name("merged") if base == "BASE" else path.parent / "merged"
    return (
        f"{path} is an adapter; merge it with its base first:\n\n"
        f"  {command('merge', base, path, merged)}\n  {command('serve', merged)}"
    )


def _base_of(run: Path) -> str:
    """The path of the checkpoint that a run adapts: the run's copy, or the path on the run's
    command line; "BASE" if it cannot be read."""
    if (kept := run / BASE).is_dir():
        return str(kept)
    try:
        document = json.loads(read_regular(run / RUN, CONFIG_BYTES))
        return str(document["config"]["from_checkpoint"] or "BASE")
    except (OSError, ValueError, LookupError, TypeError):
        return "BASE"


def _file(path: Path) -> str | None:
    """The reason why a text file, or one file of a checkpoint, cannot be served; None for other
    files, which may be models."""
    if path.name in (CONFIG, WEIGHTS, RANKS, CARD) and is_checkpoint(path.parent):
        return (
            f"{path} is one file of a checkpoint; serve its folder:\n\n"
            f"  {command('serve', path.parent)}"
        )
    if path.suffix in TEXTS:
        run = Path("runs") / path.stem
        return (
            f"{path} is a text; train a model on it first:\n\n"
            f"  {command('train', '--data', path, '--out', run)}\n  {command('serve', run)}"
        )
    return None


def _folder(path: Path) -> str | None:
    """The reason why an empty folder, a folder of checkpoints or runs, or a part of a run cannot be
    served; None for other folders, which may be models."""
    children = sorted(path.iterdir())
    if not children:
        return f"{path} is empty. {beginnings(path)}"
    if within := [child for child in children if is_checkpoint(child) or is_run(child)]:
        return f"{path} is not a checkpoint, but a folder of some; serve one:\n\n{_listed(within)}"
    if is_run(path.parent):
        return f"{path} is a part of a run; serve the run:\n\n  {command('serve', path.parent)}"
    return None


def _mistyped(path: Path) -> str:
    """A message about a missing path, with similar paths or all paths that can be served."""
    if meant := similar(path):
        return f"{path} does not exist; did you mean\n\n{_listed(meant)}"
    if known := _near(path):
        return f"{path} does not exist. These can be served:\n\n{_listed(known)}"
    if path == BUNDLED_CHECKPOINT:
        return f"this installation has no bundled checkpoint. {beginnings(Path('runs/first'))}"
    return f"{path} does not exist. {beginnings(path)}"


def beginnings(run: Path) -> str:
    """Commands that serve something where nothing has been trained yet."""
    trained = f"  {command('train', '--out', run)}\n  {command('serve', run)}"
    if not is_checkpoint(BUNDLED_CHECKPOINT):
        return f"Train a model and serve it with\n\n{trained}"
    return (
        f"Serve the bundled checkpoint with\n\n  {command('serve')}\n\n"
        f"or train one of your own with\n\n{trained}"
    )


def similar(path: Path) -> list[Path]:
    """Checkpoints and runs whose names are similar to the name of a path."""
    known = _near(path)
    close = difflib.get_close_matches(path.name, [child.name for child in known], MOST_NAMED, 0.6)
    return [child for child in known if child.name in close]


def _near(path: Path) -> list[Path]:
    """Checkpoints and runs next to a path, and in the usual folders."""
    return [
        child
        for folder in dict.fromkeys((path.parent, *KEPT_IN))
        if folder.is_dir()
        for child in sorted(folder.iterdir())
        if is_checkpoint(child) or is_run(child)
    ]


def _listed(paths: Sequence[Path]) -> str:
    lines = [f"  {command('serve', path)}" for path in paths[:MOST_NAMED]]
    if len(paths) > MOST_NAMED:
        lines.append(f"  ... and {len(paths) - MOST_NAMED} more")
    return "\n".join(lines)
