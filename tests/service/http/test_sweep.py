"""POST /sweep: each cell equals its intervention sent alone, whole or streamed."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd.model.operations.sweep import SweepReply
from tests.service.serving import Serving, serving

PROMPT, OTHER = "the first prompt", "another of these"
ABLATE: dict[str, Any] = {"stage": "blocks.*.attention.heads", "operation": "zero"}
PATCH: dict[str, Any] = {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": OTHER}}


def sweep(server: Serving, prompt: str = PROMPT, **fields: Any) -> SweepReply:
    return SweepReply.model_validate(server.json("/sweep", {"prompt": prompt, **fields}))


def logits(server: Serving, columns: list[int], *interventions: Any) -> list[float]:
    body = {"prompt": PROMPT, "token_ids": columns, "interventions": interventions}
    row = server.json("/logits", body)["prompts"][0]["logits"][0]
    return [float(np.float32(logit)) for logit in row]  # JSON has the fewest digits of a float32


def test_each_head_in_turn_is_that_head_by_hand(server: Serving) -> None:
    reply = sweep(server, vary=ABLATE, over=["layers", "heads"], token="a", minus_id=98)
    assert [(axis.name, axis.values) for axis in reply.axes] == [
        ("layers", [0, 1, 2]),
        ("heads", [0, 1, 2, 3]),
    ]
    assert [(cell.layer, cell.head, cell.position) for cell in reply.cells] == [
        (layer, head, None) for layer, head in itertools.product(range(3), range(4))
    ]
    for cell in reply.cells:
        change = {"stage": f"blocks.{cell.layer}.attention.heads", "heads": [cell.head]}
        expected = logits(server, [97, 98], {**change, "operation": "zero"})
        assert [cell.logit, cell.minus_logit] == expected, "to the bit"
        assert cell.value == cell.logit - expected[1]
    unchanged = logits(server, [97, 98])
    assert [reply.unchanged.logit, reply.unchanged.minus_logit] == unchanged
    assert np.array(reply.grid).shape == (3, 4)
    assert np.array(reply.grid).ravel().tolist() == [cell.value for cell in reply.cells]


def test_each_layer_and_position_in_turn_is_that_patch_by_hand(server: Serving) -> None:
    vary = {**PATCH, "positions": [2, -1]}
    reply = sweep(server, vary=vary, over=["positions", "layers"], token_id=97)
    assert np.array(reply.grid).shape == (2, 3)
    assert reply.minus is None
    for cell in reply.cells:
        source = {"prompt": OTHER, "positions": [cell.position]}
        change = {**PATCH, "stage": f"blocks.{cell.layer}.output", "positions": [cell.position]}
        assert logits(server, [97], {**change, "from": source}) == [cell.logit]
    assert len({cell.logit for cell in reply.cells}) == 6


def test_heads_of_a_patch_have_their_own_values(server: Serving) -> None:
    stage = {"stage": "blocks.1.attention.heads", "operation": "set", "heads": [1, 3]}
    vary = {**stage, "from": {"prompt": OTHER}}
    reply = sweep(server, vary=vary, over=["heads"], token_id=97)
    assert [cell.head for cell in reply.cells] == [1, 3]
    for cell in reply.cells:
        assert logits(server, [97], {**vary, "heads": [cell.head]}) == [cell.logit]


def test_axis_that_is_not_swept_is_changed_in_every_cell(server: Serving) -> None:
    """All layers at once, position by position, after another change in every cell."""
    standing = {"stage": "embedding", "operation": "scale", "factor": 2.0}
    vary = {"stage": "blocks.*.mlp.out", "operation": "zero"}
    reply = sweep(server, vary=vary, over=["positions"], token_id=97, interventions=[standing])
    assert reply.unchanged.logit == logits(server, [97], standing)[0]
    for cell in reply.cells[-2:]:
        change = {**vary, "positions": [cell.position]}
        assert logits(server, [97], standing, change) == [cell.logit]


def test_default_token_is_the_likeliest(server: Serving) -> None:
    (likeliest,) = server.json("/probs", {"prompt": PROMPT, "top_k": 1})["prompts"][0]["tokens"]
    reply = sweep(server, vary=ABLATE, over=["layers"])
    assert reply.token.id == likeliest["id"]


def test_stream_gives_the_same_cells_one_by_one(server: Serving) -> None:
    body = {"prompt": PROMPT, "vary": ABLATE, "over": ["layers", "heads"], "token_id": 97}
    whole = server.json("/sweep", body)
    with server.client.stream("POST", "/sweep", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    head, *cells = (json.loads(event) for event in events[:-1])
    assert [cell["cell"] for cell in cells] == whole["cells"]
    assert head["unchanged"] == whole["unchanged"]
    assert head["axes"] == whole["axes"]


def test_disconnected_reader_ends_its_sweep(server: Serving) -> None:
    body = {"prompt": "x" * 60, "vary": PATCH | {"from": {"prompt": "y" * 60}}, "stream": True}
    body |= {"over": ["layers", "positions"]}
    with server.client.stream("POST", "/sweep", json=body) as response:
        next(response.iter_lines())
    server.wait_idle()


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
def test_sweep_refuses_too_expensive_cells(checkpoint_path: Path, stream: dict[str, bool]) -> None:
    """1,200 cells (3 layers x 4 heads x 100 positions) of 100 tokens each, at half the speed of
    plain ones."""
    prompt = list(range(100))
    axes = {"vary": {**ABLATE, "positions": "all"}, "over": ["layers", "heads", "positions"]}
    with serving(checkpoint_path, max_request_tokens=200_000) as small:
        response = small.post("/sweep", {"prompt": prompt, **axes, **stream})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert re.search(r"(2[4-9]\d{4}|3\d{5}) tokens.*200000.*--max-request-tokens", message)
