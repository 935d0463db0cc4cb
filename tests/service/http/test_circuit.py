"""POST /circuit: the model's values, and ablations that /logits confirms."""

from typing import Any

import pytest

from logitd.model.inference.circuit.find import finding
from logitd.model.inference.circuit.task import CircuitTask
from logitd.model.operations.circuit import CircuitReply, PromptCircuit
from logitd.model.transformer.gpt import GPT
from tests.service.http.asking import PROMPT, tensors
from tests.service.serving import Serving

STAGES = ("embedding", "blocks.*.attention.heads", "blocks.*.mlp.hidden")
"""Patterns of the stages that have parts."""


def circuit(server: Serving, **fields: Any) -> PromptCircuit:
    (prompt,) = CircuitReply.model_validate(
        server.json("/circuit", {"prompt": PROMPT, **fields})
    ).prompts
    return prompt


def test_circuit_is_that_of_the_model(server: Serving, gpt: GPT) -> None:
    found = circuit(server, token="a", minus_id=98, position=-3, share=0.7, max_edges=40)
    ids = list(PROMPT.encode())
    task = CircuitTask(position=len(ids) - 3, token_id=97, minus_id=98, share=0.7, edges=40)
    expected = finding(gpt, ids, task).result()
    assert (found.token_ids, found.position) == (ids, len(ids) - 3)
    assert (found.token.id, found.minus.id) == (97, 98)
    assert found.difference == pytest.approx(expected.difference, abs=1e-4)
    assert found.difference == found.token.logit - found.minus.logit
    assert found.share == pytest.approx(expected.share, abs=1e-4)
    assert [(node.stage, node.head, node.position) for node in found.nodes] == [
        (node.stage, node.head, node.position) for node in expected.nodes
    ]
    for ours, theirs in zip(found.nodes, expected.nodes, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-3, abs=1e-4)
        assert [neuron.index for neuron in ours.neurons] == [n.index for n in theirs.neurons]
    assert len(found.edges) == 40 < found.edge_count == expected.edge_count


def test_likeliest_tokens_are_compared(server: Serving) -> None:
    likeliest = server.json("/probs", {"prompt": PROMPT, "top_k": 3})["prompts"][0]["tokens"]
    first, second, third = (token["id"] for token in likeliest)
    for given, compared in (
        ({}, [first, second]), ({"minus_id": first}, [second, first]),
        ({"token_id": third}, [third, first]),
    ):  # fmt: skip
        found = circuit(server, max_parts=5, **given)
        assert [found.token.id, found.minus.id] == compared


def test_most_parts_limit_a_circuit(server: Serving) -> None:
    found = circuit(server, share=0.999, max_parts=20)
    parts = sum(len(node.neurons) or 1 for node in found.nodes)
    assert 0 < parts <= 20
    assert found.share is not None
    assert found.share < 0.999


def test_verification_is_that_of_logits_with_interventions(server: Serving) -> None:
    """The test compares the ablation of all parts, which sets every stage to its mean over
    positions. `test_find.py` tests the other ablations."""
    found = circuit(server, share=0.5)
    stages = tensors(server, "/activations", positions="all", stages=list(STAGES))
    means = [
        {"stage": stage, "operation": "set", "values": rows.mean(0).tolist()}
        for stage, rows in stages.items()
        if rows.is_floating_point()
    ]
    compared = {"prompt": PROMPT, "token_ids": [found.token.id, found.minus.id]}
    (reply,) = server.json("/logits", {**compared, "interventions": means})["prompts"]
    token, minus = reply["logits"][0]
    assert token - minus == pytest.approx(found.verification.without_all, abs=1e-3)


def test_single_token_has_nothing_to_explain(server: Serving) -> None:
    """With a single position, all parts equal their means."""
    found = circuit(server, prompt="x")
    assert (found.share, found.nodes, found.edges) == (None, [], [])
    assert found.verification.without_all == pytest.approx(found.difference, abs=1e-4)
    assert found.verification.circuit_alone_share is None
