"""Engine: impossible requests are refused with a message that names the field and the numbers, and
the largest possible requests fit. Refusals that depend only on an operation's own fields are tested
in `tests/service/http/test_refused_fields.py`."""

from typing import Any

import numpy as np
import pytest

from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.engine.requests import (
    AttributionRequest,
    Lens,
    Logits,
    Output,
    Request,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import (
    SMALL_VOCABULARY,
    Driven,
    check_integrity,
    generation,
    outputs_request,
    run,
    score_request,
)

PROMPT = list(range(30))


def rows(output: Output) -> Request:
    return outputs_request("a", PROMPT, [0], output=output)


def attributed(prompt: list[int] = PROMPT, **fields: Any) -> Request:
    task = AttributionTask(**({"position": max(0, len(prompt) - 1)} | fields))
    return AttributionRequest(request_id="a", token_ids=tuple(prompt), task=task)


def changed(**fields: Any) -> Request:
    change: dict[str, Any] = {"stage": "blocks.0.attention.heads", "operation": "zero"}
    return outputs_request("a", PROMPT, interventions=(Intervention(**(change | fields)),))


CHANGES: list[tuple[dict[str, Any], str]] = [
    (
        {"operation": "set", "values": np.zeros((1, 2, 7), np.float32)},
        r"\[1, 2, 7\].*blocks.0.attention.heads.*\[1, 2, 8\]",
    ),
    (
        {"operation": "set", "positions": (0, 1, 2), "values": np.zeros((2, 2, 8), np.float32)},
        r"\[2, 2, 8\].*\[3, 2, 8\] or \[1, 2, 8\]",
    ),
]


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (outputs_request("a", [-1]), "prompt", "-1.*prompt"),
        (generation("a", PROMPT, max_tokens=99), "prompt", "30.*99.*129.*128.*1 token .*98$"),
        (generation("a", [1] * 128, max_tokens=1), "prompt", "128 tokens.*128.*1 token$"),
        (generation("a", [1] * 120, max_tokens=60), "prompt", "120.*60.*180.*128.*52.*8$"),
        (outputs_request("a", [1] * 129, [0]), "prompt", "129.*128.*1 token$"),
        (score_request("a", [1] * 127, [1], [1, 2, 3]), "continuations", "130.*128.*2 tokens$"),
        (generation("a", PROMPT, allowed_token_ids=(3, 5) * 30), "allowed_token_ids", "60 .*3.*40"),
        (generation("a", PROMPT, stop_token_ids=frozenset({-2})), "stop_token_ids", "-2"),
        (
            generation("a", PROMPT, stop_token_ids=frozenset(range(40)), min_tokens=1),
            "min_tokens",
            "stop_token_ids.*40.*min_tokens",
        ),
        (generation("a", PROMPT, prompt_logprobs=-1), "prompt_logprobs", "-1.*0 to 40"),
        (generation("a", PROMPT, prompt_logprobs=41), "prompt_logprobs", "41.*0 to 40"),
        (rows(Lens(layers=(0,), top_k=0)), "top_k", "top_k.*0"),
        (score_request("a", [1], top=-1), "logprobs", "-1"),
        (attributed(minus_id=-1), "minus_id", "-1.*minus_id"),
        *((changed(**fields), "interventions", message) for fields, message in CHANGES),
    ],
)
def test_engine_refuses_a_request_by_field_and_numbers(
    gpt: GPT, request_: Request, param: str, message: str
) -> None:
    driven = Driven(gpt)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        driven.add(request_)
    assert refusal.value.param == param
    assert not driven.engine.has_work()
    check_integrity(driven.engine)


def test_engine_accepts_the_largest_requests(gpt: GPT) -> None:
    everything = frozenset(range(SMALL_VOCABULARY))
    outcomes = run(
        gpt,
        generation("full", [1] * 127, max_tokens=1, logprobs=40),
        generation("stops", PROMPT, stop_token_ids=everything),
        generation("last id", [39], logit_bias={39: 1.0}, allowed_token_ids=(39,)),
        outputs_request("rows", [1] * 128, [0, 127], output=Logits(columns=(39, 0, 39))),
    )
    assert all(outcome.ended.error is None for outcome in outcomes.values())
    assert len(outcomes["full", 0].tokens[0].top) == 40
    assert outcomes["stops", 0].ended.completion_tokens == 1
    assert outcomes["last id", 0].token_ids == [39] * 8


def test_request_id_is_unique_while_in_use(gpt: GPT) -> None:
    driven = Driven(gpt)
    driven.add(generation("a", [1]))
    with pytest.raises(InvalidRequest, match=r"request id.*'a'"):
        driven.add(outputs_request("a", [1]))
    driven.drain()
    engine = driven.engine
    engine.add(generation("a", [1], max_tokens=1))
    assert [event.request_id for event in engine.step().events] == ["a", "a"]
