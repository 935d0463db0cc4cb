"""Calls: what is sent for them, and that any answer is read or refused."""

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd import LogitdError, MalformedReplyError, UnavailableError
from logitd.model.operations.generate import GenerateRequest
from logitd.service.client import calls
from logitd.service.client.arrays import HiddenStates
from logitd.service.client.calls import Answer, Call
from logitd.service.client.results import Probs, Scores, Sweep
from tests.service.client.test_reading import JSON
from tests.service.client.test_streaming import CHUNKS, TAIL, places

CALLS: dict[str, Call[Any]] = {
    "generate": calls.generate("a", {}),
    "logits": calls.logits("a", None, {}),
    "top_k": calls.logits(["a", "b"], 3, {}),
    "hidden_states": calls.arrays("/hidden_states", HiddenStates, {"prompt": "a"}),
    "activations": calls.activations("a", "embedding", {}),
    "stages": calls.stages(),
    "probs": calls.record("/probs", Probs, {"prompt": "a"}),
    "score": calls.record("/score", Scores, {"prompt": "a"}),
    "sweep": calls.record("/sweep", Sweep, {"prompt": "a"}),
    "tokenize": calls.tokenize("a", {}),
    "tokenize many": calls.tokenize(["a"], {}),
    "detokenize": calls.detokenize([1], {}),
    "tokenizer_info": calls.tokenizer_info(),
    "info": calls.info(),
    "health": calls.health(),
    "version": calls.version(),
}
REPLY = CHUNKS[0] | TAIL


def answer(body: Any, status: int = 200, content_type: str = "application/json") -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, content_type, bytearray(content), "id-1")


def sent(prompt: Any, **fields: Any) -> Any:
    body = calls.generate(prompt, fields).request.body
    assert body is not None
    return json.loads(body)


# What is sent


def test_what_is_not_given_is_not_sent() -> None:
    assert sent("a") == {"prompt": "a"}
    assert sent("a", seed=None) == {"prompt": "a", "seed": None}
    body = calls.stream("a", {"n": 2}).body
    assert body is not None
    assert json.loads(body) == {"prompt": "a", "n": 2, "stream": True}


def test_numpy_and_other_sequences_are_sent_as_what_they_hold() -> None:
    ids: list[Any] = [np.array([1, 2]), (1, 2), range(1, 3), [np.int64(1), np.uint8(2)]]
    assert [sent(one)["prompt"] for one in ids] == [[1, 2]] * 4
    assert sent([ids[0], "b"])["prompt"] == [[1, 2], "b"]
    fields = sent(
        "a",
        temperature=np.float32(0.5),
        ignore_eos=np.True_,
        logit_bias={np.int64(5): np.float64(1.5), 6: 1},
        stop=("x", "y"),
    )
    assert fields == {
        "prompt": "a", "temperature": 0.5, "ignore_eos": True,
        "logit_bias": {"5": 1.5, "6": 1}, "stop": ["x", "y"],
    }  # fmt: skip
    body = calls.logits("a", None, {"processing": {"logit_bias": {np.int64(5): 1.0}}}).request.body
    assert body is not None
    assert json.loads(body)["processing"] == {"logit_bias": {"5": 1.0}}


@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), ValueError), (np.array([np.inf]), ValueError), (b"abc", TypeError),
     (bytearray(b"abc"), TypeError), (object(), TypeError), ({1}, TypeError)],
)  # fmt: skip
def test_what_json_cannot_say_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sent("a", temperature=value)


@given(st.text() | st.lists(st.text()))
def test_texts_arrive_as_they_are(prompt: Any) -> None:
    """A lone surrogate is not text; the service says so."""
    body = calls.generate(prompt, {}).request.body
    assert body is not None
    assert GenerateRequest.model_validate_json(body).prompt == prompt


def test_whether_it_streams_is_no_field() -> None:
    for call in (calls.generate, calls.stream):
        with pytest.raises(TypeError, match="takes no `stream`"):
            call("a", {"stream": True})
    with pytest.raises(TypeError, match="takes no `stream`"):
        calls.record("/sweep", Sweep, {"prompt": "a", "stream": True})


@pytest.mark.parametrize(
    ("prompt", "many"),
    [("a", False), ("", False), ([1, 2], False), ((1,), False), (np.array([1, 2]), False),
     ([np.int64(1)], False), (range(3), False), ([], True), (["a"], True), ([[1]], True),
     ([np.array([1])], True), (np.array([[1, 2]]), True), (["a", [1]], True), ([[]], True)],
)  # fmt: skip
def test_one_prompt_or_many(prompt: Any, many: bool) -> None:
    assert calls.is_many(prompt) == many


# What is read


def test_a_503_of_health_is_an_answer_and_another_one_is_not() -> None:
    health = calls.health()
    assert health.result(answer({"status": "failed", "reason": "why"}, 503)).reason == "why"
    with pytest.raises(UnavailableError, match="and not in logitd's words: Busy"):
        health.result(answer(b"<b>Busy</b>", 503, "text/html"))
    with pytest.raises(MalformedReplyError):
        health.result(answer(b"<b>Busy</b>", 200, "text/html"))


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_of_something_else_is_said_to_be_that(name: str) -> None:
    with pytest.raises(MalformedReplyError) as caught:
        CALLS[name].result(answer(b"<html>Log in here</html>", content_type="text/html"))
    assert caught.value.request_id == "id-1"
    assert caught.value.message.startswith(CALLS[name].request.path + " gave no reply that this ")
    assert caught.value.message.endswith(("text/html, and not JSON", "is not a safetensors file"))


@given(JSON, st.binary())
def test_any_answer_is_read_or_refused(value: Any, raw: bytes) -> None:
    for call in CALLS.values():
        for one in (answer(value), answer(raw), answer(value, 503)):
            with suppress(LogitdError):
                call.result(one)


def test_nesting_without_end_is_refused() -> None:
    for call in CALLS.values():
        with pytest.raises(MalformedReplyError):
            call.result(answer(b"[" * 100_000))


@given(st.integers(0, 10**6), JSON, st.booleans())
def test_any_member_of_an_answer_is_read_or_refused(place: int, value: Any, drop: bool) -> None:
    reply = json.loads(json.dumps(REPLY))
    all_places = places(reply)
    container, key = all_places[place % len(all_places)]
    if drop:
        del container[key]
    else:
        container[key] = value
    try:
        generation = CALLS["generate"].result(answer(reply))
    except MalformedReplyError:
        return
    assert isinstance(generation.text, str)


@pytest.mark.parametrize("name", [name for name in REPLY if name not in ("prompts", "new_member")])
def test_what_is_missing_is_named(name: str) -> None:
    reply = {k: v for k, v in REPLY.items() if k != name}
    with pytest.raises(MalformedReplyError, match=f": {name} is missing"):
        CALLS["generate"].result(answer(reply))


def test_what_a_newer_server_says_more_is_passed_over() -> None:
    generation = CALLS["generate"].result(answer(REPLY | {"novel": {"a": [1]}}))
    assert generation.text == "a\u2028"


def test_a_generation_has_a_choice() -> None:
    with pytest.raises(MalformedReplyError, match="choices is empty"):
        CALLS["generate"].result(answer(REPLY | {"choices": []}))
