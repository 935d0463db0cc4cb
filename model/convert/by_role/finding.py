"""Findings: the possible values of the fields of a `Computation`, and the unused fields."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from logitd.model.convert.by_role.computation import Computation

FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Computation))
CONVENTION = "convention"
UNUSED = "not used"
WITHOUT_ROTARY: Mapping[str, Any] = {
    "rotary_layout": "half",
    "rotary_direction": "forward",
    "rope_theta": 1e4,
}
ANY_ORDER: Mapping[str, Any] = {"qk_norm_position": "before_rotary"}
"""The field without effect if there are no rotary positions, or no norms of queries and keys with
weights, and its value then."""


@dataclass(frozen=True)
class Finding:
    """The possible values of one field, the most likely first, and the reason for them.

    ambiguous   True if no value may be assumed. The user or the owner's code must confirm the value
                even if `values` has only one (the only one that this project can compute)
    """

    values: tuple[Any, ...]
    origin: str
    ambiguous: bool = False

    @property
    def resolved(self) -> bool:
        return len(self.values) == 1 and not self.ambiguous


Findings = Mapping[str, Finding]


def without_unused(findings: Findings) -> dict[str, Finding]:
    """The findings, with the fields for rotary positions marked as unused if positions cannot be
    rotary."""
    if "rotary" in findings["positions"].values:
        return dict(findings)
    unused = {name: Finding((value,), UNUSED) for name, value in WITHOUT_ROTARY.items()}
    return {**findings, **unused}


def unused(how: Computation) -> dict[str, Any]:
    """The fields that this computation does not use, with fixed values."""
    without_norms = {"qk_norm_eps": how.norm_eps} if how.qk_norm == "none" else {}
    rotary = how.positions == "rotary"
    ordered = rotary and how.qk_norm == "learned"
    return {
        **without_norms,
        **({} if rotary else WITHOUT_ROTARY),
        **({} if ordered else ANY_ORDER),
    }


def canonical(how: Computation) -> Computation:
    """The same computation, with unused fields set to fixed values so that equivalent computations
    compare equal."""
    return replace(how, **unused(how))
