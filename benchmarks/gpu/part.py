"""Input and output of one part of the run on a GPU. Imports only the standard library."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """The device to run on. With `tiny`, sizes are so small that any machine can run them, and
    times are not comparable."""

    device: str
    tiny: bool
    train_seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A case of a part with its figures; `holds` is None for a measurement."""

    case: str
    figures: dict[str, Any]
    holds: bool | None = None
