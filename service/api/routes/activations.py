"""POST /activations: the values of any stage of the forward, by its name."""

from collections.abc import Sequence

from logitd.model.inference.engine.cost import activation_shapes
from logitd.model.inference.engine.requests import Activations, OutputsRequest
from logitd.service.api.requests.resolve import resolve_activations
from logitd.service.api.responses.tensors.arrays import ArrayOutput, NamedArray
from logitd.service.api.routes.arrays import array_route
from logitd.service.core.models import Served
from logitd.service.schemas.activations import ActivationsReply, ActivationsRequest


def _output(requests: Sequence[OutputsRequest], served: Served) -> ArrayOutput:
    """(positions, ...) of each stage and prompt."""
    asked = requests[0].output
    assert isinstance(asked, Activations)
    config = served.checkpoint.config
    shapes = [
        [
            (len(request.positions), *shape)
            for shape in activation_shapes(asked, config, len(request.token_ids))
        ]
        for request in requests
    ]
    arrays = [
        NamedArray(name, [of_prompt[index] for of_prompt in shapes])
        for index, name in enumerate(asked.stages)
    ]
    return ArrayOutput("activations", arrays, member="stages")


router = array_route(
    "/activations",
    ActivationsRequest,
    ActivationsReply,
    summary="Values of any stage of the forward",
    description="The stages of GET /stages, each an array whose first axis is the positions: "
    "queries (positions, n_head, head_dim), attention weights (positions, n_head, tokens), units "
    "of the MLP (positions, d_ff), streams (positions, d_model).\n\n"
    "`Accept: application/vnd.safetensors` gives the arrays of all prompts, "
    "`application/x-npy` that of one stage of one prompt; otherwise JSON.",
    resolve=resolve_activations,
    output=_output,
)
