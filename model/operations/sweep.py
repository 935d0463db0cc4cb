"""Sweep: applies an intervention to each layer, head or position in turn.

These places form a grid of cells, which `model/inference/sweep.py` lists. Each cell is computed for
every prompt, and a metric of the logits is averaged over the prompts. The values of a `from` prompt
are computed only once, for all layers and positions, and each cell uses its own slice of them.
"""

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import fmean, stdev
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from logitd.model.inference.engine.cost import prices
from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.engine.validation import check_token_ids
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention as EngineIntervention
from logitd.model.inference.sampling.distribution import largest, log_softmax
from logitd.model.inference.sweep import TOKENS, Axis, Cell, Grid, Measure, Metric, make_grid
from logitd.model.operations.body import (
    MAX_PROMPTS,
    ChosenIds,
    Examples,
    Place,
    PromptBody,
    PromptReply,
    Reply,
    ReplyBody,
    Text,
    TokenId,
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
from logitd.model.operations.prompts import encode_all, resolve_position, single_token
from logitd.model.operations.tokens import NamedToken, token_json
from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import Tokenizer

AT_ONCE = 8
"""Batch size, in prompts, for computing the logits without the intervention `vary`."""
OneOrManyTexts = Text | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class SweepRequest(PromptBody):
    """A metric of the next token's logits, measured while an intervention is applied to each layer,
    head or position in turn. The results form a grid; for several prompts, each cell is a mean."""

    alternatives = (("token", "token_id"), ("minus", "minus_id"))
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
        "The loss of a token of each prompt without each layer's MLP, averaged": {
            "prompt": ["for i in range(10", "print(names[0"],
            "token": [")", "]"],
            "metric": "loss",
            "vary": {"stage": "blocks.*.mlp.out", "operation": "zero"},
            "over": ["layers"],
        },
    }

    position: Place = Field(-1, description="Position of each prompt whose logits are compared.")
    metric: Metric = Field(
        "logit",
        description="logit, probability: the value of `token`, minus the value of `minus` if "
        "given; loss: minus the logprob of `token`, in nats; kl: Kullback-Leibler divergence of "
        "the distribution p without `vary` from the distribution q with it, in nats: the sum of "
        "p log(p / q).",
    )
    token: OneOrManyTexts | None = Field(
        None, description="Text of the token, or one for each prompt."
    )
    token_id: TokenId | ChosenIds | None = Field(
        None,
        description="Id of the token, or one for each prompt. Without token and token_id: the "
        "likeliest next token of each prompt.",
    )
    minus: OneOrManyTexts | None = Field(
        None, description="Text of the subtracted token, or one for each prompt."
    )
    minus_id: TokenId | ChosenIds | None = Field(
        None, description="Id of the subtracted token, or one for each prompt."
    )
    vary: Intervention = Field(
        description="The intervention applied in each place. Its heads and positions limit the "
        "places."
    )
    over: Annotated[list[Axis], Field(min_length=1, max_length=3)] = Field(
        description="The axes of the grid: layers (of the stage's *), heads, positions."
    )
    interventions: Interventions = Field(
        default_factory=list,
        description="Additional interventions in every cell, applied before `vary`.",
    )
    stream: bool = Field(False, description="Send each cell as it is computed.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.over)) < len(self.over):
            raise ValueError(f"over names an axis twice: {self.over}")
        if self.vary.positions == "generated":
            raise ValueError("vary.positions is 'generated', but a sweep generates no tokens")
        for name in ("token", "minus"):
            given = (getattr(self, name), getattr(self, f"{name}_id")) != (None, None)
            if given and name not in TOKENS[self.metric]:
                raise ValueError(f"metric {self.metric!r} takes no {name}; leave it out")
        return self

    def named(self, name: Literal["token", "minus"], tokenizer: Tokenizer) -> list[int | None]:
        """The id of `token` or of `minus` for each prompt; None if the body does not name it."""
        count, texts, ids = len(self.prompts), getattr(self, name), getattr(self, f"{name}_id")
        field = name if ids is None else f"{name}_id"
        if isinstance(texts, str):
            ids = single_token(texts, tokenizer, name)
        elif texts is not None:
            ids = [single_token(text, tokenizer, name) for text in texts]
        if not isinstance(ids, list):
            return [ids] * count
        if len(ids) != count:
            raise InvalidRequest(
                f"{field} has {pluralize(len(ids), 'value')} for {pluralize(count, 'prompt')}; "
                "give one for each prompt, or a single value (not a list) for all prompts",
                field,
            )
        return [*ids]


class SweptToken(NamedToken):
    """A token whose logit is used by the metric."""


class SweptPrompt(PromptReply):
    token: SweptToken | None = Field(description="null for metric kl.")
    minus: SweptToken | None


class SweepAxis(ReplyBody):
    name: Axis
    values: list[int]


class SweepValue(ReplyBody):
    """The mean of the metric over the prompts, and its value for each prompt."""

    value: float
    spread: float | None = Field(
        description="Standard deviation over the prompts (with n - 1); null for one prompt."
    )
    values: list[float]


class SweepCell(SweepValue):
    layer: int | None = Field(description="null if the sweep has no such axis.")
    head: int | None
    position: int | None


class SweepReply(Reply):
    metric: Metric
    prompts: list[SweptPrompt]
    axes: list[SweepAxis]
    unchanged: SweepValue = Field(
        description="The result without `vary`, computed by the same code as the cells; may differ "
        "from the result of /logits by rounding."
    )
    cells: list[SweepCell] = Field(
        description="In the order of the axes; the last axis changes fastest."
    )
    grid: list[Any] = Field(description="Values of the cells as nested lists, one level per axis.")


class _Parts:
    """Builds the cells of the reply from rows. A cell needs one row for each prompt, in order."""

    def __init__(self, cells: Iterator[Cell], measures: Sequence[Measure]) -> None:
        self._cells = cells
        self._measures = measures
        self._values: list[float] = []

    def add(self, computed: Computed) -> dict[str, Any] | None:
        """Add the row of the next prompt. Returns the SweepCell if this was the last prompt of the
        cell, otherwise None."""
        ((row,),) = computed.rows.values()
        self._values.append(self._measures[len(self._values)].of(row))
        if len(self._values) < len(self._measures):
            return None
        values, self._values = self._values, []
        return {**_value_json(values), **asdict(next(self._cells))}


def plan(body: SweepRequest, subject: Subject) -> Planning:
    """Plan a sweep. Each prompt has its own grid; all grids have the same axes, and a cell of the
    reply summarizes the same cell of every grid. The logits without the intervention `vary` are
    computed before any cell."""
    prompts = encode_all(body.prompts, "prompt", subject)
    constant = yield from resolve_interventions(body.interventions, prompts, subject)
    varied = yield from resolve_interventions([body.vary], prompts, subject, field="vary")
    grids = [
        make_grid(changes, body.over, len(prompt), subject.config)
        for prompt, changes in zip(prompts, varied, strict=True)
    ]
    _check_alike(grids, prompts)
    subject.check_listed(grids[0].count * len(prompts), "cells", "over")
    rows = [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=prompt,
            positions=(resolve_position(body.position, len(prompt)),),
            output=Logits(),
            interventions=changes,
        )
        for prompt, changes in zip(prompts, constant, strict=True)
    ]
    held = sum(change.elements for changes in varied for change in changes)
    if body.metric == "kl":
        held += 2 * len(prompts) * subject.config.vocab_size  # of float64
    subject.check_array(held)
    plain = [_scaled_by_one(row, changes[0]) for row, changes in zip(rows, varied, strict=True)]
    measures, unchanged = yield from _measures(body, plain, subject)
    jobs = [
        replace(row, output=Logits(columns=measure.columns))
        for row, measure in zip(rows, measures, strict=True)
    ]
    first = itertools.islice(_jobs(grids, jobs), len(jobs))
    return Series(
        head={
            "metric": body.metric,
            "prompts": [
                {
                    "index": index,
                    "token_ids": list(prompt),
                    "token": _token_json(measure.token, subject),
                    "minus": _token_json(measure.minus, subject),
                }
                for index, (prompt, measure) in enumerate(zip(prompts, measures, strict=True))
            ],
            "axes": [{"name": name, "values": list(at)} for name, at in grids[0].axes.items()],
            "unchanged": _value_json(unchanged),
        },
        jobs=_jobs(grids, jobs),
        part=_Parts((cell for cell, _ in grids[0].cells()), measures).add,
        event="cell",
        members=lambda parts: {"cells": parts, "grid": _nested(parts, grids[0])},
        held=held,
        tokens=grids[0].count * sum(sum(prices(job, subject.config)) for job in first),
    )


