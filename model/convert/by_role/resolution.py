"""Resolution: the result of choosing a computation, and the questions that stay open."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.finding import FIELDS, Finding, Findings, canonical
from logitd.model.convert.foreign import ConvertError


@dataclass(frozen=True)
class Alternative:
    """A value of a field that was not chosen, and its penalty. `clear` is True if this value is
    clearly worse than the chosen value."""

    field: str
    value: Any
    penalty: float
    clear: bool


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The chosen computation, with the evidence for it.

    origins        reason for the value of each field
    verified       sentence about how well the computation agrees with the source
    penalty        the chosen variant's loss in nats per token, or its largest logit difference
    alternatives   other values that were tried
    warning        sentence about unusual values that were chosen by their loss, if there are two or
                   more, or about defaults of the owner's code; "" if there are none
    """

    computation: Computation
    origins: Mapping[str, str]
    verified: str
    penalty: float | None = None
    alternatives: Sequence[Alternative] = ()
    warning: str = ""


class OpenQuestions(ConvertError):
    """Raised if some fields cannot be resolved. The message lists the flags that set these
    fields."""

    def __init__(self, message: str, fields: Sequence[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def question(name: str, finding: Finding) -> str:
    """A line about an open field: its flag, the possible values, and the reason why it is open."""
    if isinstance(finding.values[0], bool):
        return f"{flag(name)} or {flag(f'no_{name}')}   ({finding.origin})"
    values = "|".join(map(str, finding.values[:6])) + ("|..." if len(finding.values) > 6 else "")
    return f"{flag(name)} {values}   ({finding.origin})"


def first(findings: Findings) -> Computation:
    """The computation with the first value of each field."""
    return canonical(Computation(**{name: findings[name].values[0] for name in FIELDS}))


def origins_of(findings: Findings, **resolved: str) -> dict[str, str]:
    """The reason for the value of each field. Reasons in `resolved` take precedence."""
    assumed = {
        name: finding.origin if finding.resolved else f"assumed: {finding.origin}"
        for name, finding in findings.items()
    }
    return {name: resolved.get(name, assumed[name]) for name in FIELDS}
