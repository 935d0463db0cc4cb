"""Circuit: the tokens, heads and neurons that account for the difference between two logits, as a
graph."""

from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from logitd.model.inference.circuit.task import (
    DEFAULT_EDGES,
    DEFAULT_PARTS,
    DEFAULT_SHARE,
    Circuit,
    CircuitTask,
)
from logitd.model.inference.engine.requests import AttributionRequest
from logitd.model.inference.selection import gpt_only
from logitd.model.operations.attributions import TargetToken
from logitd.model.operations.body import Examples, Place, PromptBody, PromptReply, Reply, ReplyBody
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Operation, Planning, Subject, new_id
from logitd.model.operations.prompts import encode_all, prompts_record, resolve_position
from logitd.model.operations.tokens import ComparedTokens, token_json
from logitd.model.text.tokenizer import Tokenizer


class CircuitRequest(ComparedTokens, PromptBody):
    """The tokens, heads and neurons that account for the difference between two logits; the edges
    that connect these parts; and the difference that remains without them or with only them. By
    default, the two likeliest next tokens are compared. Computed in float32 from the served
    weights."""

    examples: ClassVar[Examples] = {
        "Why the likeliest next token rather than the second": {"prompt": "for i in range(10"},
        "The strongest parts of a chosen difference": {
            "prompt": "for i in range(10",
            "token": ")",
            "minus": ",",
            "share": 0.8,
            "max_parts": 100,
            "max_edges": 50,
        },
    }

    position: Place = Field(
        -1,
        description="Position of the prompt whose logits are explained; negative numbers count "
        "from the end.",
    )
    share: float = Field(
        DEFAULT_SHARE,
        gt=0,
        le=1,
        description="Share of the difference that the circuit explains. The circuit has the "
        "strongest parts that suffice, up to a factor of the square root of 2 in strength.",
    )
    max_parts: int = Field(
        DEFAULT_PARTS,
        ge=1,
        le=10_000,
        description="Maximum number of tokens, heads and neurons. If they do not suffice, the "
        "circuit has the parts that explain most among those that the search tried.",
    )
    max_edges: int = Field(
        DEFAULT_EDGES,
        ge=1,
        le=10_000,
        description="Maximum number of edges in the reply, the strongest first.",
    )


class CircuitNeuron(ReplyBody):
    index: int
    values: float
    attention: float


class CircuitNode(ReplyBody):
    """A token's vector (`stage` is embedding), a head (blocks.N.attention.heads, with `head`) or
    neurons (blocks.N.mlp.hidden, with `neurons`) at one position."""

    stage: str
    head: int | None
    position: int
    values: float = Field(
        description="Amount of the difference that the node carries, relative to its mean over "
        "the positions, with all attention weights frozen."
    )
    attention: float = Field(
        description="Amount that the node carries through the attention weights that depend on it."
    )
    neurons: list[CircuitNeuron] = Field(
        description="Neurons of an MLP, the strongest first; otherwise empty."
    )


class CircuitEdge(ReplyBody):
    """An edge from a node to another node or to the logits. The weights of all edges that leave a
    node add up to the sum of the node's `values` and `attention`."""

    source: int = Field(description="Index of a node.")
    target: int | None = Field(description="Index of a node; null for the logits.")
    reads: Literal["value", "query", "key", "mlp", "logits"] = Field(
        description="The input through which the target reads the source. Queries and keys decide "
        "where a head attends."
    )
    weight: float = Field(
        description="Amount of the difference that the source carries through this edge."
    )


class LeftOut(ReplyBody):
    """The contribution of the parts outside the circuit: the sum of their `values`, and the sum of
    their `attention`."""

    values: float
    attention: float


