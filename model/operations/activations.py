"""Activations: the values of any stage of the forward pass, chosen by name."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from logitd.model.inference.engine.cost import activation_shapes
from logitd.model.inference.engine.requests import Activations
from logitd.model.inference.selection import resolve_heads, resolve_stages
from logitd.model.operations.body import Examples, HalfOrFull, Places, PromptReply, Reply
from logitd.model.operations.interventions import StageName
from logitd.model.operations.operation import NamedArray, Operation, Outputs, Planning, Subject
from logitd.model.operations.outputs import ArraysBody, outputs_requests

MAX_PATTERNS = 1024


class ActivationsRequest(ArraysBody):
    """Values of named stages at chosen positions."""

    examples: ClassVar[Examples] = {
        "The queries of every layer at the last position": {
            "prompt": "def main():",
            "stages": ["blocks.*.attention.q"],
        },
        "One head's attention weights, with the stream before and after its block": {
            "prompt": "for i in range(10): print(",
            "stages": ["embedding", "blocks.0.attention.probs", "blocks.0.output"],
            "heads": [0],
            "positions": "all",
        },
        "The logits without the first block's MLP": {
            "prompt": "def main():",
            "stages": ["logits"],
            "interventions": [{"stage": "blocks.0.mlp.out", "operation": "zero"}],
        },
    }

    stages: Annotated[list[StageName], Field(min_length=1, max_length=MAX_PATTERNS)] = Field(
        description="Names from GET /stages; * means every layer: blocks.*.attention.q."
    )
    heads: Places | None = Field(
        None, description="Heads of the stages that have any, from 0. Absent: all."
    )


class PromptActivations(PromptReply):
    positions: list[int]
    stages: dict[str, list[Any]] = Field(
        description="Nested lists by stage; the first axis is the positions. null: a value that is "
        "not finite, such as the score of a key that a position does not see."
    )


class ActivationsReply(Reply):
    dtype: HalfOrFull
    prompts: list[PromptActivations]


def plan(body: ActivationsRequest, subject: Subject) -> Planning:
    config = subject.config
    stages = resolve_stages(body.stages, config)
    heads = None if body.heads is None else resolve_heads(body.heads, stages, config)
    output = Activations(stages=tuple(stage.name for stage in stages), heads=heads)
    requests = yield from outputs_requests(body, output, subject)
    shapes = [
        [
            (len(request.positions), *shape)
            for shape in activation_shapes(output, config, len(request.token_ids))
        ]
        for request in requests
    ]
    arrays = [
        NamedArray(name, [of_prompt[index] for of_prompt in shapes])
        for index, name in enumerate(output.stages)
    ]
    not_npy = None
    if len(arrays) > 1:
        not_npy = (
            f"npy holds one array, but stages names {len(arrays)} of them. Accept "
            "application/vnd.safetensors or JSON",
            "stages",
        )
    return Outputs(requests, arrays, body.dtype, wrapped_in="stages", not_npy=not_npy)


ACTIVATIONS = Operation(
    name="activations",
    body=ActivationsRequest,
    reply=ActivationsReply,
    plan=plan,
    form="outputs",
    summary="Values of any stage of the forward pass, by name",
    description="The values of stages, which GET /stages lists. Each is an array whose first "
    "axis is the positions: queries (positions, n_head, head_dim), attention "
    "weights (positions, n_head, tokens), units of the MLP (positions, d_ff), "
    "streams (positions, d_model).\n\n`Accept: application/vnd.safetensors` "
    "returns the arrays of all prompts, `application/x-npy` the array of one stage "
    "of one prompt; otherwise JSON.",
)
