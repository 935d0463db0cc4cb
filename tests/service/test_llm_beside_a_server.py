"""`model.llm.LLM` and a server of the same checkpoint: one request, the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd import Client
from logitd.model.inference.attribution.task import METHODS
from logitd.model.llm import LLM, SamplingParams
from tests.service.serving import Serving

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Iterator[LLM]:
    with LLM(checkpoint_path, device="cpu", threads=1, kernels="torch") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Client]:
    with Client(server.url) as opened:
        yield opened


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 1.0, "logit_bias": {100: 3.0}, "min_tokens": 3},
        {"allowed_token_ids": tuple(b"abc"), "logprobs_stage": "processed"},
    ],
)
@pytest.mark.parametrize("stop", [(), ("ab", "c")])
def test_completions(
    llm: LLM, client: Client, fields: dict[str, Any], stop: tuple[str, ...]
) -> None:
    prompts: list[str | list[int]] = [PROMPT, [7, 8]]
    params = SamplingParams(max_tokens=30, seed=5, logprobs=2, **fields)
    found = llm.generate(prompts, params, n=2, stop=stop)
    served = client.generate(
        prompts, max_tokens=30, seed=5, logprobs=2, n=2, stop=list(stop), **fields
    ).choices
    assert len(found) == len(served) == 4
    for own, choice in zip(found, served, strict=True):
        assert (own.text, own.token_ids) == (choice.text, choice.token_ids)
        assert own.finish_reason == choice.finish_reason
        assert own.stop_reason == choice.stop_reason
        assert own.logprobs is not None
        assert choice.tokens is not None
        assert own.logprobs.tolist() == [token.logprob for token in choice.tokens]
        tops = [[(one.token_id, one.logprob) for one in top] for top in own.top_logprobs]
        assert tops == [[(one.id, one.logprob) for one in token.top] for token in choice.tokens]


def test_logits_hidden_states_and_attention(llm: LLM, client: Client) -> None:
    logits = client.logits(PROMPT, positions="all").logits
    assert np.array_equal(llm.logits(PROMPT), logits)
    states = client.hidden_states(PROMPT, positions="all").hidden_states
    assert np.array_equal(llm.hidden_states(PROMPT), states)
    weights = client.attention(PROMPT, positions="all").attention
    assert np.array_equal(llm.attention(PROMPT), weights)


def test_probs_and_scores(llm: LLM, client: Client) -> None:
    (served,) = client.probs(PROMPT, token_ids=list(range(257))).prompts
    assert llm.probs(PROMPT).tolist() == [token.prob for token in served.tokens]
    (scored,) = client.score(PROMPT, continuations=["cd", [7, 8]], logprobs=0).prompts
    assert scored.continuations is not None
    for own, score in zip(llm.score(PROMPT, ["cd", [7, 8]]), scored.continuations, strict=True):
        assert own.token_ids == score.token_ids
        assert own.logprob == score.logprob
        assert score.tokens is not None
        assert own.logprobs.tolist() == [token.logprob for token in score.tokens]
    (whole,) = client.score(PROMPT).prompts
    assert whole.score is not None
    assert llm.score(PROMPT)[0].logprob == whole.score.logprob


def test_attributions(llm: LLM, client: Client) -> None:
    own = llm.attributions(PROMPT, 97, 98, position=-2, methods=METHODS, steps=2, baseline=32)
    (served,) = client.attributions(
        PROMPT, token="a", minus="b", position=-2, methods=METHODS, steps=2, baseline=32
    ).prompts
    assert (own.target, own.logit) == (served.value, served.token.logit)
    assert own.gradient_times_input == tuple(t.gradient_times_input for t in served.tokens)
    path, summary = own.integrated_gradients, served.integrated_gradients
    assert path is not None
    assert summary is not None
    assert path.values == tuple(token.integrated_gradients for token in served.tokens)
    assert (path.gap, path.baseline_target) == (summary.gap, summary.baseline_value)
    assert served.direct is not None
    assert [(p.stage, p.head, p.value) for p in own.direct or ()] == [
        (p.stage, p.head, p.value) for p in served.direct.parts
    ]
    likeliest = llm.attributions(PROMPT)
    assert likeliest.token_id == llm.probs(PROMPT).argmax()
