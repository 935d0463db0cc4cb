"""Trace: every stage of a forward, in order, with the shapes and sizes of the forward itself."""

import pytest
import torch

from model.transformer.trace import trace
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt

LENGTH = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_shapes_and_axes(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    stages = trace(tiny_gpt(config), random_ids(LENGTH).tolist())
    sizes = {
        "B": 1,
        "T": LENGTH,
        "V": config.vocab_size,
        "d_model": config.d_model,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "head_dim": config.head_dim,
    }
    for stage in stages:
        assert stage.shape == tuple(sizes[axis] for axis in stage.axes.split(", ")), stage.name
    of_a_block = ["Q", "K", "V", "scores", "probs", "hidden state"]
    assert [stage.name for stage in stages] == [
        "embedding",
        *(f"block {layer}: {name}" for layer in range(config.n_layer) for name in of_a_block),
        *(["final norm"] if config.final_norm else []),
        "lm_head: logits",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_forward(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    token_ids = random_ids(1, LENGTH)
    stages = {stage.name: stage for stage in trace(gpt, token_ids[0].tolist())}
    output = gpt(token_ids, hidden_states=True, attentions=True)
    assert output.hidden_states is not None
    assert output.attentions is not None
    expected = {"embedding": output.hidden_states[0], "lm_head: logits": output.logits}
    for layer in range(gpt.config.n_layer):
        expected[f"block {layer}: probs"] = output.attentions[layer]
        expected[f"block {layer}: hidden state"] = output.hidden_states[layer + 1]
    for name, tensor in expected.items():
        assert stages[name].mean == pytest.approx(tensor.mean().item(), abs=1e-5), name
        assert stages[name].std == pytest.approx(tensor.std(correction=0).item(), abs=1e-5), name


def test_probabilities_sum_to_one() -> None:
    for stage in trace(tiny_gpt(), random_ids(LENGTH).tolist()):
        if stage.name.endswith("probs"):
            assert stage.mean * LENGTH == pytest.approx(1)


def test_one_token_and_a_full_context() -> None:
    gpt = tiny_gpt()
    assert trace(gpt, [0])[-1].shape == (1, 1, 257)
    stages = trace(gpt, random_ids(gpt.config.context_length).tolist())
    assert stages[-1].shape == (1, gpt.config.context_length, 257)
    of_one_token = {stage.name: stage for stage in trace(gpt, [0])}
    assert of_one_token["block 0: probs"].mean == 1, "the first token sees itself"
    assert of_one_token["block 0: probs"].std == 0


def test_numbers_of_low_precision_are_told_in_full() -> None:
    gpt = tiny_gpt().to(torch.bfloat16)
    for stage in trace(gpt, random_ids(LENGTH).tolist()):
        assert isinstance(stage.mean, float)
        assert stage.std == stage.std, "no NaN"
