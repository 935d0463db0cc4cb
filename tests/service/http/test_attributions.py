"""POST /attributions: the values equal the model's, even alongside other requests, and a request
can end at any moment.
"""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.task import (
    METHODS,
    AttributionTask,
    Probe,
)
from logitd.model.operations.attributions import AttributionsReply, PromptAttributions
from logitd.model.transformer.gpt import GPT
from logitd.service.engine.admission import Load
from logitd.service.metrics.model_metrics import StepKind
from tests.service.http.asking import PROMPT
from tests.service.serving import Serving, eventually, request_bytes, serving
from tests.service.spelling import long_prompt

LONG: dict[str, Any] = {
    "prompt": long_prompt(3000),
    "methods": ["integrated_gradients"],
    "steps": 512,
}
"""A request that keeps the spelling model busy for minutes."""


def attributions(server: Serving, **fields: Any) -> list[PromptAttributions]:
    body = {"prompt": PROMPT, **fields}
    return AttributionsReply.model_validate(server.json("/attributions", body)).prompts


def same(ours: float | None, theirs: float) -> None:
    """Compare with a tolerance, because the server may have a different number of threads than the
    test."""
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_values_equal_the_models(server: Serving, gpt: GPT) -> None:
    (prompt,) = attributions(
        server, token="a", minus_id=98, position=-3, methods=METHODS, steps=3, baseline=32
    )
    ids = list(PROMPT.encode())
    task = AttributionTask(
        position=len(ids) - 3, token_id=97, minus_id=98, methods=METHODS, steps=3, baseline=32
    )
    expected = attributing(gpt, ids, task).result()
    path, minus = expected.integrated_gradients, prompt.minus
    assert prompt.token_ids == ids == [token.id for token in prompt.tokens]
    assert [bytes(token.bytes) for token in prompt.tokens] == [bytes([i]) for i in ids]
    assert prompt.position == len(ids) - 3
    assert prompt.token is not None
    assert (prompt.token.id, prompt.token.text) == (97, "a")
    assert minus is not None
    assert minus.id == 98
    same(prompt.token.logit, expected.logit)
    same(prompt.value, expected.target)
    assert prompt.value == prompt.token.logit - minus.logit
    assert expected.gradient_times_input is not None
    assert path is not None
    for token, gradient, along in zip(
        prompt.tokens, expected.gradient_times_input, path.values, strict=True
    ):
        same(token.gradient_times_input, gradient)
        same(token.integrated_gradients, along)
    summary = prompt.integrated_gradients
    assert summary is not None
    assert (summary.steps, summary.baseline) == (3, 32)
    same(summary.baseline_value, path.baseline_target)
    same(summary.gap, path.gap)
    assert summary.gap == pytest.approx(summary.sum - (prompt.value - summary.baseline_value))
    assert prompt.direct is not None
    assert prompt.direct.sum == pytest.approx(prompt.value, rel=1e-4)
    assert [(part.stage, part.head) for part in prompt.direct.parts] == [
        (part.stage, part.head) for part in expected.direct or ()
    ]
    for part, theirs in zip(prompt.direct.parts, expected.direct or (), strict=True):
        same(part.value, theirs.value)


def test_gradients_of_stages_equal_the_models(server: Serving, gpt: GPT) -> None:
    ids, direction = list(PROMPT.encode()), [0.5] * gpt.config.d_model
    names = ("blocks.0.attention.probs", "blocks.1.attention.heads")
    targets: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"token_id": 97, "minus_id": 98}, {"token_id": 97, "minus_id": 98}),
        (
            {"direction": {"stage": "blocks.1.hook_mlp_out", "values": direction}},
            {"probe": Probe("blocks.1.mlp.out", np.array(direction, np.float32))},
        ),
    ]
    for fields, of_task in targets:
        (prompt,) = attributions(
            server, stages=["blocks.0.attn.hook_pattern", names[1]], position=-3, **fields
        )
        task = AttributionTask(position=len(ids) - 3, stages=names, **of_task)
        expected = attributing(gpt, ids, task).result()
        same(prompt.value, expected.target)
        assert (prompt.token is None) == ("direction" in fields)
        assert prompt.gradients is not None
        assert tuple(prompt.gradients) == names
        for name, rows in prompt.gradients.items():
            np.testing.assert_allclose(rows, expected.gradients[name], rtol=1e-3, atol=1e-5)


