"""Outputs: requests for values that the model computes at positions of prompts."""

from collections.abc import Generator, Sequence
from typing import Annotated

from pydantic import Field

from logitd.model.inference.engine.requests import Output, OutputsRequest
from logitd.model.inference.selection import resolve_indices
from logitd.model.operations.body import DType, Places, PositionChoice, PromptBody
from logitd.model.operations.computed import Computed
from logitd.model.operations.interventions import Interventions, resolve_interventions
from logitd.model.operations.operation import Compute, Subject, new_id
from logitd.model.operations.prompts import encode_all, resolve_positions

HiddenLayers = Annotated[
    Places | None,
    Field(
        description="Layers: 0 is the stream after the embeddings, i the stream after block i, "
        "both before the final norm; negative numbers count from the end. Absent: all."
    ),
]


class OutputsBody(PromptBody):
    """A request for values at chosen positions."""

    positions: PositionChoice = "last"
    interventions: Interventions = Field(default_factory=list)


class ArraysBody(OutputsBody):
    dtype: DType = "float32"


def outputs_requests(
    body: OutputsBody, output: Output, subject: Subject
) -> Generator[Compute, Computed, Sequence[OutputsRequest]]:
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


def resolve_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Indices of the chosen layers among `count` layers, where layer 0 is the embeddings; all
    indices if `layers` is None."""
    return resolve_indices("layers", layers, count, f"there are {count} hidden states")
