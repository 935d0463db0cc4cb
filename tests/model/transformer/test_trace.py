"""Trace: every stage of a forward pass in order, with its shape, mean and standard deviation."""

import pytest

from logitd.model.transformer.stages import stages_of
from logitd.model.transformer.trace import trace
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages

LENGTH = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_has_the_shapes_and_numbers_of_the_forward(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    config, token_ids = gpt.config, random_ids(LENGTH).tolist()
    stages = trace(gpt, token_ids)
    assert [stage.name for stage in stages] == [stage.name for stage in stages_of(config)]
    sizes = {**config.to_dict(), "T": LENGTH}
    expected = plain_stages(gpt, token_ids)
    assert set(expected) == {stage.name for stage in stages}
    for stage in stages:
        assert stage.shape == tuple(sizes[axis] for axis in stage.axes.split(", ")), stage.name
        finite = expected[stage.name][expected[stage.name].isfinite()]
        assert stage.mean == pytest.approx(finite.mean().item(), abs=1e-5), stage.name
        assert stage.std == pytest.approx(finite.std(correction=0).item(), abs=1e-5), stage.name


def test_trace_covers_one_token_and_a_full_context() -> None:
    gpt = tiny_gpt()
    assert trace(gpt, [0])[-1].shape == (1, 257)
    stages = trace(gpt, random_ids(gpt.config.context_length).tolist())
    assert stages[-1].shape == (gpt.config.context_length, 257)
    of_one_token = {stage.name: stage for stage in trace(gpt, [0])}
    assert of_one_token["blocks.0.attention.probs"].mean == 1, "the first token sees itself"
    assert of_one_token["blocks.0.attention.probs"].std == 0