def _check_alike(grids: Sequence[Grid], prompts: Sequence[Sequence[int]]) -> None:
    for index, grid in enumerate(grids):
        if grid.axes != grids[0].axes:
            raise InvalidRequest(
                f"prompts 0 and {index} have {len(prompts[0])} and {len(prompts[index])} tokens, "
                "so their positions do not correspond: give prompts of the same length, or sweep "
                "over layers or heads",
                "over",
            )


def _scaled_by_one(row: OutputsRequest, change: EngineIntervention) -> OutputsRequest:
    """The request without `change`, computed by the same code as a cell: other code may round
    differently, in bfloat16 or int4 by more than a head contributes."""
    same = EngineIntervention(stage=change.stage, operation="scale", positions=change.positions)
    return replace(row, interventions=(*row.interventions, same))


def _measures(
    body: SweepRequest, rows: Sequence[OutputsRequest], subject: Subject
) -> Generator[Compute, Computed, tuple[list[Measure], list[float]]]:
    """The metric of each prompt, and the metric's value without the intervention `vary`."""
    named = [body.named(name, subject.tokenizer) for name in ("token", "minus")]
    for name, ids in zip(("token_id", "minus_id"), named, strict=True):
        check_token_ids(name, [each for each in ids if each is not None], subject.config.vocab_size)
    measures: list[Measure] = []
    values: list[float] = []
    computed = Computed()
    for index, (row, token, minus) in enumerate(zip(rows, *named, strict=True)):
        if index % AT_ONCE == 0:  # a few at a time, because rows of logits are large
            computed = yield Compute(rows[index : index + AT_ONCE])
        (logits,) = computed.rows[row.request_id]
        if token is None and TOKENS[body.metric]:
            token = int(largest(logits, 1)[0])
        if minus is not None and minus == token:
            raise InvalidRequest(
                f"token and minus are both {token}: their difference is 0", "minus"
            )
        unchanged = log_softmax(logits) if body.metric == "kl" else None
        measure = Measure(body.metric, token, minus, unchanged)
        columns = measure.columns
        measures.append(measure)
        values.append(measure.of(logits if columns is None else logits[[*columns]]))
    return measures, values