def test_defaults_are_the_likeliest_token_and_one_method(server: Serving) -> None:
    (prompt,) = attributions(server)
    likeliest = server.json("/probs", {"prompt": PROMPT, "top_k": 1})["prompts"][0]["tokens"][0]
    logits = server.json("/logits", {"prompt": PROMPT})["prompts"][0]["logits"][0]
    assert prompt.token is not None
    assert prompt.token.id == likeliest["id"]
    assert prompt.value == prompt.token.logit == pytest.approx(max(logits), rel=1e-4)
    assert (prompt.minus, prompt.direct, prompt.integrated_gradients) == (None, None, None)
    assert prompt.position == len(PROMPT) - 1
    assert all(token.gradient_times_input is not None for token in prompt.tokens)
    assert all(token.integrated_gradients is None for token in prompt.tokens)
    reply = server.json("/attributions", {"prompt": PROMPT})
    assert "direct" not in reply["prompts"][0]
    assert "integrated_gradients" not in reply["prompts"][0]["tokens"][0]


def test_pieces_and_steps_are_counted(checkpoint_path: Path) -> None:
    with serving(checkpoint_path, slots=1) as server:
        attributions(server, token="a")
        server.wait_idle()
        assert server.sample("logitd_attribution_pieces_total") == 2 * 3 + 1
        steps = sum(server.sample("logitd_step_seconds_count", kind=kind) for kind in StepKind)
        assert steps == 2 * 3 + 1


def test_attributions_refuse_too_many_steps(spelling_path: Path) -> None:
    with serving(spelling_path, slots=1) as server:
        response = server.post("/attributions", LONG)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert re.search(
            rf"{3000 * (2 + 3 * 512)} tokens, but the limit of one request is {2**20}", message
        ), message


def test_attribution_ends_when_its_client_disconnects(spelling_path: Path) -> None:
    with serving(spelling_path, slots=1, max_request_tokens=2**30) as server:
        with closing(server.connect()) as raw:
            raw.sendall(request_bytes("/attributions", LONG))
            eventually(lambda: server.sample("logitd_num_sequences_running") == 1)
        server.wait_idle()
        assert server.finished("abort") == 1


def test_gradients_count_in_the_budget_until_they_are_read(spelling_path: Path) -> None:
    """Seven clients that stopped reading once occupied 200 MB each, which counted toward no
    limit."""
    stages = ["blocks.*.attention.probs", "blocks.*.attention.scores"]
    body = {"prompt": "b" * 100, "stages": stages}
    with serving(spelling_path, slots=1, max_reply_elements=2**24) as server:
        budget = server.state.reply_budget
        assert server.post("/attributions", body).status_code == 200
        eventually(lambda: budget.used == 0)
        refused = server.post("/attributions", {**body, "prompt": ["b" * 500] * 3})
        assert refused.status_code == 400
        assert "max-reply-elements" in refused.json()["error"]["message"]
        with closing(server.connect()) as unread:
            unread.sendall(request_bytes("/attributions", {**body, "prompt": "b" * 500}))
            eventually(lambda: budget.used > 0)
        eventually(lambda: budget.used == 0)


@pytest.mark.parametrize(
    ("values", "said"), [([1e39], "is too large for float32"), ([[1], [2, 3]], "different lengths")]
)
def test_direction_that_is_no_array_is_refused(server: Serving, values: Any, said: str) -> None:
    body = {"prompt": "a", "direction": {"stage": "embedding", "values": values}}
    error = server.refused("/attributions", body)
    assert error.param == "direction"
    assert said in error.message


def test_direction_without_finite_gradients_is_a_400(server: Serving) -> None:
    """Such a direction once ended in a 500, logged as a failure of the engine."""
    stage = "blocks.0.output"
    read = server.json("/activations", {"prompt": "a", "stages": [stage], "positions": "all"})
    width = len(read["prompts"][0]["stages"][stage][0])
    direction = {"stage": stage, "values": [3e38] * width}
    refused = server.post("/attributions", {"prompt": "a", "direction": direction})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "direction"


def test_attribution_counts_in_the_queue_as_its_passes(spelling_path: Path) -> None:
    """The queue counts the prompt of an attribution once for each pass through the model. With two
    steps of integrated gradients, 300 tokens take 8 passes, which exceeds the limit of 2,000
    tokens; with the default methods, they are admitted."""
    with serving(spelling_path, slots=1, max_queue_tokens=2000) as server:
        with closing(server.connect()) as raw:
            raw.sendall(request_bytes("/generate", {"prompt": "a", "ignore_eos": True}))
            eventually(lambda: server.sample("logitd_num_sequences_running") == 1)
            with closing(server.connect()) as another:
                another.sendall(request_bytes("/attributions", {**LONG, "prompt": "b" * 100}))
                eventually(lambda: server.sample("logitd_num_sequences_running") == 2)
                asked = {"prompt": "c" * 300, "methods": ["integrated_gradients"], "steps": 2}
                refused = server.post("/attributions", asked)
                assert refused.status_code == 429, refused.text
                assert "prompt tokens waiting" in refused.json()["error"]["message"]
                assert server.post("/attributions", {"prompt": "c" * 300}).status_code == 200
        server.wait_idle()
        assert server.served.engine.admission._open.total == Load(), (
            "all counted elements are released"
        )
