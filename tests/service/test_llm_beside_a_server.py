"""`LLM` and a server of the same checkpoint return the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from logitd.model.inference.attribution.task import METHODS
from logitd.model.llm import LLM
from logitd.service.client import Client
from tests.model.test_llm import SAMPLING
from tests.service.http.asking import BY_NAME, PROMPT, SMALLEST, npy, tensors
from tests.service.serving import Serving

JSON: dict[str, dict[str, Any]] = {
    **{name: {} for name, operation in BY_NAME.items()
       if operation.form in ("record", "series", "vocabulary")},
    "probs": {"token_ids": list(range(257)), "perplexity": True},
    "score": {"continuations": ["cd", [7, 8]], "logprobs": 2},
    "attributions": {"token": "a", "minus": "b", "position": -2, "methods": METHODS, "steps": 2,
                     "baseline": 32},
    "sweep": {"over": ["layers", "heads"], "token_id": 97},
}  # fmt: skip
"""Additional fields for operations that answer with a JSON object."""


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Iterator[LLM]:
    with LLM(checkpoint_path, device="cpu", threads=1, kernels="torch") as opened:
        yield opened


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("more", [True, False])
def test_reply_equals_the_servers(llm: LLM, server: Serving, name: str, more: bool) -> None:
    body = {**SMALLEST[name], **(JSON[name] if more else {})}
    served = server.json(f"/{name}", body)
    replies = [llm.run(name, **body)]
    if name not in vars(LLM):
        replies.append(getattr(llm, name)(**body))
    for reply in replies:
        assert isinstance(reply, BaseModel)
        assert type(reply).model_validate(served).model_dump(exclude={"id", "created"}) == (
            reply.model_dump(exclude={"id", "created"})
        )
        assert reply.id.startswith(f"{BY_NAME[name].reply_id}-")  # type: ignore[attr-defined]


GENERATED: dict[str, dict[str, Any]] = {
    **SAMPLING,
    "stop strings": {"temperature": 0.7, "stop": ["ab", "c"]},
    "processed": {"allowed_token_ids": (97, 98, 99), "logprobs_stage": "processed"},
    "regex": {"regex": "[a-c]{2,9}d", "temperature": 2.0},
    "echo": {"echo": True},
    "intervention": {"interventions": [{"stage": "blocks.1.mlp.out", "operation": "zero"}]},
}


@pytest.mark.parametrize("name", GENERATED)
def test_completions_equal_the_servers(llm: LLM, server: Serving, name: str) -> None:
    prompts: list[str | list[int]] = [PROMPT, [7, 8]]
    asked: dict[str, Any] = {"max_tokens": 15, "seed": 5, "logprobs": 2, "n": 2, **GENERATED[name]}
    asked = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asked.items()}
    found = llm.generate(prompts, **asked)
    with Client(server.url) as client:
        served = client.generate(prompts, **asked).choices
    assert len(found) == len(served) == 4
    for own, choice in zip(found, served, strict=True):
        assert (own.text, own.token_ids) == (choice.text, choice.token_ids)
        assert own.finish_reason == choice.finish_reason
        assert own.stop_reason == choice.stop_reason
        assert own.logprobs is not None
        assert choice.tokens is not None
        logprobs = [np.nan if token.logprob is None else token.logprob for token in choice.tokens]
        np.testing.assert_array_equal(own.logprobs, logprobs)
        tops = [[(one.token_id, one.logprob, one.rank) for one in top] for top in own.top_logprobs]
        assert tops == [
            [(one.id, one.logprob, one.rank) for one in token.top] for token in choice.tokens
        ]


def test_arrays_equal_the_servers(llm: LLM, server: Serving) -> None:
    for name in ("logits", "hidden_states", "attention"):
        served = npy(server, f"/{name}", positions="all")
        assert np.array_equal(getattr(llm, name)(PROMPT), served)
        chosen = npy(server, f"/{name}", positions=[0, -1])
        assert np.array_equal(getattr(llm, name)(PROMPT, positions=[0, -1]), chosen)
    stages = ["embedding", "blocks.*.attention.q"]
    named = tensors(server, "/activations", positions="all", stages=stages)
    for stage, values in llm.activations(PROMPT, stages).items():
        assert np.array_equal(values, named[stage].numpy())


def test_methods_return_the_numbers_of_replies(llm: LLM) -> None:
    (probs,) = llm.run("probs", prompt=PROMPT, token_ids=list(range(257))).prompts
    assert llm.probs(PROMPT).tolist() == [token.prob for token in probs.tokens]
    continuations: list[str | list[int]] = ["cd", [7, 8]]
    (scored,) = llm.run("score", prompt=PROMPT, continuations=continuations, logprobs=0).prompts
    for own, score in zip(llm.score(PROMPT, continuations), scored.continuations, strict=True):
        assert (own.token_ids, own.logprob) == (tuple(score.token_ids), score.logprob)
        assert own.logprobs.tolist() == [token.logprob for token in score.tokens]
    assert llm.induction(PROMPT).prompts == llm.run("induction", prompt=PROMPT).prompts
    (found,) = llm.run("attributions", prompt=PROMPT, token_id=97).prompts
    tokens = tuple(token.gradient_times_input for token in found.tokens)
    assert llm.attributions(PROMPT, 97).gradient_times_input == tokens
    swept = llm.run("sweep", **SMALLEST["sweep"], token_id=97)
    assert llm.sweep(**SMALLEST["sweep"], token=97).tolist() == swept.grid
