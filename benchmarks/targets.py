"""Bounds that measured figures should reach, and a table of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["share", "ratio", "us", "s", "MB"]


@dataclass(frozen=True, slots=True)
class Target:
    """A lower or upper bound on a figure. `measured` is None if the figure was not measured."""

    name: str
    measured: float | None
    bound: float
    unit: Unit
    at_least: bool = True

    @property
    def reached(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def json(self) -> dict[str, Any]:
        return {
            "target": self.name,
            "bound": self.bound,
            "at_least": self.at_least,
            "unit": self.unit,
            "measured": self.measured,
            "reached": self.reached,
        }


def table(targets: Sequence[Target]) -> str:
    """Targets in Markdown."""
    lines = ["| | target | measured | reached |", "|---|---:|---:|---|"]
    for target in targets:
        sign = ">=" if target.at_least else "<="
        bound = written(target.bound, target.unit)
        measured = "" if target.measured is None else written(target.measured, target.unit)
        reached = {None: "not measured", True: "yes", False: "no"}[target.reached]
        lines.append(f"| {target.name} | {sign} {bound} | {measured} | {reached} |")
    return "\n".join(lines)


def written(value: float, unit: Unit) -> str:
    match unit:
        case "share":
            return f"{value:.0%}"
        case "ratio":
            return f"{value:.2f}"
        case "s":
            return f"{value:.1f} s"
        case _:
            return f"{value:,.0f} {unit}"
