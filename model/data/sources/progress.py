"""Progress of a download: the events that a `Report` callback receives.

Covers where a download stands and that a text is on this machine. Does not print anything: the
command line does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Downloading:
    """Where the download of a text stands, every few seconds."""

    url: str
    done: int  # bytes
    total: int | None  # bytes, if the server told


@dataclass(frozen=True)
class Downloaded:
    """A text is on this machine, fetched now or before."""

    url: str
    size: int  # bytes
    path: Path
    from_cache: bool


Report = Callable[[Downloading | Downloaded], None]


def unreported(event: Downloading | Downloaded) -> None:
    """Tell nobody."""
