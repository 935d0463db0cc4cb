"""POST /sweep: each cell of a reply, whole or streamed, equals the result of its intervention sent
alone.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.operations.sweep import SweepReply
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import Serving, serving

PROMPT, OTHER = "the first prompt", "another of these"
ABLATE: dict[str, Any] = {"stage": "blocks.*.attention.heads", "operation": "zero"}
PATCH: dict[str, Any] = {"stage": "blocks.*.output", "operation": "set", "from": {"prompt": OTHER}}


def sweep(server: Serving, prompt: Any = PROMPT, **fields: Any) -> SweepReply:
    return SweepReply.model_validate(server.json("/sweep", {"prompt": prompt, **fields}))


def logits(server: Serving, columns: list[int], *interventions: Any) -> list[float]:
    body = {"prompt": PROMPT, "token_ids": columns, "interventions": interventions}
    row = server.json("/logits", body)["prompts"][0]["logits"][0]
    return [
        float(np.float32(logit)) for logit in row
    ]  # JSON writes a float32 with as few digits as possible


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
        assert cell.value == expected[0] - expected[1], "bit for bit"
        assert (cell.values, cell.spread) == ([cell.value], None)
    unchanged = logits(server, [97, 98])
    assert reply.unchanged.value == unchanged[0] - unchanged[1]
    assert np.array(reply.grid).shape == (3, 4)
    assert np.array(reply.grid).ravel().tolist() == [cell.value for cell in reply.cells]


def test_each_layer_and_position_in_turn_is_that_patch_by_hand(server: Serving) -> None:
    vary = {**PATCH, "positions": [2, -1]}
    reply = sweep(server, vary=vary, over=["positions", "layers"], token_id=97)
    assert np.array(reply.grid).shape == (2, 3)
    assert reply.prompts[0].minus is None
    for cell in reply.cells:
        source = {"prompt": OTHER, "positions": [cell.position]}
        change = {**PATCH, "stage": f"blocks.{cell.layer}.output", "positions": [cell.position]}
        assert logits(server, [97], {**change, "from": source}) == [cell.value]
    assert len({cell.value for cell in reply.cells}) == 6


def test_heads_of_a_patch_have_their_own_values(server: Serving) -> None:
    stage = {"stage": "blocks.1.attention.heads", "operation": "set", "heads": [1, 3]}
    vary = {**stage, "from": {"prompt": OTHER}}
    reply = sweep(server, vary=vary, over=["heads"], token_id=97)
    assert [cell.head for cell in reply.cells] == [1, 3]
    for cell in reply.cells:
        assert logits(server, [97], {**vary, "heads": [cell.head]}) == [cell.value]


def test_heads_of_a_direction_have_their_own_part(server: Serving) -> None:
    direction = {"from": {"prompt": OTHER}, "minus": {"prompt": PROMPT}}
    vary = {"stage": "blocks.1.attention.heads", "operation": "zero", "along": direction}
    reply = sweep(server, vary=vary, over=["heads"], token_id=97)
    for cell in reply.cells:
        assert logits(server, [97], {**vary, "heads": [cell.head]}) == [cell.value]
    assert len({cell.value for cell in reply.cells}) == 4


def test_axis_that_is_not_swept_is_changed_in_every_cell(server: Serving) -> None:
    """The sweep is over positions only. Each cell changes all layers at one position, after another
    change that every cell makes."""
    standing = {"stage": "embedding", "operation": "scale", "factor": 2.0}
    vary = {"stage": "blocks.*.mlp.out", "operation": "zero"}
    reply = sweep(server, vary=vary, over=["positions"], token_id=97, interventions=[standing])
    assert reply.unchanged.value == logits(server, [97], standing)[0]
    for cell in reply.cells[-2:]:
        change = {**vary, "positions": [cell.position]}
        assert logits(server, [97], standing, change) == [cell.value]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_cells_that_change_nothing_have_the_unchanged_value(tmp_path: Path, quantize: str) -> None:
    """The native decoder computes only prompts without interventions, and rounds activations."""
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    save_tiny_checkpoint(tmp_path / "tiny", gpt=tiny_gpt(tiny_config(head_dim=16)))
    vary = {"stage": "blocks.*.mlp.out", "operation": "scale", "factor": 1}
    with serving(tmp_path / "tiny", kernels="auto", quantize=quantize) as server:
        reply = sweep(server, vary=vary, over=["layers"], token="a")
        assert [cell.value for cell in reply.cells] == [reply.unchanged.value] * 3
        divergence = sweep(server, vary=vary, over=["layers"], metric="kl")
        assert [cell.value for cell in divergence.cells] == [0.0] * 3


def test_default_token_is_the_likeliest(server: Serving) -> None:
    (likeliest,) = server.json("/probs", {"prompt": PROMPT, "top_k": 1})["prompts"][0]["tokens"]
    reply = sweep(server, vary=ABLATE, over=["layers"])
    assert reply.prompts[0].token is not None
    assert reply.prompts[0].token.id == likeliest["id"]


PROMPTS = [PROMPT, "is another", [5, 6, 7]]


@pytest.mark.parametrize(
    "fields",
    [
        {"token": "a", "minus_id": [3, 4, 5]},
        {"metric": "probability", "token_id": [97, 99, 100], "minus": "b"},
        {"metric": "loss"},
        {"metric": "kl", "position": 2},
    ],
)
def test_sweep_of_many_prompts_is_the_mean_of_single_sweeps(
    server: Serving, fields: dict[str, Any]
) -> None:
    vary, over = {**PATCH, "positions": [2]}, ["layers"]
    together = sweep(server, PROMPTS, vary=vary, over=over, **fields)
    alone = []
    for index, prompt in enumerate(PROMPTS):
        own = {name: value[index] if isinstance(value, list) else value
               for name, value in fields.items()}  # fmt: skip
        alone.append(sweep(server, prompt, vary=vary, over=over, **own))
    for swept, single in zip(together.prompts, alone, strict=True):
        assert swept.model_dump(exclude={"index"}) == single.prompts[0].model_dump(
            exclude={"index"}
        )
    assert together.unchanged.values == [single.unchanged.value for single in alone]
    for place, cell in enumerate(together.cells):
        values = [single.cells[place].value for single in alone]
        assert cell.values == values
        assert cell.value == pytest.approx(np.mean(values))
        assert cell.spread == pytest.approx(np.std(values, ddof=1))
    assert together.grid == [cell.value for cell in together.cells]


def test_metrics_equal_their_definition_in_torch(server: Serving) -> None:
    def row(*interventions: Any) -> torch.Tensor:
        body = {"prompt": PROMPT, "interventions": interventions}
        logits = server.json("/logits", body)["prompts"][0]["logits"][0]
        return torch.tensor(logits, dtype=torch.float64)

    change = {"stage": "blocks.2.mlp.out", "operation": "scale", "factor": 3.0}
    before, after = row(), row(change)
    expected = {
        "logit": after[97] - after[98],
        "probability": after.softmax(0)[97] - after.softmax(0)[98],
        "loss": torch.nn.functional.cross_entropy(after, torch.tensor(97)),
        "kl": torch.nn.functional.kl_div(
            after.log_softmax(0), before.log_softmax(0), reduction="sum", log_target=True
        ),
    }
    for metric, wanted in expected.items():
        tokens = {"token_id": 97, "minus_id": 98} if metric in ("logit", "probability") else {}
        tokens |= {"token_id": 97} if metric == "loss" else {}
        vary = {**change, "stage": "blocks.*.mlp.out"}
        reply = sweep(server, vary=vary, over=["layers"], metric=metric, **tokens)
        assert reply.cells[2].value == pytest.approx(wanted.item(), rel=1e-6), metric
    assert expected["kl"] > 1e-6


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
    """The sweep has 1,200 cells (3 layers x 4 heads x 100 positions) of 100 tokens each. Its tokens
    count at least double, because interventions halve the speed."""
    prompt = list(range(100))
    axes = {"vary": {**ABLATE, "positions": "all"}, "over": ["layers", "heads", "positions"]}
    with serving(checkpoint_path, max_request_tokens=200_000) as small:
        response = small.post("/sweep", {"prompt": prompt, **axes, **stream})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert re.search(r"(2[4-9]\d{4}|3\d{5}) tokens.*200000.*--max-request-tokens", message)