def _jobs(grids: Sequence[Grid], rows: Sequence[OutputsRequest]) -> Iterator[OutputsRequest]:
    """The requests of each cell, one for each prompt."""
    for cells in zip(*(grid.cells() for grid in grids), strict=True):
        for row, (_, changes) in zip(rows, cells, strict=True):
            interventions = (*row.interventions, *changes)
            yield replace(row, request_id=new_id("cell"), interventions=interventions)


def _token_json(token_id: int | None, subject: Subject) -> dict[str, Any] | None:
    return None if token_id is None else token_json(subject.tokenizer, token_id)


def _value_json(values: Sequence[float]) -> dict[str, Any]:
    """The SweepValue of a list with one value for each prompt."""
    several = len(values) > 1
    return {
        "value": fmean(values) if several else values[0],
        "spread": stdev(values) if several else None,
        "values": list(values),
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
Apply an intervention to one layer, head or position after another, and return a metric for each:
a token's logit, probability or loss, the difference between the logits of two tokens, or the
divergence of the distribution without the intervention from the one with it. For example, ablate
each head in turn, or patch each layer at each position. For several prompts, the reply has the mean
and the spread.

With `stream`, the first event has the members that are known before the cells; then follow
`{"cell": ...}` for each cell as soon as it is computed, and `[DONE]`.""",
)
