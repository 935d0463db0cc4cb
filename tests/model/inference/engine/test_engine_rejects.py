"""Engine: what cannot be computed is rejected with its numbers, and what just fits is accepted."""

from typing import Any

import pytest

from logitd.model.inference.engine.requests import (
    Request,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import (
    SMALL_VOCABULARY,
    Driven,
    generation,
    outputs_request,
    run,
)

PROMPT = list(range(30))


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (generation("a", []), "prompt", "the prompt is empty; give at least one token"),
        (outputs_request("a", [], [0]), "prompt", "the prompt is empty; give at least one token"),
        (
            generation("a", [0, 40]),
            "prompt",
            r"token id 40 in prompt is outside the vocabulary of 40 ids \(0 to 39\)",
        ),
        (outputs_request("a", [-1]), "prompt", "token id -1 in prompt is outside"),
        (
            generation("a", PROMPT, max_tokens=99),
            "prompt",
            "the prompt has 30 tokens and max_tokens is 99: together 129, the model's context is "
            "128. Shorten the prompt by 1 token or lower max_tokens to 98$",
        ),
        (
            generation("a", [1] * 128, max_tokens=1),
            "prompt",
            "the prompt has 128 tokens; the model's context is 128 and at least one token must be "
            "left for the completion. Shorten the prompt by 1 token$",
        ),
        (
            outputs_request("a", [1] * 129, [0]),
            "prompt",
            "the prompt has 129 tokens; the model's context is 128. Shorten it by 1 token$",
        ),
        (generation("a", PROMPT, n=0), "n", "n is 0; it must be at least 1"),
        (
            generation("a", PROMPT, logit_bias={40: 1.0}),
            "logit_bias",
            "token id 40 in logit_bias is outside the vocabulary of 40 ids",
        ),
        (
            generation("a", PROMPT, allowed_token_ids=(3, 41)),
            "allowed_token_ids",
            "token id 41 in allowed_token_ids is outside",
        ),
        (
            generation("a", PROMPT, stop_token_ids=frozenset({-2})),
            "stop_token_ids",
            "token id -2 in stop_token_ids is outside",
        ),
        (
            generation("a", PROMPT, stop_token_ids=frozenset(range(40)), min_tokens=1),
            "min_tokens",
            "stop_token_ids holds all 40 ids, which min_tokens forbids",
        ),
        (
            generation("a", PROMPT, logprobs=41),
            "logprobs",
            "logprobs is 41; the vocabulary has 40 ids",
        ),
        (
            outputs_request("a", PROMPT, []),
            "positions",
            r"positions \[\] must be ascending, distinct and at least one",
        ),
        (
            outputs_request("a", PROMPT, [3, 2]),
            "positions",
            r"positions \[3, 2\] must be ascending, distinct",
        ),
        (
            outputs_request("a", PROMPT, [3, 3]),
            "positions",
            r"positions \[3, 3\] must be ascending, distinct",
        ),
        (
            outputs_request("a", PROMPT, [-1, 5]),
            "positions",
            r"positions has -1; the prompt has 30 tokens \(0 to 29\)",
        ),
        (outputs_request("a", PROMPT, [30]), "positions", "positions has 30; the prompt has 30"),
        (
            outputs_request("a", PROMPT, [0], columns=(40,)),
            "token_ids",
            "token id 40 in token_ids is outside the vocabulary",
        ),
        (
            outputs_request("a", PROMPT, [0], columns=()),
            "token_ids",
            "token_ids is empty; choose at least one",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(
    gpt: GPT, request_: Request, param: str, message: str
) -> None:
    driven = Driven(gpt)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        driven.add(request_)
    assert refusal.value.param == param
    assert not driven.engine.has_work()
    driven.engine.check_integrity()


def test_what_just_fits_is_accepted(gpt: GPT) -> None:
    everything = frozenset(range(SMALL_VOCABULARY))
    outcomes = run(
        gpt,
        generation("full", [1] * 127, max_tokens=1, logprobs=40),
        generation("stops", PROMPT, stop_token_ids=everything),
        generation("last id", [39], logit_bias={39: 1.0}, allowed_token_ids=(39,)),
        outputs_request("rows", [1] * 128, [0, 127], columns=(39, 0, 39)),
    )
    assert all(outcome.ended.error is None for outcome in outcomes.values())
    assert len(outcomes["full", 0].tokens[0].top) == 40
    assert outcomes["stops", 0].ended.completion_tokens == 1
    assert outcomes["last id", 0].token_ids == [39] * 8


def test_a_request_id_is_used_once_at_a_time(gpt: GPT) -> None:
    driven = Driven(gpt)
    driven.add(generation("a", [1]))
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        driven.add(outputs_request("a", [1]))
    driven.drain()
    engine = driven.engine
    engine.add(generation("a", [1], max_tokens=1))
    assert [event.request_id for event in engine.step().events] == ["a", "a"]


def test_config_bounds_what_an_engine_holds(gpt: GPT) -> None:
    """Never more running than slots, never more prefilled in a step than the chunk."""
    config: dict[str, Any] = {"slots": 3, "prefill_chunk": 32}
    driven = Driven(gpt, **config)
    for i in range(12):
        driven.add(generation(str(i), [i] * (10 * i + 1), max_tokens=5))
    while driven.engine.has_work():
        assert driven.step().prefilled_tokens <= 32
        assert driven.engine.stats().running <= 3
