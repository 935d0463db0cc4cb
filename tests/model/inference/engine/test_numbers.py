"""Requests for numbers: the engine's outputs and scores equal the model's. They equal
`forward_as_served` to the bit, as promised, and the plain forward pass, which does not use the
cache, within float32's tolerance.
"""

import random
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.engine.requests import AttentionWeights, HiddenStates, Logits
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT
from logitd.model.inference.reference import processed_row
from logitd.model.transformer.gpt import GPT
from tests.model.covering import few_families
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    generation,
    outputs_request,
    params,
    random_params,
    random_prompt,
    run,
    score_request,
)
from tests.model.inference.served import forward_as_served

LENGTH = 75
PROMPT = random_prompt(random.Random(0), LENGTH, 257)
WANTED = (0, 5, 31, 32, 63, 64, 74)


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


def rows(gpt: GPT, wanted: Any, positions: TokenIds[int] = WANTED, **config: Any) -> Tensor:
    """The requested outputs at `positions` of PROMPT, from a new engine."""
    request = outputs_request("a", PROMPT, positions, output=wanted)
    outcome = run(gpt, request, **config)["a", 0]
    assert tuple(outcome.positions) == tuple(positions)
    return outcome.values


# Rows


@pytest.mark.parametrize("prefill_chunk", [32, 64, 128])
def test_logits_are_the_models_own_to_the_bit(gpt: GPT, prefill_chunk: int) -> None:
    own = forward_as_served(gpt, torch.tensor(PROMPT), kernels="torch").logits[0]
    found = rows(gpt, Logits(), range(LENGTH), prefill_chunk=prefill_chunk)
    assert torch.equal(found, own)
    assert_close(found, gpt(torch.tensor([PROMPT])).logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0,), (3,), (1, 2)])
def test_hidden_states_are_the_models_own_to_the_bit(gpt: GPT, layers: tuple[int, ...]) -> None:
    own = forward_as_served(
        gpt, torch.tensor(PROMPT), kernels="torch", hidden_states=True
    ).hidden_states
    plain = gpt(torch.tensor([PROMPT]), hidden_states=True).hidden_states
    assert own is not None
    assert plain is not None
    found = rows(gpt, HiddenStates(layers=layers)).transpose(0, 1)  # (layers, P, d_model)
    assert torch.equal(found, own[list(layers), 0][:, list(WANTED)])
    assert_close(found, plain[list(layers), 0][:, list(WANTED)], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("layers", "heads"), [((0, 1, 2), (0, 1, 2, 3)), ((2,), (3,)), ((0, 2), (1, 2))]
)
def test_attention_weights_are_the_models_own_to_the_bit(
    gpt: GPT, layers: tuple[int, ...], heads: tuple[int, ...]
) -> None:
    own = forward_as_served(gpt, torch.tensor(PROMPT), kernels="torch", attentions=True).attentions
    plain = gpt(torch.tensor([PROMPT]), attentions=True).attentions
    assert own is not None
    assert plain is not None
    found = rows(gpt, AttentionWeights(layers=layers, heads=heads))  # (P, layers, heads, T)
    assert found.shape == (len(WANTED), len(layers), len(heads), LENGTH)
    found = found.permute(1, 2, 0, 3)
    chosen = own[list(layers), 0][:, list(heads)][:, :, list(WANTED)]
    assert torch.equal(found, chosen)
    expected = plain[list(layers), 0][:, list(heads)][:, :, list(WANTED)]
    assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert_close(found.sum(dim=-1), torch.ones(found.shape[:-1]))


@few_families
@pytest.mark.parametrize(
    "wanted", [Logits(), HiddenStates(layers=(1, 3)), AttentionWeights(layers=(2,), heads=(0, 3))]
)
def test_eviction_changes_no_bit(gpt: GPT, wanted: Any) -> None:
    """The client reads slowly. After every second piece, another request waits for the only
    slot."""
    alone = rows(gpt, wanted, range(1, LENGTH), prefill_chunk=32)
    driven = Driven(gpt, slots=1, prefill_chunk=32)
    driven.engine._scheduler.step_elements = 1  # pieces of one block
    driven.add(outputs_request("a", PROMPT, range(1, LENGTH), output=wanted))
    for i in range(2):
        while driven.engine.has_work():
            driven.step()
        driven.add(generation(f"waits {i}", random_prompt(random.Random(i), 50), max_tokens=2))
        while driven.engine.has_work():
            driven.step()
        assert driven.outcomes[f"waits {i}", 0].finish is not None
        for _ in range(CHUNKS_IN_FLIGHT):
            driven.engine.grant("a")
    outcome = driven.drain()["a", 0]
    assert driven.evicted_sequences == 1, "the third piece is the last"
    assert outcome.positions == list(range(1, LENGTH))
    assert torch.equal(outcome.values, alone)


@pytest.mark.parametrize("seed", range(20))
def test_processed_logits_match_the_definition(seed: int) -> None:
    """Compare the logits with the definition, computed on Python lists, for a text that is partly
    prompt and partly generated."""
    gpt, rng = tiny_gpt(), random.Random(seed)
    sampling = random_params(rng, 1, 257)
    start = rng.choice([None, 0, 20, 40, 75])
    wanted = Logits(processing=sampling, completion_start=start)
    found, raw = rows(gpt, wanted), rows(gpt, Logits())
    for position, row, values in zip(WANTED, raw.tolist(), found, strict=True):
        text = PROMPT[: position + 1]
        prompt_length = len(text) if start is None else min(len(text), start)
        expected = torch.tensor(processed_row(row, text, prompt_length, sampling))
        assert torch.equal(values.isinf(), expected.isinf())
        assert_close(values, expected.float(), atol=1e-3, rtol=1e-4)


def test_columns_of_processed_logits() -> None:
    gpt = tiny_gpt()
    cold = params(temperature=0.5, top_k=20)
    everything = rows(gpt, Logits(processing=cold))
    chosen = rows(gpt, Logits(processing=cold, columns=(256, 3, 3)))
    assert torch.equal(chosen, everything[:, [256, 3, 3]])
    assert (everything.isfinite().sum(dim=-1) == 20).all()


# Scores


@few_families
@pytest.mark.parametrize(
    ("length", "context", "top"), [(75, 0, 0), (75, 40, 3), (1, 0, 2), (33, 32, 1)]
)
def test_scores_in_arrays_equal_those_of_tokens(
    gpt: GPT, length: int, context: int, top: int
) -> None:
    prompt, rest = PROMPT[: context or length], [PROMPT[context:length]] if context else []
    request = score_request("s", prompt, *rest, top=top)
    driven = run(gpt, request, replace(request, request_id="a", arrays=True), prefill_chunk=32)
    tokens = [token for token in driven["s", 0].prompt if token.chosen is not None]
    assert driven["a", 0].prompt == []
    position, arrays = context or 1, []
    for chunk in driven["a", 0].scores:
        assert chunk.start == position
        position += len(chunk.scores.logprobs)
        arrays.append(chunk.scores)
    assert position == max(length, 1)
    assert [value for rows in arrays for value in rows.logprobs] == [
        token.chosen.logprob for token in tokens if token.chosen is not None
    ]
    likeliest = [entry for token in tokens for entry in token.top]
    assert [count for rows in arrays for count in rows.counts] == [top] * len(tokens)
    assert [i for rows in arrays for i in rows.top_ids] == [entry.token_id for entry in likeliest]
    assert [value for rows in arrays for value in rows.top_logprobs] == [
        entry.logprob for entry in likeliest
    ]
