"""Input and output of one part of the run on a GPU. Imports only the standard library."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """The device to run on. With `tiny`, sizes are small enough for any machine, and times are not
    meaningful."""

    device: str
    tiny: bool
    train_seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a part: a case and its figures. `holds` is True or False for a check, and None
    for a measurement."""

    case: str
    figures: dict[str, Any]
    holds: bool | None = None
