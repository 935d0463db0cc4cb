"""Calls: requests have the expected bodies, and a reply of any content is either parsed or raises
one of the client's own errors."""

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd import LogitdError, MalformedReplyError, UnavailableError
from logitd.model.operations.generate import GenerateRequest
from logitd.service.client import endpoints
from logitd.service.client.calls import Answer, Call, is_many
from tests.service.client.test_reading import JSON
from tests.service.client.test_streaming import CHUNKS, TAIL

CALLS: dict[str, Call[Any]] = {
    "generate": endpoints.generate("a"),
    "logits": endpoints.logits("a"),
    "top_k": endpoints.logits(["a", "b"], top_k=3),
    "hidden_states": endpoints.hidden_states("a"),
    "activations": endpoints.activations("a", "embedding"),
    "stages": endpoints.stages(),
    "probs": endpoints.probs("a"),
    "score": endpoints.score("a"),
    "sweep": endpoints.patch("a", "b"),
    "tokenize": endpoints.tokenize("a"),
    "tokenize many": endpoints.tokenize(["a"]),
    "detokenize": endpoints.detokenize([1]),
    "tokenizer_info": endpoints.tokenizer_info(),
    "info": endpoints.info(),
    "health": endpoints.health(),
    "version": endpoints.version(),
}
REPLY = CHUNKS[0] | TAIL


def answer(body: Any, status: int = 200, content_type: str = "application/json") -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": content_type, "retry-after": "7"}
    return Answer(status, headers, bytearray(content), "id-1")


def sent(prompt: Any, **fields: Any) -> Any:
    return json.loads(endpoints.generate(prompt, **fields).request.body or b"")


# Requests


def test_body_has_only_the_given_fields() -> None:
    assert sent("a") == {"prompt": "a"}
    assert sent("a", seed=None) == {"prompt": "a", "seed": None}
    body = endpoints.stream("a", n=2).body or b""
    assert json.loads(body) == {"prompt": "a", "n": 2, "stream": True}


def test_numpy_and_other_sequences_are_sent_as_lists() -> None:
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
    nested = sent("a", processing={"logit_bias": {np.int64(5): 1.0}})
    assert nested["processing"] == {"logit_bias": {"5": 1.0}}


@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), ValueError), (np.array([np.inf]), ValueError), (b"abc", TypeError),
     (bytearray(b"abc"), TypeError), (object(), TypeError), ({1}, TypeError)],
)  # fmt: skip
def test_values_outside_json_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sent("a", temperature=value)


@given(st.text() | st.lists(st.text()))
def test_texts_arrive_unchanged(prompt: Any) -> None:
    """Texts with lone surrogates are not tested, because the service refuses them."""
    body = endpoints.generate(prompt).request.body or b""
    assert GenerateRequest.model_validate_json(body).prompt == prompt


@pytest.mark.parametrize("call", [endpoints.generate, endpoints.stream, endpoints.lens])
def test_stream_is_not_a_field(call: Any) -> None:
    with pytest.raises(TypeError, match="do not stream"):
        call("a", stream=True)


@pytest.mark.parametrize(
    ("prompt", "many"),
    [("a", False), ("", False), ([1, 2], False), ((1,), False), (np.array([1, 2]), False),
     ([np.int64(1)], False), (range(3), False), ([], True), (["a"], True), ([[1]], True),
     ([np.array([1])], True), (np.array([[1, 2]]), True), (["a", [1]], True), ([[]], True)],
)  # fmt: skip
def test_lists_of_prompts_are_distinguished_from_prompts(prompt: Any, many: bool) -> None:
    assert is_many(prompt) == many


@pytest.mark.parametrize("call", [endpoints.logits, endpoints.attention, endpoints.detokenize])
@pytest.mark.parametrize("value", [{"a": 1}, {1, 2}, 5, None, (text for text in "ab")])
def test_invalid_prompt_is_refused_by_name(call: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"^(prompt|tokens) is .*; it must be a text, a list of"):
        call(value)


@pytest.mark.parametrize(
    ("stop", "kind"), [({"a"}, TypeError), (object(), TypeError), (float("nan"), ValueError)]
)
def test_value_that_is_not_json_is_refused_by_name(stop: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^stop cannot be sent as JSON: "):
        sent("a", stop=stop)


# Answers


def test_health_reads_its_own_503_and_no_other() -> None:
    health = CALLS["health"]
    assert health.result(answer({"status": "failed", "reason": "why"}, 503)).reason == "why"
    with pytest.raises(UnavailableError, match="and the reply is not logitd's: Busy") as caught:
        health.result(answer(b"<b>Busy</b>", 503, "text/html"))
    assert caught.value.retry_after == 7
    with pytest.raises(MalformedReplyError):
        health.result(answer(b"<b>Busy</b>", 200, "text/html"))


@pytest.mark.parametrize("name", CALLS)
def test_answers_of_other_servers_are_named(name: str) -> None:
    with pytest.raises(MalformedReplyError) as caught:
        CALLS[name].result(answer(b"<html>Log in here</html>", content_type="text/html"))
    assert caught.value.request_id == "id-1"
    assert f" {CALLS[name].request.path}: " in caught.value.message
    assert caught.value.message.endswith(("text/html and is not JSON", "is not a safetensors file"))


@given(JSON, st.binary())
def test_any_answer_is_read_or_refused(value: Any, raw: bytes) -> None:
    for call in CALLS.values():
        for one in (answer(value), answer(raw), answer(value, 503), answer(b"[" * 100_000)):
            with suppress(LogitdError):
                call.result(one)


def test_generation_without_choices_is_refused() -> None:
    with pytest.raises(MalformedReplyError, match="choices is empty"):
        CALLS["generate"].result(answer(REPLY | {"choices": []}))
