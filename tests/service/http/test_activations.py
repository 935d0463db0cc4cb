"""POST /activations and GET /stages: any stage by its name, in every form; and interventions in
every operation that runs the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.operations.activations import ActivationsReply
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import stages_of
from logitd.service.http.schemas import StagesReply
from tests.model.plain_stages import plain_stages
from tests.service.http.asking import IDS, PROMPT, Array, npy, tensors
from tests.service.serving import Serving, serving

OTHER = "Another text, as long as the first, which has fifty-nine by"


@pytest.fixture(scope="module")
def expected(gpt: GPT) -> Mapping[str, Array]:
    """Every stage of PROMPT, computed from its definition in float64."""
    double = GPT(gpt.config)
    double.load_state_dict(gpt.state_dict())
    stages = plain_stages(double.double().eval(), IDS)
    return {name: value.detach().numpy() for name, value in stages.items()}


def activations(
    server: Serving, stages: Sequence[str], prompt: Any = PROMPT, **fields: Any
) -> dict[str, Array]:
    found = tensors(server, "/activations", prompt=prompt, stages=list(stages), **fields)
    return {name: value.numpy() for name, value in found.items()}


def close(value: Array, expected: Array, what: str = "") -> None:
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    np.testing.assert_allclose(value, expected, rtol=0, atol=2e-4 * scale, err_msg=what)


# Values


def test_all_stages_match_their_definitions(
    server: Serving, gpt: GPT, expected: Mapping[str, Array]
) -> None:
    names = [stage.name for stage in stages_of(gpt.config)]
    tensors = activations(server, names, positions="all")
    assert list(tensors["token_ids"]) == IDS
    assert set(tensors) == {"token_ids", "positions", *names}
    for name in names:
        assert tensors[name].shape == expected[name].shape, name
        close(tensors[name], expected[name], name)


def test_several_stages_and_prompts_in_one_reply(server: Serving) -> None:
    stages = ["embedding", "blocks.*.attention.probs"]
    body = {"prompt": [PROMPT, "x", IDS[:40]], "stages": stages, "positions": [0]}
    reply = ActivationsReply.model_validate(server.json("/activations", body))
    tensors = activations(server, stages, prompt=body["prompt"], positions=[0])
    for index, prompt in enumerate(reply.prompts):
        assert list(prompt.stages) == [
            "embedding",
            *(f"blocks.{n}.attention.probs" for n in (0, 1, 2)),
        ]
        for name, value in prompt.stages.items():
            assert np.array_equal(np.array(value, np.float32), tensors[f"{name}.{index}"]), name
    assert tensors["blocks.0.attention.probs.1"].shape == (1, 4, 1)


def test_keys_that_are_not_seen_are_null_in_json(server: Serving) -> None:
    stages = ["blocks.0.attention.scores"]
    reply = server.json("/activations", {"prompt": "abc", "stages": stages, "positions": [1]})
    for row in reply["prompts"][0]["stages"][stages[0]][0]:
        assert row[2] is None
        assert all(isinstance(value, float) for value in row[:2])
    assert activations(server, stages, "abc", positions=[1])[stages[0]][0, 0, 2] == -np.inf


def test_stages_are_listed_for_the_model(server: Serving, gpt: GPT) -> None:
    reply = StagesReply.model_validate(server.client.get("/stages").json())
    listed = [name for stage in reply.stages for name in stage.names]
    assert sorted(listed) == sorted(stage.name for stage in stages_of(gpt.config))
    by_name = {stage.name: stage for stage in reply.stages}
    q = by_name["blocks.N.attention.q"]
    assert q.axes == ["positions", "n_head", "head_dim"]
    assert q.shape == [None, gpt.config.n_head, gpt.config.head_dim]
    assert q.names[2] == "blocks.2.attention.q"
    assert by_name["blocks.N.attention.scores"].shape == [None, gpt.config.n_head, None]
    assert by_name["blocks.N.output"].transformer_lens == "blocks.N.hook_resid_post"
    assert not by_name["logits"].changeable


# Changes


HEAD: dict[str, Any] = {"stage": "blocks.1.attention.heads", "heads": [2], "operation": "zero"}


def without_head(name: str, value: torch.Tensor) -> torch.Tensor:
    """The logits without HEAD, computed by hand."""
    if name != HEAD["stage"]:
        return value
    value = value.clone()
    value[:, 2] = 0
    return value


@pytest.fixture(scope="module")
def ablated(gpt: GPT) -> Mapping[str, Array]:
    stages = plain_stages(gpt, IDS, without_head)
    return {name: value.detach().numpy() for name, value in stages.items()}


def test_every_endpoint_computes_the_changed_forward(
    server: Serving, ablated: Mapping[str, Array]
) -> None:
    changes: dict[str, Any] = {"interventions": [HEAD]}
    close(npy(server, "/logits", positions="all", **changes), ablated["logits"])
    close(npy(server, "/hidden_states", **changes)[-1, 0], ablated["blocks.2.output"][-1])
    close(npy(server, "/attention", **changes)[2, 1, 0], ablated["blocks.2.attention.probs"][-1, 1])
    stages = activations(server, ["blocks.2.mlp.out"], positions="all", **changes)
    close(stages["blocks.2.mlp.out"], ablated["blocks.2.mlp.out"])
    logits = torch.from_numpy(ablated["logits"]).double()
    logprobs = logits.log_softmax(-1)
    probs = server.json("/probs", {"prompt": PROMPT, "top_k": 1, **changes})
    assert probs["prompts"][0]["tokens"][0]["id"] == int(logits[-1].argmax())
    score = server.json("/score", {"prompt": PROMPT, **changes})["prompts"][0]["score"]
    expected = sum(float(logprobs[i, IDS[i + 1]]) for i in range(len(IDS) - 1))
    assert score["logprob"] == pytest.approx(expected, rel=1e-4)
    generated = server.generate(PROMPT, max_tokens=1, temperature=0, **changes)
    assert generated["choices"][0]["token_ids"] == [int(logits[-1].argmax())]


def test_star_changes_each_layer(server: Serving) -> None:
    zero = {"operation": "zero", "positions": "all"}
    star = npy(server, "/logits", interventions=[{"stage": "blocks.*.mlp.out", **zero}])
    names = [f"blocks.{layer}.mlp.out" for layer in range(3)]
    one_by_one = npy(server, "/logits", interventions=[{"stage": name, **zero} for name in names])
    assert np.array_equal(star, one_by_one)


def test_setting_another_prompts_stream_continues_its_forward(server: Serving) -> None:
    """If a layer's output is replaced by another prompt's at all positions, the rest of the forward
    pass equals that of the other prompt. If it is replaced at a single position, only that position
    and later ones change."""
    other = npy(server, "/logits", prompt=OTHER, positions="all")
    patch = {"stage": "blocks.0.output", "operation": "set", "from": {"prompt": OTHER}}
    close(npy(server, "/logits", positions="all", interventions=[patch]), other)
    plain = npy(server, "/logits", positions="all")
    patched = npy(server, "/logits", positions="all", interventions=[{**patch, "positions": [40]}])
    close(patched[:40], plain[:40])
    assert not np.allclose(patched[40:], plain[40:], atol=1e-3)


def test_values_and_from_say_the_same(server: Serving) -> None:
    name = "blocks.1.attention.heads"
    read = activations(server, [name], prompt=OTHER, positions=[3, 5], heads=[0, 2])[name]
    base = {"stage": name, "heads": [0, 2], "operation": "set"}
    given = npy(
        server, "/logits", interventions=[{**base, "positions": [7, 9], "values": read.tolist()}]
    )
    source = {"prompt": OTHER, "positions": [3, 5]}
    computed = npy(server, "/logits", interventions=[{**base, "positions": [7, 9], "from": source}])
    assert np.array_equal(given, computed)


def test_steering_adds_the_difference_of_two_means(server: Serving) -> None:
    name = "blocks.0.output"
    happy, sad = (
        activations(server, [name], text, positions="all")[name] for text in ("ab", "cde")
    )
    direction = (happy.mean(0, dtype=np.float64) - sad.mean(0, dtype=np.float64)).astype(np.float32)
    add = {"stage": name, "operation": "add", "factor": 3.0}
    given = npy(server, "/logits", interventions=[{**add, "values": direction.tolist()}])
    computed = npy(
        server,
        "/logits",
        interventions=[{**add, "from": {"prompt": "ab"}, "minus": {"prompt": "cde"}}],
    )
    assert np.array_equal(given, computed)


def test_generated_tokens_alone_can_be_changed(server: Serving) -> None:
    """The first token is unchanged; later ones come from a changed forward pass."""
    flat = {"stage": "final_norm", "operation": "zero", "positions": "generated"}
    plain = server.generate("abc", max_tokens=6, temperature=0)["choices"][0]["token_ids"]
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "interventions": [flat]}
    changed = server.generate("abc", **fields)["choices"][0]["token_ids"]
    assert changed[0] == plain[0]
    assert len(set(changed[1:])) == 1, "the head's bias alone, or the lowest id"


def test_values_count_in_the_queue(checkpoint_path: Path) -> None:
    """The values that interventions contain count as elements until their requests end."""
    patch = {"stage": "blocks.*.mlp.hidden", "operation": "set", "from": {"prompt": OTHER}}
    with serving(checkpoint_path, max_queue_elements=60_000) as small:
        body = {"prompt": PROMPT, "token_ids": [1]}
        assert small.post("/logits", {**body, "interventions": [patch]}).status_code == 200
        response = small.post("/logits", {**body, "interventions": [patch] * 3})
        assert response.status_code == 400, response.text
        assert "60000" in response.text
        assert small.served.engine.admission.elements == 0


def test_direction_between_prompts_equals_its_numbers(server: Serving) -> None:
    """A direction read from two prompts, at every layer, has the same effect as the same direction
    given as numbers."""
    stages = ["blocks.*.output"]

    def values(prompt: str, *interventions: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "stages": stages, "positions": "all"}
        reply = server.json("/activations", {**body, "interventions": interventions})
        named = reply["prompts"][0]["stages"]
        return {name: np.array(rows) for name, rows in named.items()}

    read = {"from": {"prompt": "one of them"}, "minus": {"prompt": "another"}}
    one, other = values("one of them"), values("another")
    given = {name: one[name].mean(axis=0) - other[name].mean(axis=0) for name in one}
    changed = values(PROMPT, {"stage": stages[0], "operation": "zero", "along": read})
    by_numbers = values(
        PROMPT,
        *(
            {"stage": name, "operation": "zero", "along": each.tolist()}
            for name, each in given.items()
        ),
    )
    for name, direction in given.items():
        np.testing.assert_allclose(changed[name], by_numbers[name], atol=1e-4)
        np.testing.assert_allclose(changed[name] @ direction, 0, atol=1e-3)


@pytest.mark.parametrize("part", [{"units": [0, 5, -1]}, {"along": [1.0, -2.0] + [0.0] * 30}])
def test_patch_of_a_part_takes_only_this_part_of_the_other_prompt(
    server: Serving, part: dict[str, Any]
) -> None:
    stage, other = "blocks.1.output", "that other one"
    patch = {"stage": stage, "operation": "set", "from": {"prompt": other}, **part}

    def values(prompt: str, *interventions: Any) -> Any:
        body = {"prompt": prompt, "stages": [stage], "positions": "all"}
        reply = server.json("/activations", {**body, "interventions": interventions})
        return np.array(reply["prompts"][0]["stages"][stage])

    plain, source = values(other[::-1]), values(other)
    expected = plain.copy()
    if "units" in part:
        expected[:, part["units"]] = source[:, part["units"]]
    else:
        unit = np.array(part["along"]) / np.sqrt(5)
        expected += ((source - plain) @ unit)[:, None] * unit
    np.testing.assert_allclose(values(other[::-1], patch), expected, atol=1e-5)
