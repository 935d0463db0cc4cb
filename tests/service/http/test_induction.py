"""POST /induction: the scores agree with scores computed from the attention weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from logitd.model.operations.induction import induction_scores
from logitd.model.transformer.gpt import GPT
from tests.service.http.asking import npy
from tests.service.serving import Serving, eventually, serving

IDS = [17, 203, 94, 41, 160, 8, 77, 129]


def test_scores_are_the_mean_weights_on_the_token_after_the_first_occurrence(
    server: Serving,
) -> None:
    (prompt,) = server.json("/induction", {"prompt": IDS})["prompts"]
    weights = npy(server, "/attention", prompt=IDS * 2, positions="all")
    n = len(IDS)
    expected = [
        [sum(head[n + j][j + 1] for j in range(n)) / n for head in layer] for layer in weights
    ]
    assert prompt["token_ids"] == IDS
    assert np.array(prompt["scores"]) == pytest.approx(np.array(expected), rel=1e-5)


def test_scores_of_a_perfect_and_a_uniform_head() -> None:
    n = 8
    perfect, uniform = np.zeros((n, 2 * n)), np.zeros((n, 2 * n))
    for j in range(n):
        perfect[j, j + 1] = 1
        uniform[j, : n + j + 1] = 1 / (n + j + 1)
    scores = induction_scores(np.stack([perfect, uniform], 1)[:, None])  # (T, layers, heads, 2T)
    assert scores.shape == (1, 2)
    assert scores[0] == pytest.approx([1, sum(1 / (n + j + 1) for j in range(n)) / n])


def test_head_that_is_indifferent_scores_as_uniform(server: Serving, gpt: GPT) -> None:
    """Queries of zero give the same weight to all tokens."""
    config = gpt.config
    zero = {"stage": "blocks.*.attention.q", "operation": "zero"}
    (prompt,) = server.json("/induction", {"prompt": IDS, "interventions": [zero]})["prompts"]
    n = len(IDS)
    uniform = sum(1 / (n + j + 1) for j in range(n)) / n
    expected = torch.full((config.n_layer, config.n_head), uniform)
    assert torch.tensor(prompt["scores"]).numpy() == pytest.approx(expected.numpy(), rel=1e-5)


def test_intervention_that_makes_weights_infinite_is_named(server: Serving) -> None:
    """The reply once had null instead of scores."""
    blown = [
        {"stage": f"blocks.*.attention.{name}", "operation": "scale", "factor": 1e30}
        for name in ("q", "k")
    ]
    error = server.refused("/induction", {"prompt": IDS, "interventions": blown})
    assert (error.param, error.code) == ("interventions", "intervention_failed")
    assert "not finite" in error.message


def test_prompt_has_to_fit_twice(server: Serving) -> None:
    most = server.served.checkpoint.shape.context_length // 2
    assert server.post("/induction", {"prompt": [1] * most}).status_code == 200
    error = server.refused("/induction", {"prompt": [1] * (most + 1)})
    assert error.param == "prompt"
    assert f"has room for {most}" in error.message


def test_weights_in_memory_are_limited(checkpoint_path: Path) -> None:
    with serving(checkpoint_path, max_reply_elements=2**12) as server:
        assert server.post("/induction", {"prompt": IDS}).status_code == 200
        error = server.refused("/induction", {"prompt": IDS * 6})
        assert error.param == "prompt"
        assert "--max-reply-elements" in error.message
        eventually(lambda: server.served.reply_budget.used == 0)
