"""POST /hidden_states: the residual stream, layer by layer."""

from collections.abc import Sequence

from logitd.model.inference.engine.requests import HiddenStates, OutputsRequest
from logitd.service.api.requests.resolve import resolve_hidden_states
from logitd.service.api.responses.tensors.arrays import ArrayOutput, NamedArray
from logitd.service.api.routes.arrays import array_route
from logitd.service.core.models import Served
from logitd.service.schemas.tensors import HiddenStatesReply, HiddenStatesRequest


def _output(requests: Sequence[OutputsRequest], served: Served) -> ArrayOutput:
    """(layers, positions, d_model) of each prompt."""
    states = requests[0].output
    assert isinstance(states, HiddenStates)
    d_model, layers = served.checkpoint.config.d_model, states.layers
    shapes = [(len(layers), len(request.positions), d_model) for request in requests]
    array = NamedArray("hidden_states", shapes, 1)
    return ArrayOutput("hidden_states", [array], facts={"layers": list(layers)})


router = array_route(
    "/hidden_states",
    HiddenStatesRequest,
    HiddenStatesReply,
    summary="Hidden states",
    description="The residual stream (layers, positions, d_model): 0 is after the embeddings, i "
    "after block i, before the final norm.\n\n"
    "`Accept: application/x-npy` gives one prompt's array, `application/vnd.safetensors` those of "
    "all prompts; otherwise JSON.",
    resolve=resolve_hidden_states,
    output=_output,
)
