"""TGI's endpoints: what they answer is what /generate computes, in TGI's shape."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitd.service.api.tgi.formats import EVENTS
from logitd.service.core.errors import bad_request
from logitd.service.schemas.tgi import TextGenerationReply
from tests.profiles import examples
from tests.service.serving import Serving, serving

PROMPT = "What is é?"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 5}


def ask(server: Serving, path: str = "/", **parameters: Any) -> Any:
    reply = server.json(path, {"inputs": PROMPT, "parameters": parameters})
    TextGenerationReply.model_validate(reply[0] if path == "/" else reply)
    return reply[0] if path == "/" else reply


def stream(server: Serving, prompt: str = PROMPT, **parameters: Any) -> list[Any]:
    """The events of a stream, which ends without `[DONE]`."""
    body = {"inputs": prompt, "parameters": parameters}
    response = server.post("/generate_stream", body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", ["/", "/generate"])
def test_the_text_is_that_of_generate(server: Serving, path: str) -> None:
    native = server.generate(PROMPT, max_tokens=12, **SAMPLED)["choices"][0]["text"]
    assert ask(server, path, max_new_tokens=12, **SAMPLED) == {"generated_text": native}
    whole = ask(server, path, max_new_tokens=12, return_full_text=True, **SAMPLED)
    assert whole == {"generated_text": PROMPT + native}


def test_without_sampling_it_is_greedy(server: Serving) -> None:
    native = server.generate(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"]
    for parameters in ({}, {"do_sample": False}, {"seed": 3}):
        assert ask(server, max_new_tokens=12, **parameters)["generated_text"] == native
    sampled = server.generate(PROMPT, max_tokens=12, seed=3)["choices"][0]["text"]
    assert ask(server, max_new_tokens=12, do_sample=True, seed=3)["generated_text"] == sampled


def test_details_are_those_of_generate(server: Serving) -> None:
    native = server.generate(PROMPT, max_tokens=12, logprobs=2, **SAMPLED)
    details = ask(server, max_new_tokens=12, details=True, top_n_tokens=2, **SAMPLED)["details"]
    own = native["choices"][0]["tokens"]
    assert [token["id"] for token in details["tokens"]] == [token["id"] for token in own]
    assert [token["logprob"] for token in details["tokens"]] == [t["logprob"] for t in own]
    assert [[top["id"] for top in tops] for tops in details["top_tokens"]] == [
        [top["id"] for top in token["top"]] for token in own
    ]
    assert (details["generated_tokens"], details["seed"]) == (12, 5)
    assert details["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "reason"),
    [
        ("a", ["g"], "bcdef", "stop_sequence"),
        ("a", ["b"], "", "stop_sequence"),
        ("x", [], "yz é€😀.", "eos_token"),
        (".", [], "", "eos_token"),
    ],
)
def test_why_a_text_ended(
    speller: Serving, prompt: str, stop: list[str], text: str, reason: str
) -> None:
    body = {"inputs": prompt, "parameters": {"stop": stop, "details": True}}
    (reply,) = speller.json("/", body)
    assert (reply["generated_text"], reply["details"]["finish_reason"]) == (text, reason)
    last = stream(speller, prompt, stop=stop)[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, reason)


PIECES = st.lists(st.sampled_from(["a", "\ufffd", "é", "yy"]), max_size=2, unique=True)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), count=st.integers(1, 30), stop=PIECES)
def test_the_tokens_of_a_stream_are_the_text(
    server: Serving, seed: int, count: int, stop: list[str]
) -> None:
    fields: dict[str, Any] = {"do_sample": True, "seed": seed, "max_new_tokens": count}
    events = stream(server, stop=stop, **fields)
    whole = ask(server, stop=stop, details=True, **fields)
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    assert [event["index"] for event in events] == [*range(1, len(events) + 1)]
    assert [event["generated_text"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert [event["token"]["id"] for event in events] == [
        token["id"] for token in whole["details"]["tokens"]
    ]
    ended = {key: whole["details"][key] for key in events[-1]["details"]}
    assert events[-1]["details"] == ended


@pytest.mark.parametrize("seed", range(12))
def test_tokens_that_are_no_character_yet_are_told_with_the_one_that_completes_it(
    server: Serving, seed: int
) -> None:
    """Of bytes at random hardly any is a character. A stream whose first one was half of one broke
    off."""
    parameters = {"temperature": 1e6, "seed": seed, "max_new_tokens": 40, "details": True}
    body = {"inputs": "import os", "parameters": parameters}
    response = server.post("/generate_stream", body)
    told = [json.loads(line[5:]) for line in response.text.splitlines() if line]
    assert "".join(event["token"]["text"] for event in told) == told[-1]["generated_text"]
    whole = server.json("/generate", body)
    assert told[-1]["generated_text"] == whole["generated_text"]
    assert [event["token"]["id"] for event in told] == [
        token["id"] for token in whole["details"]["tokens"]
    ]


def test_only_the_last_tokens_are_kept(server: Serving) -> None:
    native = server.generate(PROMPT[-3:], max_tokens=8, temperature=0)["choices"][0]["text"]
    ids = list(PROMPT[-3:].encode())  # the vocabulary is bytes
    assert ask(server, max_new_tokens=8, truncate=len(ids))["generated_text"] == native


def test_a_grammar_is_a_constraint(server: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    texts = [{"a": True}, {"a": False}]
    for kind, value in (("json", schema), ("json_schema", {"name": "n", "schema": schema})):
        reply = ask(server, grammar={"type": kind, "value": value})
        assert json.loads(reply["generated_text"]) in texts
    reply = ask(server, grammar={"type": "regex", "value": "[xy]{3}"})
    assert set(reply["generated_text"]) <= {"x", "y"}


def test_what_is_not_said_fits(server: Serving) -> None:
    context = server.served.context_length
    body = {"inputs": "a" * (context - 5), "parameters": {"details": True}}
    (reply,) = server.json("/", body)
    assert reply["details"]["generated_tokens"] <= 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": "a", "parameters": {"best_of": 2}}, "parameters"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "parameters"),
        ({"inputs": "a", "parameters": {"temperature": 0}}, "parameters"),
        ({"inputs": "a", "parameters": {"x": 1}}, "parameters"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 1000}}, "inputs"),
        ({"inputs": "a", "parameters": {"stop": [""]}}, "parameters"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": {}}}}, "parameters"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}},
         "parameters"),
        ({"inputs": ["a", "b"]}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "a", "prompt": "a"}, "prompt"),
        ({"inputs": "a", "max_tokens": 5}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_what_cannot_be_done_is_refused(
    server: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_error_in_a_stream_is_told_as_tgi_tells_it() -> None:
    """The message, then its type: what huggingface_hub looks for."""
    told = EVENTS.part(EVENTS.error(bad_request("too much", "inputs")))
    assert told == b'data: {"error":"too much","error_type":"invalid_request_error"}\n\n'


def test_to_post_to_the_root_needs_a_key(server: Serving, checkpoint_path: Any) -> None:
    """The page there needs none."""
    with serving(checkpoint_path, api_keys="test=a-key-for-tests") as running:
        assert running.client.get("/").status_code == 200
        assert running.post("/", {"inputs": "a"}).status_code == 401
        key = {"Authorization": "Bearer a-key-for-tests"}
        assert running.post("/", {"inputs": "a"}, **key).status_code == 200
        operations = running.app.openapi()["paths"]["/"]
        assert operations["post"]["security"] == [{"api_key": []}]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/docs", "/info"])
def test_head_is_get_without_a_body(server: Serving, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]
    assert server.client.head("/generate").status_code == 405
