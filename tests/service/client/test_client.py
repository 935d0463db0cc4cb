"""Client and AsyncClient against a real server: each call returns its endpoint's reply."""

import asyncio
import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import logitd
from logitd import AsyncClient, Client, LogitdError, UnavailableError
from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.operation import Operation
from logitd.model.version import VERSION
from logitd.service.application.app import create_app
from logitd.service.client.transport import MAX_TIMEOUT_SECONDS
from tests.service.client.conftest import Connect
from tests.service.serving import Serving, eventually, held_loading, serve_settings, serving_app
from tests.service.spelling import spelled

LONG: dict[str, Any] = {"prompt": "a", "ignore_eos": True}
"""A generation that outlasts any test."""


def plain(value: Any) -> Any:
    """A result as JSON, without nulls or members that differ between two equal requests."""
    match value:
        case dict():
            passing = ("request_id", "id", "created", "timings") if "checkpoint" in value else ()
            return {k: plain(v) for k, v in value.items() if k not in passing and v is not None}
        case list() | tuple() | bytes():
            return [plain(one) for one in value]
        case _:
            return value


def same(result: Any, raw: Any) -> None:
    assert plain(asdict(result)) == plain(raw)


# Generate


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("def main():", {"max_tokens": 20}),
        ([65, 32, 112], {"max_tokens": 5, "n": 3, "temperature": 0.5, "top_k": 40}),
        (["a", [98, 99]], {"max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}),
        ("abc", {"max_tokens": 4, "logprobs": 3, "echo": True, "stop": ["zzz"]}),
        ("abc", {"max_tokens": 9, "logit_bias": {120: 100.0}, "stop": "xx"}),
        ("abc", {"max_tokens": 9, "stop_token_ids": list(range(99, 256)), "min_tokens": 2}),
    ],
)
def test_generate_and_stream_equal_the_endpoint(
    server: Serving, connect: Connect, prompt: Any, fields: dict[str, Any]
) -> None:
    client = connect(server.url)
    raw = server.generate(prompt, seed=5, **fields)
    generation = client.generate(prompt, seed=5, **fields)
    same(generation, raw)
    assert generation.text == raw["choices"][0]["text"]
    assert generation.timings.tokens_per_second > 0

    with client.stream(prompt, seed=5, **fields) as stream:
        chunks = list(stream)
    same(stream.result(), raw)
    assert stream.text == "".join(chunk.text for chunk in chunks) == generation.text
    assert stream.usage == generation.usage
    assert stream.seed == 5
    assert stream.timings.decode_ms > 0


def test_tokens_have_their_bytes(server: Serving, connect: Connect) -> None:
    (choice,) = connect(server.url).generate("a", max_tokens=8, logprobs=1).choices
    assert choice.tokens is not None
    assert [list(token.bytes) for token in choice.tokens] == [[i] for i in choice.token_ids]


def test_text_of_a_stream_grows(speller: Serving, connect: Connect) -> None:
    with connect(speller.url).stream("a", max_tokens=200, ignore_eos=True) as stream:
        assert stream.text == ""
        texts = []
        for chunk in stream:
            texts.append(chunk.text)
            assert stream.text == "".join(texts)
    ids = spelled("a", 200)
    ring = bytes(i for i in spelled("a", 35) if i < 256).decode()
    assert len(texts) > 1
    assert stream.text.startswith(f"{ring.partition('.')[0]}.<|endoftext|>abc")
    assert stream.result().choices[0].token_ids == tuple(ids)


def test_streams_work_without_a_block(speller: Serving, connect: Connect) -> None:
    stream = connect(speller.url).stream("a", max_tokens=3)
    assert "".join(chunk.text for chunk in stream) == stream.text == "bcd"
    assert connect(speller.url).stream("a", max_tokens=3).result().text == "bcd"


def test_members_of_the_last_chunk_need_the_whole_stream(
    speller: Serving, connect: Connect
) -> None:
    with connect(speller.url).stream(**LONG) as stream:
        next(iter(stream))
        for name in ("usage", "seed", "timings"):
            with pytest.raises(LogitdError, match="has not ended"):
                getattr(stream, name)


# Texts and ids


