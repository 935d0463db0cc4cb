"""Progress of a download: the events that a `Report` callback receives."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Downloading:
    """Progress of a download, every few seconds."""

    url: str
    done: int  # bytes
    total: int | None  # bytes, if the server announced them


@dataclass(frozen=True)
class Downloaded:
    """A text is on this machine, fetched now or before."""

    url: str
    size: int  # bytes
    path: Path
    from_cache: bool


Report = Callable[[Downloading | Downloaded], None]


def unreported(event: Downloading | Downloaded) -> None:
    """Ignore an event."""
