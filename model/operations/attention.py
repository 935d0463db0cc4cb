"""Attention weights of each position on the positions up to it, by layer and head."""

from typing import ClassVar

from pydantic import Field

from logitd.model.inference.engine.requests import AttentionWeights
from logitd.model.inference.selection import gpt_only, resolve_indices
from logitd.model.operations.body import Examples, HalfOrFull, Places, PromptReply, Reply
from logitd.model.operations.operation import NamedArray, Operation, Outputs, Planning, Subject
from logitd.model.operations.outputs import ArraysBody, outputs_requests
from logitd.model.plural import pluralize


class AttentionRequest(ArraysBody):
    """Attention weights of each position on the positions up to it, by layer and head."""

    examples: ClassVar[Examples] = {
        "All heads of the first block": {
            "prompt": "def main():",
            "layers": [0],
            "positions": "all",
        },
        "The weights of one head at the last token": {
            "prompt": "for i in range(10): print(",
            "layers": [2],
            "heads": [0],
        },
    }

    layers: Places | None = Field(None, description="Blocks, from 0. Absent: all.")
    heads: Places | None = Field(None, description="Heads, from 0. Absent: all.")


class PromptAttention(PromptReply):
    positions: list[int]
    layers: list[int]
    heads: list[int]
    attention: list[list[list[list[float]]]] = Field(
        description="(layers, heads, positions, tokens); each row sums to 1"
    )


class AttentionReply(Reply):
    dtype: HalfOrFull
    prompts: list[PromptAttention]


def plan(body: AttentionRequest, subject: Subject) -> Planning:
    config = gpt_only(subject.config, "attention weights")
    layers = resolve_indices(
        "layers", body.layers, config.n_layer, f"the model has {pluralize(config.n_layer, 'layer')}"
    )
    heads = resolve_indices(
        "heads", body.heads, config.n_head, f"the model has {pluralize(config.n_head, 'head')}"
    )
    weights = AttentionWeights(layers=layers, heads=heads)
    requests = yield from outputs_requests(body, weights, subject)
    shapes = [(len(layers), len(heads), len(r.positions), len(r.token_ids)) for r in requests]
    facts = {"layers": list(layers), "heads": list(heads)}
    return Outputs(requests, [NamedArray("attention", shapes, 2)], body.dtype, facts=facts)


ATTENTION = Operation(
    name="attention",
    body=AttentionRequest,
    reply=AttentionReply,
    plan=plan,
    form="outputs",
    summary="Attention weights of chosen layers and heads",
    description="Causal attention weights (layers, heads, positions, tokens). Each row sums to 1; "
    "tokens after the position have weight 0.\n\n"
    "`Accept: application/x-npy` returns one prompt's array, `application/vnd.safetensors` the "
    "arrays of all prompts; otherwise JSON.",
)
