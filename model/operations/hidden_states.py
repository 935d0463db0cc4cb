"""Hidden states: the residual stream, layer by layer."""

from typing import ClassVar

from pydantic import Field

from logitd.model.inference.engine.requests import HiddenStates
from logitd.model.inference.selection import gpt_only
from logitd.model.operations.body import Examples, HalfOrFull, PromptReply, Reply
from logitd.model.operations.operation import NamedArray, Operation, Outputs, Planning, Subject
from logitd.model.operations.outputs import (
    ArraysBody,
    HiddenLayers,
    outputs_requests,
    resolve_layers,
)


class HiddenStatesRequest(ArraysBody):
    """The residual stream at chosen layers and positions."""

    examples: ClassVar[Examples] = {
        "The last position after every block": {"prompt": "def main():"},
        "Every position before the final norm": {
            "prompt": "def main():",
            "layers": [-1],
            "positions": "all",
        },
    }

    layers: HiddenLayers = None


class PromptHiddenStates(PromptReply):
    positions: list[int]
    layers: list[int]
    hidden_states: list[list[list[float]]] = Field(description="(layers, positions, d_model)")


class HiddenStatesReply(Reply):
    dtype: HalfOrFull
    prompts: list[PromptHiddenStates]


def plan(body: HiddenStatesRequest, subject: Subject) -> Planning:
    config = gpt_only(subject.config, "hidden states")
    layers, d_model = resolve_layers(body.layers, config.n_layer + 1), config.d_model
    requests = yield from outputs_requests(body, HiddenStates(layers=layers), subject)
    shapes = [(len(layers), len(request.positions), d_model) for request in requests]
    array = NamedArray("hidden_states", shapes, 1)
    return Outputs(requests, [array], body.dtype, facts={"layers": list(layers)})


HIDDEN_STATES = Operation(
    name="hidden_states",
    body=HiddenStatesRequest,
    reply=HiddenStatesReply,
    plan=plan,
    form="outputs",
    summary="The residual stream at chosen layers and positions",
    description="The residual stream (layers, positions, d_model). Layer 0 is the stream after the "
    "embeddings, layer i the stream after block i; the final norm is not applied.\n\n"
    "`Accept: application/x-npy` returns one prompt's array, `application/vnd.safetensors` the "
    "arrays of all prompts; otherwise JSON.",
)
