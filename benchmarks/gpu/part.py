"""What a part of the run is given, and what it yields. Standard library only."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to run. `tiny`: sizes that any machine runs, whose times mean nothing."""

    device: str
    tiny: bool
    train_seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A case of a part, and its figures; `holds` is None for a measurement."""

    case: str
    figures: dict[str, Any]
    holds: bool | None = None
