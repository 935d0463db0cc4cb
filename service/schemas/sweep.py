"""Schemas of /sweep: one intervention carried out in one place after another."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from logitd.service.schemas.base import (
    Examples,
    ModelName,
    Place,
    ReplyBody,
    RequestBody,
    Text,
    Timeout,
    TokenId,
    TokenIds,
)
from logitd.service.schemas.interventions import Intervention, Interventions
from logitd.service.schemas.tensors import OutputReply

Axis = Literal["layers", "heads", "positions"]


class SweepRequest(RequestBody):
    """A grid of a token's logit, or of the difference of two, under an intervention that is carried
    out in one layer, head or position after another."""

    examples: ClassVar[Examples] = {
        "Without each head in turn": {
            "prompt": "for i in range(10",
            "token": ")",
            "vary": {"stage": "blocks.*.attention.heads", "operation": "zero"},
            "over": ["layers", "heads"],
        },
        "What another prompt has, layer by layer and position by position": {
            "prompt": "import sys",
            "vary": {
                "stage": "blocks.*.output",
                "operation": "set",
                "from": {"prompt": "import os"},
                "positions": [-1],
            },
            "over": ["layers", "positions"],
            "stream": True,
        },
    }

    prompt: Text | TokenIds = Field(description="One text, or the ids of one.")
    token: Text | None = Field(None, description="Whose logit is looked at, by text.")
    token_id: TokenId | None = Field(
        None, description="The same by id. Without either: the likeliest after the prompt."
    )
    minus: Text | None = Field(None, description="Whose logit is subtracted, by text.")
    minus_id: TokenId | None = Field(None, description="The same by id.")
    position: Place = Field(-1, description="Of the prompt, whose logits these are.")
    vary: Intervention = Field(
        description="What is carried out in each place; its heads and positions limit the places."
    )
    over: Annotated[list[Axis], Field(min_length=1, max_length=3)] = Field(
        description="The axes of the grid: layers (of the stage's *), heads, positions."
    )
    interventions: Interventions = Field(
        default_factory=list, description="Changes that stand everywhere, carried out before."
    )
    stream: bool = Field(False, description="Send each cell as it is computed.")
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "SweepRequest":
        if len(set(self.over)) < len(self.over):
            raise ValueError(f"over names an axis twice: {self.over}")
        if self.token is not None and self.token_id is not None:
            raise ValueError("token and token_id both name the token; give one of them")
        if self.minus is not None and self.minus_id is not None:
            raise ValueError("minus and minus_id both name the other token; give one of them")
        if self.vary.positions == "generated":
            raise ValueError("vary.positions are 'generated', and nothing is generated here")
        return self


class SweptToken(ReplyBody):
    id: int
    text: str
    bytes: list[int]


class SweepAxis(ReplyBody):
    name: Axis
    values: list[int]


class SweepCell(ReplyBody):
    """`value` is the token's logit, less that of the other where there is one."""

    layer: int | None = Field(description="null: the axis is not swept.")
    head: int | None
    position: int | None
    logit: float
    minus_logit: float | None
    value: float


class SweepReply(OutputReply):
    token_ids: list[int] = Field(description="Of the prompt.")
    token: SweptToken
    minus: SweptToken | None
    axes: list[SweepAxis]
    unchanged: SweepCell = Field(description="Without what varies.")
    cells: list[SweepCell] = Field(description="In the order of the axes, the last one fastest.")
    grid: list[Any] = Field(description="Their values, nested by the axes.")
