"""Schemas of interventions: what a body asks to be changed inside the forward.

Here stands what can be said without a model; which stages there are, and which shapes their values
have, is checked when the request is resolved (`service/api/requests/interventions.py`).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from logitd.service.schemas.base import (
    Examples,
    Places,
    PositionChoice,
    PositionRange,
    RequestBody,
    Text,
    TokenIds,
)

MAX_INTERVENTIONS = 256

StageName = Annotated[
    str, Field(min_length=1, max_length=100, description="A name of GET /stages; * is any layer.")
]
Row = Annotated[list[float], Field(min_length=1, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
RowsOfHeads = Annotated[list[Rows], Field(min_length=1, fail_fast=True)]


class Source(RequestBody):
    """What another prompt has at the same stage, computed in the same request."""

    examples: ClassVar[Examples] = {}

    prompt: Text | TokenIds
    positions: PositionChoice | None = Field(
        None,
        description="Absent: those of the intervention, where it names any, and all otherwise.",
    )


class Intervention(RequestBody):
    """One change of a stage, at some positions and heads."""

    examples: ClassVar[Examples] = {}
    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    stage: StageName
    operation: Literal["zero", "scale", "add", "set"]
    positions: Literal["all", "prompt", "generated", "last"] | Places | PositionRange = Field(
        "all",
        description="All that is computed, the prompt, what is generated after it, or positions of "
        "the prompt.",
    )
    heads: Places | None = Field(None, description="From 0. Absent: all.")
    factor: float | None = Field(
        None, ge=-1e30, le=1e30, description="Of scale; of what add adds (absent: 1)."
    )
    values: Row | Rows | RowsOfHeads | None = Field(
        None,
        description="For add and set: the stage's values at one position, for all, or a list of "
        "them, for each position.",
    )
    source: Source | None = Field(
        None,
        alias="from",
        description="Instead of values: for set, position by position, what another prompt has; "
        "for add, the mean over its positions.",
    )
    minus: Source | None = Field(
        None, description="With add and from: a prompt whose mean is subtracted (steering)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Intervention":
        operation = self.operation
        given = [
            name
            for name, value in (
                ("factor", self.factor),
                ("values", self.values),
                ("from", self.source),
                ("minus", self.minus),
            )
            if value is not None
        ]
        takes = {
            "zero": (),
            "scale": ("factor",),
            "add": ("factor", "values", "from", "minus"),
            "set": ("values", "from"),
        }[operation]
        for name in given:
            if name not in takes:
                raise ValueError(f"{operation!r} takes no {name}; leave it out")
        if operation == "scale" and self.factor is None:
            raise ValueError("'scale' needs a factor")
        if operation in ("add", "set") and (self.values is None) == (self.source is None):
            raise ValueError(f"{operation!r} needs values or from, one of the two")
        if self.minus is not None and self.source is None:
            raise ValueError("minus is subtracted from what 'from' has; give from as well")
        return self


Interventions = Annotated[
    list[Intervention],
    Field(
        max_length=MAX_INTERVENTIONS,
        fail_fast=True,
        description="Changes inside the forward, carried out in this order. Such a prompt is "
        "computed by plain code beside the others, and shares no prefix with them.",
    ),
]
