"""ModelSource: a model to serve, written as `NAME=PATH` or PATH. This module does not import torch.

The text before the first `=` is a name, unless it contains a slash: `runs/lr=0.1` and `./lr=0.1`
are paths. `service/cli/commands/servable.py` checks the paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.run_folder import name_of

MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to serve: its name, and the path of a checkpoint or run. A run is served with its
    best checkpoint. If `name` is None, the model is named after its run, or after its folder if
    it is not in a run."""

    path: Path
    name: str | None = None

    @property
    def served_name(self) -> str:
        """The name by which requests choose the model."""
        return self.name or name_of(self.path)

    def __str__(self) -> str:
        """The model as written on a command line."""
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return str(path) if self.name is None else f"{self.name}={path}"


def model_source(given: Any) -> ModelSource:
    """Parse a command-line argument that names a model. Raises ValueError."""
    if isinstance(given, ModelSource):
        return given
    if isinstance(given, Path):
        return ModelSource(given)
    if not isinstance(given, str) or not given:
        raise ValueError("a model is the path of a checkpoint, or NAME=PATH")
    name, equals, path = given.partition("=")
    if not equals or "/" in name:
        return ModelSource(Path(given))
    if not path:
        raise ValueError(f"{given!r} has no path: write NAME=PATH")
    return ModelSource(Path(path), checked_name(name))


def checked_name(text: str) -> str:
    """Check that a model may have this name in replies and metrics. Raises ValueError."""
    if not text.strip() or not text.isprintable() or len(text) > MAX_NAME:
        raise ValueError(f"a name has 1 to {MAX_NAME} printable characters, not only spaces")
    return text


def listed(given: Any) -> Any:
    """The models of a setting, as a list. A variable's text is split at its commas if every part
    has the form NAME=PATH; any other text is one path."""
    if isinstance(given, (ModelSource, Path)):
        return [given]
    if not isinstance(given, str):
        return given
    parts = [part.strip() for part in given.split(",")]
    named = all(part.find("=") > 0 and "/" not in part.partition("=")[0] for part in parts)
    return parts if named else [given]


def named(sources: Iterable[ModelSource]) -> tuple[ModelSource, ...]:
    """The models of a server, named if there are several. Raises ValueError if two of them have the
    same name."""
    sources = tuple(sources)
    if len(sources) < 2:
        return sources
    result = tuple(replace(source, name=source.served_name) for source in sources)
    names = [source.name for source in result]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two models have the name {name!r}: give each a different name, as NAME=PATH"
            )
    return result