class Verification(ReplyBody):
    """The difference between the two logits when parts are set to their means over the positions,
    and everything else is computed again, including attention weights and norms. A share of 0 means
    that this difference is the same as with all parts set to their means, and a share of 1 that it
    is the original difference. A share is null if there is nothing to explain."""

    circuit_alone: float = Field(
        description="All parts outside the circuit are set to their means."
    )
    circuit_alone_share: float | None = Field(
        description="The ratio (circuit_alone - without_all) / (difference - without_all)."
    )
    without_circuit: float = Field(description="The circuit is set to its means.")
    without_circuit_share: float | None = Field(
        description="The ratio (without_circuit - without_all) / (difference - without_all)."
    )
    without_all: float = Field(description="All parts are set to their means.")


class PromptCircuit(PromptReply):
    position: int
    token: TargetToken
    minus: TargetToken
    difference: float = Field(
        description="The logit of `token` minus the logit of `minus`, before logit_softcap."
    )
    baseline: float = Field(
        description="The difference if all parts were set to their means, with everything frozen."
    )
    left_out: LeftOut
    share: float | None = Field(
        description="The explained share of difference - baseline: 1 minus left_out.values, or "
        "minus the sum of left_out if that is larger; it may be negative. null if there is nothing "
        "to explain."
    )
    verification: Verification
    nodes: list[CircuitNode] = Field(description="In the order of the forward pass.")
    edges: list[CircuitEdge]
    edge_count: int = Field(description="Number of edges, of which `edges` are the strongest.")


class CircuitReply(Reply):
    prompts: list[PromptCircuit]


def plan(body: CircuitRequest, subject: Subject) -> Planning:
    yield from ()
    config = gpt_only(subject.config, "circuits")
    prompts = encode_all(body.prompts, "prompt", subject)
    token, minus = body.compared(subject.tokenizer)
    requests = [
        AttributionRequest(
            request_id=new_id("circuit"),
            token_ids=prompt,
            task=CircuitTask(
                position=resolve_position(body.position, len(prompt)),
                token_id=token,
                minus_id=minus,
                share=body.share,
                parts=body.max_parts,
                edges=body.max_edges,
            ),
        )
        for prompt in prompts
    ]
    parts_at_a_position = 1 + config.n_layer * (config.n_head + config.d_ff)
    listed = sum(
        min(body.max_parts, len(prompt) * parts_at_a_position) + body.max_edges
        for prompt in prompts
    )
    subject.check_listed(listed, "parts and edges", "max_parts")
    return prompts_record(requests, partial(_circuit_json, tokenizer=subject.tokenizer))


def _circuit_json(
    request: AttributionRequest, computed: Computed, *, tokenizer: Tokenizer
) -> dict[str, Any]:
    circuit: Circuit = computed.attributions[request.request_id]
    alone, without = circuit.circuit_alone, circuit.without_circuit
    return {
        "position": request.task.position,
        "token": {**token_json(tokenizer, circuit.token_id), "logit": circuit.logit},
        "minus": {**token_json(tokenizer, circuit.minus_id), "logit": circuit.minus_logit},
        "difference": circuit.difference,
        "baseline": circuit.baseline,
        "left_out": {"values": circuit.left_out, "attention": circuit.left_out_attention},
        "share": circuit.share,
        "verification": {
            "circuit_alone": alone,
            "circuit_alone_share": circuit.surviving(alone),
            "without_circuit": without,
            "without_circuit_share": circuit.surviving(without),
            "without_all": circuit.without_all,
        },
        "nodes": [asdict(node) for node in circuit.nodes],
        "edges": [asdict(edge) for edge in circuit.edges],
        "edge_count": circuit.edge_count,
    }


CIRCUIT = Operation(
    name="circuit",
    body=CircuitRequest,
    reply=CircuitReply,
    plan=plan,
    form="record",
    summary="Tokens, heads and neurons that carry a difference of logits, with edges",
    description="""\
The strongest tokens, heads and neurons that explain a share of the difference between two logits.
With attention weights, norm scales and gates frozen, the model is linear, so an edge is a product
of weights, and the contributions of the parts add up. The circuit is then verified without freezing
anything: `verification` has the difference with only the circuit, and with everything except the
circuit. The engine computes a circuit in small pieces, with steps of other requests in between.""",
)
