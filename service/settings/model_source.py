"""ModelSource: a model to be served, as `NAME=PATH` or PATH. Without torch.

What stands before the first `=` is a name, unless there is a slash in it: `runs/lr=0.1` is a path,
and so is `./lr=0.1`. Not here: what lies at a path (`service/cli/commands/servable.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.run_folder import name_of

MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's checkpoint is, or the run whose best is meant, and what the model is called;
    None: as the checkpoint's folder is, or its run."""

    path: Path
    name: str | None = None

    @property
    def served_name(self) -> str:
        """The name by which requests choose the model."""
        return self.name or name_of(self.path)

    def __str__(self) -> str:
        """As it is written on a command line."""
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return str(path) if self.name is None else f"{self.name}={path}"


def model_source(given: Any) -> ModelSource:
    """What one word means. Raises ValueError."""
    if isinstance(given, ModelSource):
        return given
    if isinstance(given, Path):
        return ModelSource(given)
    if not isinstance(given, str) or not given:
        raise ValueError("a model is the path of its checkpoint, or NAME=PATH")
    name, equals, path = given.partition("=")
    if not equals or "/" in name:
        return ModelSource(Path(given))
    if not path:
        raise ValueError(f"{given!r} has no path: write NAME=PATH")
    return ModelSource(Path(path), checked_name(name))


def checked_name(text: str) -> str:
    """A model's name, as replies and metrics can say it. Raises ValueError."""
    if not text.strip() or not text.isprintable() or len(text) > MAX_NAME:
        raise ValueError(f"a name has 1 to {MAX_NAME} printable characters, not only spaces")
    return text


def listed(given: Any) -> Any:
    """The words of a setting: a list as it is, one path by itself, and of a variable's text, where
    each part has a name, what stands between commas."""
    if isinstance(given, (ModelSource, Path)):
        return [given]
    if not isinstance(given, str):
        return given
    parts = [part.strip() for part in given.split(",")]
    named = all(part.find("=") > 0 and "/" not in part.partition("=")[0] for part in parts)
    return parts if named else [given]


def named(sources: Iterable[ModelSource]) -> tuple[ModelSource, ...]:
    """The models of a server. Several have each a name of its own, by which requests choose; one
    keeps what it has. Raises ValueError where two would be called the same."""
    sources = tuple(sources)
    if len(sources) < 2:
        return sources
    result = tuple(replace(source, name=source.served_name) for source in sources)
    names = [source.name for source in result]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two models would be called {name!r}: give each a name of its own, as NAME=PATH"
            )
    return result
