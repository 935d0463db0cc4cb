"""Sweep: an intervention carried out in one place after another.

The places form a grid of cells, which `model/inference/sweep.py` lists. The values of a `from`
prompt are computed only once, for all layers and positions, and each cell takes its part of them.
"""

from collections.abc import Generator, Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from logitd.model.inference.engine.cost import prices
from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.engine.validation import check_token_ids
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.distribution import largest
from logitd.model.inference.sweep import Axis, Cell, Grid, make_grid
from logitd.model.operations.body import (
    Examples,
    ModelBody,
    Place,
    Reply,
    ReplyBody,
    Text,
    Timeout,
    TokenIds,
)
from logitd.model.operations.computed import Computed
from logitd.model.operations.interventions import (
    Intervention,
    Interventions,
    resolve_interventions,
)
from logitd.model.operations.operation import (
    Compute,
    Operation,
    Planning,
    Series,
    Subject,
    new_id,
)
from logitd.model.operations.prompts import encode_all, resolve_position
from logitd.model.operations.tokens import ComparedTokens, NamedToken, token_json


class SweepRequest(ComparedTokens, ModelBody):
    """The logit of a token, or the difference of two logits, while an intervention is carried out
    in one layer, head or position after another. The results form a grid."""

    examples: ClassVar[Examples] = {
        "Without each head in turn": {
            "prompt": "for i in range(10",
            "token": ")",
            "vary": {"stage": "blocks.*.attention.heads", "operation": "zero"},
            "over": ["layers", "heads"],
        },
        "Another prompt's stream, layer by layer and position by position": {
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

    prompt: Text | TokenIds = Field(description="One text, or the token ids of one text.")
    position: Place = Field(-1, description="Position of the prompt whose logits are compared.")
    vary: Intervention = Field(
        description="The intervention carried out in each place. Its heads and positions limit "
        "the places."
    )
    over: Annotated[list[Axis], Field(min_length=1, max_length=3)] = Field(
        description="The axes of the grid: layers (of the stage's *), heads, positions."
    )
    interventions: Interventions = Field(
        default_factory=list,
        description="Additional interventions in every cell, carried out before `vary`.",
    )
    stream: bool = Field(False, description="Send each cell as it is computed.")
    timeout: Timeout = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.over)) < len(self.over):
            raise ValueError(f"over names an axis twice: {self.over}")
        if self.vary.positions == "generated":
            raise ValueError("vary.positions are 'generated', but nothing is generated here")
        return self


class SweptToken(NamedToken):
    """A token whose logit is compared."""


class SweepAxis(ReplyBody):
    name: Axis
    values: list[int]


class SweepCell(ReplyBody):
    """`value` is the logit of `token`, minus that of `minus` if given."""

    layer: int | None = Field(description="null if the sweep has no such axis.")
    head: int | None
    position: int | None
    logit: float
    minus_logit: float | None
    value: float


class SweepReply(Reply):
    token_ids: list[int] = Field(description="Token ids of the prompt.")
    token: SweptToken
    minus: SweptToken | None
    axes: list[SweepAxis]
    unchanged: SweepCell = Field(description="The result without `vary`.")
    cells: list[SweepCell] = Field(
        description="In the order of the axes; the last axis changes fastest."
    )
    grid: list[Any] = Field(description="Values of the cells as nested lists, one level per axis.")


def plan(body: SweepRequest, subject: Subject) -> Planning:
    """Make the grid. The logits without `vary` are computed before any cell."""
    (prompt,) = encode_all([body.prompt], "prompt", subject)
    (constant,) = yield from resolve_interventions(body.interventions, [prompt], subject)
    (varied,) = yield from resolve_interventions([body.vary], [prompt], subject, field="vary")
    row = OutputsRequest(
        request_id=new_id("outputs"),
        token_ids=prompt,
        positions=resolve_position(body.position, len(prompt)),
        output=Logits(),
        interventions=constant,
    )
    grid = make_grid(varied, body.over, len(prompt), subject.config)
    subject.check_listed(grid.count, "cells", "over")
    columns = yield from _columns(body, row, subject)
    unchanged = replace(row, output=Logits(columns=columns))
    held = sum(change.values.size for change in varied if change.values is not None)
    subject.check_array(held)
    computed: Computed = yield Compute([unchanged])
    cells = (cell for cell, _ in grid.cells())
    tokens = [token_json(subject.tokenizer, token_id) for token_id in columns]

    def part(computed: Computed) -> dict[str, Any]:
        return _cell_json(next(cells), _row(computed))

    return Series(
        head={
            "token_ids": list(prompt),
            "token": tokens[0],
            "minus": tokens[1] if len(tokens) > 1 else None,
            "axes": [{"name": name, "values": list(at)} for name, at in grid.axes.items()],
            "unchanged": _cell_json(Cell(None, None, None), _row(computed)),
        },
        jobs=_jobs(grid, unchanged),
        part=part,
        event="cell",
        members=lambda parts: {"cells": parts, "grid": _nested(parts, grid)},
        held=held,
        tokens=grid.count * sum(prices(next(_jobs(grid, unchanged)), subject.config)),
    )


def _columns(
    body: SweepRequest, row: OutputsRequest, subject: Subject
) -> Generator[Compute, Computed, tuple[int, ...]]:
    """The ids whose logits are compared: the token, and the subtracted one if there is any."""
    token, minus = body.compared(subject.tokenizer)
    if token is None:
        token = int(largest(_row((yield Compute([row]))), 1)[0])
    check_token_ids("token_id", [token], subject.config.vocab_size)
    if minus is None:
        return (token,)
    check_token_ids("minus_id", [minus], subject.config.vocab_size)
    if minus == token:
        raise InvalidRequest(f"token and minus are both {token}: their difference is 0", "minus")
    return token, minus


def _jobs(grid: Grid, unchanged: OutputsRequest) -> Iterator[OutputsRequest]:
    for _, changes in grid.cells():
        yield replace(
            unchanged,
            request_id=new_id("cell"),
            interventions=(*unchanged.interventions, *changes),
        )


def _row(computed: Computed) -> Any:
    """The logits of the only request."""
    ((row,),) = computed.rows.values()
    return row


def _cell_json(cell: Cell, logits: Any) -> dict[str, Any]:
    """The SweepCell for a row of one or two logits."""
    logit, minus = float(logits[0]), float(logits[1]) if len(logits) > 1 else None
    return {
        **asdict(cell),
        "logit": logit,
        "minus_logit": minus,
        "value": logit if minus is None else logit - minus,
    }


def _nested(cells: list[dict[str, Any]], grid: Grid) -> list[Any]:
    shape = [len(places) for places in grid.axes.values()]
    values = np.array([cell["value"] for cell in cells], dtype=np.float64)
    nested: list[Any] = values.reshape(shape).tolist()
    return nested


SWEEP = Operation(
    name="sweep",
    body=SweepRequest,
    reply=SweepReply,
    plan=plan,
    form="series",
    summary="An intervention at each layer, head or position in turn",
    description="""\
Carry out an intervention in one layer, head or position after another, and return the logit of a
token each time, or the difference of two logits: for example, ablate each head in turn, or patch
each layer at each position. With `stream`, the first event has the members that are known before
the cells; then follow `{"cell": ...}` for each cell as soon as it is computed, and `[DONE]`.""",
)
