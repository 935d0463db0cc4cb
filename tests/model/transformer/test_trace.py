"""Trace: every stage of a forward, in order, with the shapes and sizes of the forward itself."""

import pytest

from logitd.model.transformer.stages import stages_of
from logitd.model.transformer.trace import trace
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages

LENGTH = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_shapes_and_axes(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    stages = trace(tiny_gpt(config), random_ids(LENGTH).tolist())
    sizes = {**config.to_dict(), "head_dim": config.head_dim, "T": LENGTH}
    for stage in stages:
        assert stage.shape == tuple(sizes[axis] for axis in stage.axes.split(", ")), stage.name
    assert [stage.name for stage in stages] == [stage.name for stage in stages_of(config)]


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_forward(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    token_ids = random_ids(1, LENGTH)
    stages = {stage.name: stage for stage in trace(gpt, token_ids[0].tolist())}
    output = gpt(token_ids, hidden_states=True, attentions=True)
    assert output.hidden_states is not None
    assert output.attentions is not None
    expected = {"embedding": output.hidden_states[0], "logits": output.logits}
    for layer in range(gpt.config.n_layer):
        expected[f"blocks.{layer}.attention.probs"] = output.attentions[layer]
        expected[f"blocks.{layer}.output"] = output.hidden_states[layer + 1]
    plain = plain_stages(gpt, token_ids[0].tolist())
    expected |= {name: value[value.isfinite()] for name, value in plain.items()}
    assert set(expected) == set(stages)
    for name, tensor in expected.items():
        assert stages[name].mean == pytest.approx(tensor.mean().item(), abs=1e-5), name
        assert stages[name].std == pytest.approx(tensor.std(correction=0).item(), abs=1e-5), name


def test_trace_covers_one_token_and_a_full_context() -> None:
    gpt = tiny_gpt()
    assert trace(gpt, [0])[-1].shape == (1, 257)
    stages = trace(gpt, random_ids(gpt.config.context_length).tolist())
    assert stages[-1].shape == (gpt.config.context_length, 257)
    of_one_token = {stage.name: stage for stage in trace(gpt, [0])}
    assert of_one_token["blocks.0.attention.probs"].mean == 1, "the first token sees itself"
    assert of_one_token["blocks.0.attention.probs"].std == 0
