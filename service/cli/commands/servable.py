"""Servable: which checkpoint `logitd serve PATH` means, or a sentence with the next command.

Knows a checkpoint, a run, a folder of either, a file within one and a name that is mistyped. Models
of other people's making are the business of `import_model.py`.
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CARD, CONFIG, RANKS, WEIGHTS, is_checkpoint
from logitd.model.checkpoint.run_folder import BEST, RUN, checkpoint_of, is_run, may_become_run
from logitd.model.files import CONFIG_BYTES, parse_json, read_regular
from logitd.service.cli.program_name import command

KEPT_IN = (Path("checkpoints"), Path("runs"))
"""Where checkpoints and runs usually are, below the working directory."""
MOST_NAMED = 6
TEXTS = (".txt", ".md", ".py", ".jsonl", ".parquet")
"""How names of files end that are trained on and not served."""


class NotServable(Exception):
    """The path is not of a checkpoint; the message says what it is, and a command that gets on."""


class NotFollowed(NotServable):
    """What is to be followed is not a run, whatever else it is."""


def checkpoint_at(path: Path, follow: str | None = None) -> Path:
    """The folder of the checkpoint that a path means: itself, or the best of a run, or the one to
    which the link `follow` of a run leads. A run that is followed may have saved none: then it is
    the run itself, for which the server waits.

    What may be somebody else's model, and what cannot be looked at, is returned as it is. Raises
    NotServable.
    """
    try:
        if is_run(path):
            return _of_run(path, follow)
        if follow is not None:
            if not may_become_run(path):
                raise NotFollowed(_not_followed(path, follow))
            return path
        if is_checkpoint(path):
            return path if not _is_adapter(path) else _refuse_adapter(path, "BASE")
        if not path.exists():
            raise NotServable(_mistyped(path))
        if path.is_file():
            return _not_within(path)
        return _not_above(path)
    except PermissionError:
        return path


def _of_run(run: Path, link: str | None) -> Path:
    """The checkpoint of a run that would be served now."""
    checkpoint = checkpoint_of(run, link)
    if (checkpoint / CONFIG).exists():
        if _is_adapter(checkpoint):
            return _refuse_adapter(run / (link or BEST), _base_of(run))
        return checkpoint
    if link is not None:
        return run
    raise NotServable(
        f"{run} is a run that has not saved a checkpoint yet. While it trains, the first one is "
        f"awaited by\n\n  {command('serve', run, '--follow', BEST)}\n\n"
        f"Otherwise it goes on with\n\n  {command('train', '--resume', '--out', run)}"
    )


def _not_followed(path: Path, link: str) -> str:
    """What is to be followed is not a run."""
    if is_run(path.parent):
        follow = command("serve", path.parent, "--follow", link)
        return f"{path} is one checkpoint of a run; what is followed is the run:\n\n  {follow}"
    return (
        f"--follow {link} serves what a training saves next, and {path} is not the folder of a run"
    )


def _is_adapter(path: Path) -> bool:
    try:
        document = parse_json(read_regular(path / CONFIG, CONFIG_BYTES))
    except (OSError, ValueError):
        return False  # loading says what is wrong with it
    return isinstance(document, dict) and document.get("kind") == "adapter"


def _refuse_adapter(path: Path, base: str) -> Path:
    merged = path.resolve().with_name("merged") if base == "BASE" else path.parent / "merged"
    raise NotServable(
        f"{path} is an adapter, which is served when it is merged with its base:\n\n"
        f"  {command('merge', base, path, merged)}\n  {command('serve', merged)}"
    )


def _base_of(run: Path) -> str:
    """The checkpoint that a run adapts, as it was named to it."""
    try:
        document = json.loads(read_regular(run / RUN, CONFIG_BYTES))
        return str(document["config"]["from_checkpoint"] or "BASE")
    except (OSError, ValueError, LookupError, TypeError):
        return "BASE"


def _not_within(path: Path) -> Path:
    """A file: a text and one of a checkpoint's own are taken for mistakes, others may be models."""
    if path.name in (CONFIG, WEIGHTS, RANKS, CARD) and is_checkpoint(path.parent):
        raise NotServable(
            f"{path} is one file of a checkpoint, which is a folder:\n\n"
            f"  {command('serve', path.parent)}"
        )
    if path.suffix in TEXTS:
        run = Path("runs") / path.stem
        raise NotServable(
            f"{path} is a text, and what is served is a model; one is trained on it by\n\n"
            f"  {command('train', '--data', path, '--out', run)}\n  {command('serve', run)}"
        )
    return path


def _not_above(path: Path) -> Path:
    """A folder: one that holds checkpoints or runs is taken for a mistake."""
    children = sorted(path.iterdir())
    if not children:
        raise NotServable(
            f"{path} is empty. The bundled checkpoint is served by\n\n  {command('serve')}\n\n"
            f"and one of your own by\n\n  {command('train', '--out', path)}\n"
            f"  {command('serve', path)}"
        )
    if within := [child for child in children if is_checkpoint(child) or is_run(child)]:
        raise NotServable(f"{path} is not a checkpoint, but has some in it:\n\n{_listed(within)}")
    if is_run(path.parent):
        raise NotServable(f"{path} is a part of a run:\n\n  {command('serve', path.parent)}")
    return path


def _mistyped(path: Path) -> str:
    """There is nothing of this name: what may have been meant, or what there is."""
    known = [
        child
        for folder in dict.fromkeys((path.parent, *KEPT_IN))
        if folder.is_dir()
        for child in sorted(folder.iterdir())
        if is_checkpoint(child) or is_run(child)
    ]
    close = difflib.get_close_matches(path.name, [child.name for child in known], MOST_NAMED, 0.6)
    if meant := [child for child in known if child.name in close]:
        return f"{path} does not exist; did you mean\n\n{_listed(meant)}"
    if known:
        return f"{path} does not exist. Here is what can be served:\n\n{_listed(known)}"
    return (
        f"{path} does not exist. The bundled checkpoint is served by\n\n  {command('serve')}\n\n"
        f"and one of your own after\n\n  {command('train', '--out', path)}"
    )


def _listed(paths: Iterable[Path]) -> str:
    lines = [f"  {command('serve', path)}" for path in paths]
    more = "" if len(lines) <= MOST_NAMED else f"\n  ... and {len(lines) - MOST_NAMED} more"
    return "\n".join(lines[:MOST_NAMED]) + more
