"""POST /attention: how much each position looks at each before it, by layer and head."""

from collections.abc import Sequence

from logitd.model.inference.engine.requests import AttentionWeights, OutputsRequest
from logitd.service.api.requests.resolve import resolve_attention
from logitd.service.api.responses.tensors.arrays import ArrayOutput, NamedArray
from logitd.service.api.routes.arrays import array_route
from logitd.service.core.models import Served
from logitd.service.schemas.tensors import AttentionReply, AttentionRequest


def _output(requests: Sequence[OutputsRequest], served: Served) -> ArrayOutput:
    """(layers, heads, positions, tokens) of each prompt."""
    weights = requests[0].output
    assert isinstance(weights, AttentionWeights)
    layers, heads = weights.layers, weights.heads
    shapes = [(len(layers), len(heads), len(r.positions), len(r.token_ids)) for r in requests]
    facts = {"layers": list(layers), "heads": list(heads)}
    return ArrayOutput("attention", [NamedArray("attention", shapes, 2)], facts=facts)


router = array_route(
    "/attention",
    AttentionRequest,
    AttentionReply,
    summary="Attention weights",
    description="Causal attention weights (layers, heads, positions, tokens); each row sums to 1, "
    "and what a position does not see is 0.\n\n"
    "`Accept: application/x-npy` gives one prompt's array, `application/vnd.safetensors` those of "
    "all prompts; otherwise JSON.",
    resolve=resolve_attention,
    output=_output,
)
