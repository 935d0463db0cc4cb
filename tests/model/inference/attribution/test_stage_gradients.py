"""Gradients with respect to stages, and probes. They are compared with autograd over the forward
pass in `tests/model/plain_stages.py`, and with the gradients of HookedGPT."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.task import AttributionTask, Probe
from logitd.model.inference.errors import InvalidRequest
from logitd.model.llm import LLM
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import stages_of
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages, without_softcap

IDS = random_ids(11, seed=3).tolist()
POSITION, TOKEN, MINUS = 8, 70, 5


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param])).double()


def gradient_stages(gpt: GPT) -> tuple[str, ...]:
    return tuple(stage.name for stage in stages_of(gpt.config) if stage.name != "logits")


def by_definition(gpt: GPT) -> Mapping[str, Tensor]:
    """All stages of IDS up to and including POSITION, in one autograd graph. The logits are those
    before the softcap."""

    def change(name: str, value: Tensor) -> Tensor:
        return value.clone().requires_grad_() if name == "embedding" else value.clone()

    with torch.enable_grad():
        return plain_stages(without_softcap(gpt), IDS[: POSITION + 1], change)


def check(gpt: GPT, task: AttributionTask, target: Tensor, stages: Mapping[str, Tensor]) -> None:
    """Compare the gradients of all stages, and the value of the target."""
    found = attributing(gpt, IDS, task).result()
    assert found.target == pytest.approx(target.item(), rel=1e-9, abs=1e-9)
    assert tuple(found.gradients) == task.stages
    expected = torch.autograd.grad(
        target, [stages[name] for name in task.stages], allow_unused=True
    )
    rows = POSITION + 1
    for name, gradient in zip(task.stages, expected, strict=True):
        array = found.gradients[name]
        if name.endswith("attention.head_out"):  # nothing reads it, by definition
            of_out = found.gradients[name.replace("head_out", "out")]
            np.testing.assert_allclose(array, np.broadcast_to(of_out[:, None], array.shape))
            continue
        near = array[:rows]
        if name.endswith(("scores", "probs")):
            assert array.shape[-1] == len(IDS)
            near = near[..., :rows]
        of_plain = np.zeros_like(near) if gradient is None else gradient.nan_to_num().numpy()
        np.testing.assert_allclose(near, of_plain, rtol=0, atol=1e-8, err_msg=name)
        assert not array[rows:].any()


def test_gradients_of_a_logit_difference_are_those_of_the_definition(gpt: GPT) -> None:
    stages = by_definition(gpt)
    task = AttributionTask(
        position=POSITION, token_id=TOKEN, minus_id=MINUS, stages=gradient_stages(gpt)
    )
    row = stages["logits"][POSITION]
    check(gpt, task, row[TOKEN] - row[MINUS], stages)


@pytest.mark.parametrize("gpt", ["original", "neox", "nanochat"], indirect=True)
def test_gradients_of_a_probe_are_those_of_the_definition(gpt: GPT) -> None:
    names = [name for name in gradient_stages(gpt) if not name.endswith("head_out")]
    wanted = tuple(names[::5])
    for name in names:
        if name.startswith(("blocks.0", "blocks.2")):
            continue
        stages = by_definition(gpt)
        at = stages[name][POSITION]
        direction = np.random.default_rng(1).normal(size=at.shape).astype(np.float32)
        seen = torch.where(at.isneginf(), 0.0, at)
        if name.endswith(("scores", "probs")):
            direction = np.pad(direction, [(0, 0), (0, len(IDS) - POSITION - 1)])
        target = (seen * torch.from_numpy(direction)[..., : at.shape[-1]]).sum()
        task = AttributionTask(position=POSITION, probe=Probe(name, direction), stages=wanted)
        check(gpt, task, target, stages)


def test_llm_gives_gradients_and_refuses_impossible_ones(checkpoint_path: Path) -> None:
    with LLM(checkpoint_path, device="cpu", threads=1, slots=1) as llm:
        found = llm.attributions(IDS, TOKEN, stages=["blocks.*.attn.hook_pattern", "embedding"])
        assert list(found.gradients) == [
            "embedding",
            *(f"blocks.{n}.attention.probs" for n in range(3)),
        ]
        of_embedding = found.gradients["embedding"]
        times_input = (of_embedding * llm.hidden_states(IDS, layers=[0])[0]).sum(axis=1)
        assert found.gradient_times_input is not None
        np.testing.assert_allclose(times_input, found.gradient_times_input, rtol=1e-3, atol=1e-4)
        direction = {"stage": "blocks.1.hook_resid_post", "values": [1.0] * 32}
        probed = llm.attributions(IDS, direction=direction, stages=["blocks.0.mlp.out"])
        value = llm.hidden_states(IDS, layers=[2])[0, -1].sum()
        assert probed.target == pytest.approx(value, rel=1e-4)
        assert probed.token_id is None
        for fields, message in (
            ({"stages": ["logits"]}, "logits"),
            ({"direction": {**direction, "values": [1.0] * 31}}, r"31.*32"),
            ({"direction": direction, "methods": ["direct"]}, "methods"),
            ({"direction": direction, "token": 97}, "direction and token_id"),
            ({"direction": {**direction, "stage": "blocks.*.output"}}, "several"),
            ({"stages": ["blocks.3.hook_z"]}, r"blocks\.3"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.attributions(IDS, **fields)
