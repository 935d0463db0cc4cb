"""Outputs: engine requests for what the model computes at positions of prompts."""

from collections.abc import Generator, Sequence
from typing import Protocol

from logitd.model.inference.engine.requests import Output, OutputsRequest
from logitd.model.operations.body import PositionChoice
from logitd.model.operations.computed import Computed
from logitd.model.operations.interventions import Intervention, resolve_interventions
from logitd.model.operations.operation import Compute, Subject, new_id
from logitd.model.operations.prompts import encode_all, resolve_positions


class PositionsBody(Protocol):
    """A body that chooses positions of its prompts."""

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]: ...
    @property
    def positions(self) -> PositionChoice: ...
    @property
    def interventions(self) -> Sequence[Intervention]: ...


def outputs_requests(
    body: PositionsBody, output: Output, subject: Subject
) -> Generator[Compute, Computed, Sequence[OutputsRequest]]:
    """One engine request per prompt."""
    prompts = encode_all(body.prompts, "prompt", subject)
    changes = yield from resolve_interventions(body.interventions, prompts, subject)
    return [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=prompt,
            positions=resolve_positions(body.positions, len(prompt)),
            output=output,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]
