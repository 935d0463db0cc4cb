"""Counters: how far a run is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """Of all sittings of a run together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