def test_texts_become_ids_and_back(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    text = "naïve 😀<|endoftext|>"
    one = client.tokenize(text)
    same(one, server.json("/tokenize", {"prompt": text}))
    assert one.tokens == (*"naïve 😀".encode(), 256)
    assert one.count == len(one.tokens)
    assert one.pieces is not None
    assert b"".join(piece.bytes for piece in one.pieces) == text.encode()
    assert client.tokenize(text, pieces=False, special_tokens="text").pieces is None
    back = client.detokenize(one.tokens)
    assert (back.text, back.bytes) == (text, text.encode())
    assert client.detokenize([]).text == ""

    texts = ["a", "", "bc"]
    raw = server.json("/tokenize", {"prompt": texts})
    many = client.tokenize(texts)
    assert [one.tokens for one in many] == [(97,), (), (98, 99)]
    for one, its in zip(many, raw["prompts"], strict=True):
        del its["index"]
        same(one, {**raw, **its} | {"prompts": None})
    lists: list[Any] = [one.tokens for one in many]
    assert [one.text for one in client.detokenize(lists)] == texts
    assert [one.text for one in client.detokenize([[]])] == [""]
    ids: Any = np.array([[97, 98], [99, 100]])
    assert [one.text for one in client.detokenize(ids)] == ["ab", "cd"]
    assert client.detokenize(ids[0]).bytes == b"ab"


def test_tokenizer_info_equals_the_endpoint(server: Serving, connect: Connect) -> None:
    info = connect(server.url).tokenizer_info()
    assert plain(asdict(info)) == plain(server.client.get("/tokenizer_info").json())
    assert info.special_tokens == {"<|endoftext|>": 256}


# Info, health, version


def test_info_health_and_version(server: Serving, connect: Connect) -> None:
    client = connect(server.url)
    info, raw = client.info(), server.client.get("/info").json()
    assert plain(asdict(info)) == plain(raw)
    assert info.limits["context_length"] == 128
    assert client.version() == raw["version"]
    health = client.health()
    assert (health.status, health.ok, health.reason) == ("ok", True, None)


def test_health_answers_while_other_calls_are_refused(
    checkpoint_path: Path, connect: Connect
) -> None:
    with (
        held_loading() as gate,
        serving_app(create_app(serve_settings(checkpoint_path))) as running,
    ):
        client = connect(running.url, max_retries=0)
        assert (client.health().status, client.health().ok) == ("loading", False)
        for call in (client.info, lambda: client.generate("a"), lambda: client.logits("a")):
            with pytest.raises(UnavailableError, match="being loaded") as caught:
                call()
            assert caught.value.retry_after == 1
        gate.set()
        eventually(lambda: client.health().ok)
        assert client.generate("a", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("connect", ["Client"], indirect=True)
@pytest.mark.parametrize(
    ("operation", "summary"),
    [(operation, summary) for operation in OPERATIONS for summary in operation.body.examples],
    ids=lambda one: str(getattr(one, "name", one))[:30],
)
def test_examples_of_the_endpoints_can_be_sent(
    server: Serving, connect: Connect, operation: Operation, summary: str
) -> None:
    body = dict(operation.body.examples[summary])
    client = connect(server.url)
    if body.pop("stream", False) and operation.name == "generate":
        assert client.stream(**body).result().usage.completion_tokens > 0
        return
    given = body.pop("tokens" if operation.name == "detokenize" else "prompt")
    result = getattr(client, operation.name)(given, **body)
    assert all(one.request_id for one in (result if isinstance(result, list) else [result]))
    if operation.form in ("record", "listing"):
        same(result, server.json(operation.path, operation.body.examples[summary]))


# The client itself


def test_address_may_come_from_the_environment(
    speller: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITD_BASE_URL", speller.url)
    monkeypatch.setenv("NO_PROXY", "*")
    with Client() as client:
        assert client.generate("a", max_tokens=3).text == "bcd"
        assert repr(client) == f"Client('{speller.url}')"

    async def main() -> str:
        async with AsyncClient() as client:
            return (await client.generate("a", max_tokens=3)).text

    assert asyncio.run(main()) == "bcd"


def test_longest_timeout_is_accepted(speller: Serving, connect: Connect) -> None:
    assert connect(speller.url, timeout=MAX_TIMEOUT_SECONDS).version() == VERSION


def test_clients_of_the_caller_stay_open(speller: Serving) -> None:
    with httpx.Client(trust_env=False, base_url=speller.url) as http:
        with Client(http=http) as client:
            assert client.version()
        assert not http.is_closed
        assert http.get("/health").status_code == 200
    own = Client(speller.url)
    own.close()
    with pytest.raises(RuntimeError, match="closed"):
        own.version()


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, Any]:
        return {
            name: (list(inspect.signature(value).parameters.values()), bool(value.__doc__))
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith("_")
        }

    assert methods(Client) == methods(AsyncClient)
    assert methods(logitd.Stream) == methods(logitd.AsyncStream)
    with Client("http://a") as client:
        parameters = inspect.signature(client.logits).parameters
    assert list(parameters) == ["prompt", "top_k", "fields"]
