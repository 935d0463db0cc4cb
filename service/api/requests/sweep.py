"""Sweep: from a body to the cells of its grid, an engine request each.

What `from` reads is computed once, for all layers and positions; each cell has its part of it. Not
here: in which order cells are computed, and how many at once (`service/api/responses/sweep.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastapi import Request

from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.engine.validation import check_token_ids
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.distribution import largest
from logitd.model.inference.sweep import Cell, Grid, make_grid
from logitd.service.api.requests.body import unless_gone
from logitd.service.api.requests.encode import encode_all
from logitd.service.api.requests.interventions import resolve_interventions, resolve_varied
from logitd.service.api.requests.positions import resolve_positions
from logitd.service.api.requests.resolve import deadline_of, single_token
from logitd.service.core.gather import gather
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.schemas.sweep import SweepRequest


@dataclass(frozen=True, slots=True)
class ResolvedSweep:
    """What /sweep asks the engine for.

    columns        the ids whose logits are looked at: the token, and what is subtracted
    grid           the cells, and what each changes
    unchanged      the request without what varies; of one row, with the logits of `columns`
    held_elements  of the values that the cells have parts of
    """

    columns: tuple[int, ...]
    grid: Grid
    unchanged: OutputsRequest
    held_elements: int

    def requests(self) -> Iterator[tuple[Cell, OutputsRequest]]:
        """Of each cell, made when it is asked for."""
        for cell, changes in self.grid.cells():
            interventions = (*self.unchanged.interventions, *changes)
            yield (
                cell,
                replace(self.unchanged, request_id=new_id("cell"), interventions=interventions),
            )


async def resolve_sweep(body: SweepRequest, served: Served, request: Request) -> ResolvedSweep:
    """The grid of a body. Raises InvalidRequest or ApiError for what cannot be computed."""
    config, deadline = served.checkpoint.config, deadline_of(body.timeout, served)
    with served.admission.hold(1, "prompt", served.caller):
        (prompt,) = await encode_all([body.prompt], "prompt", served)
    (constant,) = await resolve_interventions(
        body.interventions, [prompt], served, request, deadline=deadline
    )
    varied = await resolve_varied(body.vary, prompt, served, request, deadline=deadline)
    row = OutputsRequest(
        request_id=new_id("outputs"),
        token_ids=prompt,
        positions=resolve_positions([body.position], len(prompt)),
        output=Logits(),
        caller=served.caller,
        deadline=deadline,
        interventions=constant,
    )
    grid = make_grid(varied, body.over, len(prompt), config)
    columns = await _columns(body, row, served, request)
    unchanged = replace(row, output=Logits(columns=columns))
    held = sum(change.values.size for change in varied if change.values is not None)
    return ResolvedSweep(columns, grid, unchanged, held)


async def _columns(
    body: SweepRequest, row: OutputsRequest, served: Served, request: Request
) -> tuple[int, ...]:
    """The ids of the token and of what is subtracted."""
    tokenizer = served.checkpoint.tokenizer
    token = body.token_id
    if body.token is not None:
        token = single_token(body.token, tokenizer, "token")
    minus = body.minus_id
    if body.minus is not None:
        minus = single_token(body.minus, tokenizer, "minus")
    if token is None:
        computed = await unless_gone(request, gather(served.session.submit([row], more=True)))
        token = int(largest(computed.rows[row.request_id][0], 1)[0])
    check_token_ids("token_id", [token], served.checkpoint.config.vocab_size)
    if minus is None:
        return (token,)
    check_token_ids("minus_id", [minus], served.checkpoint.config.vocab_size)
    if minus == token:
        raise InvalidRequest(f"token and minus are both {token}: their difference is 0", "minus")
    return token, minus
