"""The official client, `openai`, against a real server: sync and async, one reply and streams, all
forms of a prompt, its exceptions and its retries.
"""

import codecs
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.service.serving import TEST_TIMEOUT, Serving, engine_of, eventually, occupy, serving

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is é?"}]


def client(server: Serving, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=TEST_TIMEOUT, **settings)


@pytest.fixture
def tiny(server: Serving) -> Iterator[openai.OpenAI]:
    with client(server) as one:
        yield one


@pytest.fixture
def chatty(chatter: Serving) -> Iterator[openai.OpenAI]:
    with client(chatter) as one:
        yield one


@pytest.fixture
def narrow(spelling_path: Path) -> Iterator[Serving]:
    """A server with one slot and no queue."""
    with serving(spelling_path, slots=1, max_queue=0, slow_reader_timeout=TEST_TIMEOUT) as running:
        yield running


def answered(server: Serving, status: int) -> float:
    return server.sample(
        "logitd_http_requests_total", endpoint="/v1/completions", status=str(status)
    )


# Completions


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]])
def test_every_form_of_a_prompt_equals_generate(
    tiny: openai.OpenAI, server: Serving, prompt: Any
) -> None:
    reply = tiny.completions.create(model="tiny", prompt=prompt, n=2, seed=3, max_tokens=8)
    native = server.generate(prompt, n=2, seed=3, max_tokens=8)
    assert [choice.text for choice in reply.choices] == [c["text"] for c in native["choices"]]
    assert [choice.index for choice in reply.choices] == list(range(len(native["choices"])))
    assert reply.usage is not None
    assert reply.usage.total_tokens == native["usage"]["total_tokens"]
    Completion.model_validate(reply.model_dump(), strict=True)


def test_every_field_of_the_client_is_understood(tiny: openai.OpenAI) -> None:
    reply = tiny.completions.create(
        model="tiny",
        prompt="ab",
        best_of=2,
        echo=False,
        frequency_penalty=0.5,
        logit_bias={"65": 5},
        logprobs=5,
        max_tokens=4,
        n=2,
        presence_penalty=-0.5,
        seed=-3,
        stop=["\n", "x"],
        stream=False,
        suffix="",
        temperature=0.7,
        top_p=0.9,
        user="me",
        extra_body={"top_k": 5, "min_p": 0.01, "ignore_eos": True, "timeout": 60},
    )
    assert len(reply.choices) == 2


def test_models_are_listed_and_retrieved(tiny: openai.OpenAI) -> None:
    assert [model.id for model in tiny.models.list()] == ["tiny"]
    assert tiny.models.retrieve("tiny").owned_by == "logitd"
    with pytest.raises(openai.NotFoundError):
        tiny.models.retrieve("gpt-4")


# Chat


def test_chat_equals_the_messages_of_the_endpoint(chatty: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "chatty", "messages": MESSAGES, "seed": 3, "max_tokens": 9}
    reply = chatty.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    (choice,) = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    raw = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    # Bytes of a character that max_tokens cuts are held back.
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)
    assert whole == choice.message.content
    text, roles, reasons = "", [], []
    for chunk in chatty.chat.completions.create(**fields, stream=True):
        (delta,) = chunk.choices
        text += delta.delta.content or ""
        roles.append(delta.delta.role)
        reasons.append(delta.finish_reason)
    assert text == choice.message.content
    assert roles == ["assistant", *[None] * (len(roles) - 1)]
    assert reasons == [*[None] * (len(reasons) - 1), choice.finish_reason]


def test_chat_stream_helper_works(chatty: openai.OpenAI) -> None:
    """The helper of `openai` joins chunks by its own rules, which the server's chunks must
    satisfy."""
    fields: dict[str, Any] = {
        "model": "chatty",
        "messages": MESSAGES,
        "seed": 3,
        "logprobs": True,
        "logit_bias": {"258": 50},  # a special token ends it
        "extra_body": {"min_tokens": 5},
    }
    with chatty.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    (whole,) = chatty.chat.completions.create(**fields).choices
    assert final.message.content == whole.message.content
    assert (final.finish_reason, final.logprobs) == ("stop", whole.logprobs)
    assert whole.logprobs is not None
    assert len(whole.logprobs.content or ()) == 5


# Errors


def test_bad_request_is_raised(tiny: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as caught:
        tiny.completions.create(model="tiny", prompt="a", suffix="b")
    assert (caught.value.param, caught.value.type) == ("suffix", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.completions.create(model="tiny", prompt="a" * 500)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "no_chat_template"


def test_full_queue_is_retried_after_the_given_time(narrow: Serving) -> None:
    """By default the client retries twice, then raises an exception."""
    with client(narrow) as http:
        with ExitStack() as stack:
            occupy(narrow, stack)
            started = time.monotonic()
            with pytest.raises(openai.RateLimitError) as caught:
                http.completions.create(model="spelling", prompt="a", max_tokens=3)
            waited = int(caught.value.response.headers["retry-after"])
            assert time.monotonic() - started >= 2 * waited >= 2
        assert caught.value.code == "queue_full"
        assert answered(narrow, 429) == 3
        narrow.wait_idle()
        assert http.completions.create(model="spelling", prompt="a", max_tokens=3).choices


def break_the_model(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next steps of the engine raise, as if out of memory."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine_of(server)._runner, "run", fail)


def test_request_that_breaks_the_engine_is_not_sent_again(
    narrow: Serving,
    monkeypatch: pytest.MonkeyPatch,
    logged_errors: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    break_the_model(narrow, monkeypatch)
    with client(narrow) as http, pytest.raises(openai.InternalServerError) as caught:
        http.completions.create(model="spelling", prompt="a")
    assert caught.value.code == "engine"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert answered(narrow, 500) == 1
    # The engine logs the reason under an id of its own, which the line of the request names.
    eventually(lambda: "failed=" in caplog.text)
    failed = caplog.text.rpartition("failed=")[2].split()[0]
    assert any(f"engine request {failed}: the model failed" in line for line in logged_errors)
    logged_errors.clear()


def test_error_in_a_stream_is_raised(
    narrow: Serving, monkeypatch: pytest.MonkeyPatch, logged_errors: list[str]
) -> None:
    with client(narrow) as http:
        chunks = iter(http.completions.create(
            model="spelling", prompt="a", max_tokens=8000, stream=True,
            extra_body={"ignore_eos": True},
        ))  # fmt: skip
        assert next(chunks).choices[0].text
        break_the_model(narrow, monkeypatch)
        with pytest.raises(openai.APIError, match="the engine failed on this request") as caught:
            for _ in chunks:
                pass
    assert caught.value.code == "engine"
    logged_errors.clear()
