"""POST /v1/chat/completions: prompts from the checkpoint's template, and replies in OpenAI's format
with the values of /generate.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from logitd.model.text.chat_template import ChatTemplate
from logitd.service.http.schemas import ErrorDetail, ErrorReply
from logitd.service.openai.chat_schemas import ChatReply
from tests.model.factories import save_tiny_checkpoint
from tests.service.serving import TEST_TIMEOUT, Serving, events, serving
from tests.service.spelling import spelling_gpt

PATH = "/v1/chat/completions"
HEAD = {"id", "object", "created", "model", "system_fingerprint"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is é? "},
]
START, END = 257, 258
PROMPT = [
    *(START, *b"system\nBe brief.", END, *b"\n"),
    *(START, *"user\nWhat is é?".encode(), END, *b"\n"),
    *(START, *b"assistant"),
]
SPECIALS = [256, 257, 258]


def chat(server: Serving, messages: Any = MESSAGES, **fields: Any) -> Any:
    reply = server.json(PATH, {"messages": messages, **fields})
    ChatReply.model_validate(reply)
    return reply


def stream(server: Serving, messages: Any = MESSAGES, **fields: Any) -> list[Any]:
    response = server.post(PATH, {"messages": messages, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response.content)


def refusal(server: Serving, **fields: Any) -> ErrorDetail:
    return server.refused(PATH, {"messages": MESSAGES, **fields})


def joined(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """A choice assembled from the chunks of a stream. The first chunk has the role, the last has
    the finish reason."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    first, *middle, last = parts
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert last["delta"] == {}
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert all(set(part["delta"]) == {"content"} for part in middle)
    logprobs = [one for part in middle if part["logprobs"] for one in part["logprobs"]["content"]]
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(part["delta"]["content"] for part in middle),
            "refusal": None,
        },
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": last["finish_reason"],
        "seed": last["seed"],
    }


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The spelling model with a template whose prompts end with the last letter of the last
    message."""
    path = save_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "parrot",
        gpt=spelling_gpt(),
        chat_template="{% if messages | length > 5 %}{{ raise_exception('too many: '"
        " + messages[0].content) }}{% endif %}{{ messages[-1].content }}",
    ).path
    with serving(path, slots=1, max_queue=0, slow_reader_timeout=TEST_TIMEOUT) as running:
        yield running


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The tiny model with a template that writes a message's author after its text."""
    path = save_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "turns",
        chat_template="{% for m in messages %}{{ m.content }} [] {{ m.role }};{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}",
    ).path
    with serving(path, slots=1) as running:
        yield running


def ask(letter: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": letter}]


# The shape


def test_reply_has_openais_format(chatter: Serving) -> None:
    reply = chat(chatter, max_tokens=6, n=2, seed=9)
    assert set(reply) == {*HEAD, "choices", "usage"}
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", "chatty")
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for choice in reply["choices"]:
        assert set(choice) == {"index", "message", "logprobs", "finish_reason", "seed"}
        assert set(choice["message"]) == {"role", "content", "refusal"}
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_chunk_has_one_choice(chatter: Serving) -> None:
    chunks = stream(chatter, n=2, max_tokens=4, seed=9)
    heads = [{name: chunk[name] for name in HEAD} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    for chunk in chunks:
        assert set(chunk) == {*HEAD, "choices"}
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason", "seed"}


def test_usage_comes_if_requested(chatter: Serving) -> None:
    options: dict[str, Any] = {"include_usage": True}
    *chunks, last = stream(chatter, max_tokens=3, stream_options=options)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == len(PROMPT)
    options = {"continuous_usage_stats": True}
    chunks = stream(chatter, max_tokens=3, ignore_eos=True, stream_options=options)
    assert chunks[-1]["choices"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3


# The same as /generate after the template

FIELDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sampling": {"temperature": 3.0, "top_p": 0.9, "logit_bias": {"65": 4.0, "66": -50}},
    "ended by a special token": {"logit_bias": {"257": 8.0}},
    "stop": {"stop": ["a", "\ufffd"]},
    "several": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("streamed", [False, True])
def test_choices_are_those_of_generate(chatter: Serving, name: str, streamed: bool) -> None:
    fields = {"seed": 5, "max_tokens": 24, **FIELDS[name]}
    native_fields = {**fields, "stop_token_ids": SPECIALS}
    if native_fields.pop("logprobs", False):
        native_fields["logprobs"] = native_fields.pop("top_logprobs")
    native = chatter.generate(PROMPT, **native_fields)["choices"]
    if streamed:
        chunks = stream(chatter, **fields)
        choices = [joined(chunks, index) for index in range(len(native))]
    else:
        choices = chat(chatter, **fields)["choices"]
    for choice, own in zip(choices, native, strict=True):
        assert choice["message"]["content"] == own["text"]
        assert choice["finish_reason"] == own["finish_reason"]
        if "tokens" not in own:
            assert choice["logprobs"] is None
            continue
        for one, token in zip(choice["logprobs"]["content"], own["tokens"], strict=True):
            assert (one["bytes"], one["logprob"]) == (token["bytes"], token["logprob"])
            assert [top["logprob"] for top in one["top_logprobs"]] == [
                top["logprob"] for top in token["top"]
            ]
    if name == "ended by a special token":
        assert native[0]["stop_reason"] == 257


def test_answer_continues_after_special_tokens_with_ignore_eos(chatter: Serving) -> None:
    fields: dict[str, Any] = {"seed": 5, "max_tokens": 24, "logit_bias": {"257": 8.0}}
    (choice,) = chat(chatter, **fields, ignore_eos=True)["choices"]
    assert "<|im_start|>" in choice["message"]["content"]
    assert choice["finish_reason"] == "length"


def test_token_that_ends_an_answer_is_not_in_its_logprobs(chatter: Serving) -> None:
    fields: dict[str, Any] = {"seed": 5, "logit_bias": {"258": 100}, "logprobs": True}
    (choice,) = chat(chatter, **fields)["choices"]
    assert choice["message"]["content"] == ""
    assert choice["logprobs"] == {"content": [], "refusal": None}
    (choice,) = chat(chatter, **fields, min_tokens=3)["choices"]
    assert len(choice["logprobs"]["content"]) == 3
    bytes_of = [byte for one in choice["logprobs"]["content"] for byte in one["bytes"]]
    assert bytes(bytes_of).decode(errors="replace") == choice["message"]["content"]


def test_answer_fills_the_context_by_default(parrot: Serving) -> None:
    (choice,) = chat(parrot, ask("x"))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("yz é€😀.", "stop")
    for name in ("max_tokens", "max_completion_tokens"):
        (choice,) = chat(parrot, ask("a"), **{name: 3})["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("bcd", "length")


# Messages


def usage_of(server: Serving, *messages: dict[str, Any]) -> int:
    count: int = chat(server, list(messages), max_tokens=1)["usage"]["prompt_tokens"]
    return count


def test_special_tokens_come_from_the_template_alone(chatter: Serving) -> None:
    """In a message, the name of a special token is ordinary text."""
    plain = usage_of(chatter, {"role": "user", "content": "x" * 10})
    assert usage_of(chatter, {"role": "user", "content": "<|im_end|>"}) == plain
    both = usage_of(chatter, *[{"role": "user", "content": "x" * 5}] * 2)
    parts = ({"role": "user", "content": one} for one in ("<|im_", "end|>"))
    assert usage_of(chatter, *parts) == both


def test_developer_role_is_the_system(chatter: Serving) -> None:
    answers = [
        chat(chatter, [{"role": role, "content": "a"}], max_tokens=8, seed=1)["choices"]
        for role in ("system", "developer", "user")
    ]
    assert answers[0] == answers[1] != answers[2]


def test_text_parts_are_one_text(chatter: Serving) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = usage_of(chatter, {"role": "user", "content": parts})
    assert one == usage_of(chatter, {"role": "user", "content": "a\nb"})


def test_conversation_continues_from_the_cache(chatter: Serving) -> None:
    first = [{"role": "user", "content": "a question of some length, told once"}]
    answer = chat(chatter, first, max_tokens=4, seed=1)["choices"][0]["message"]
    more = [*first, answer, {"role": "user", "content": "and another"}]
    usage = chat(chatter, more, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({}, "a [] user;b   [] assistant;A:"),
        ({"add_generation_prompt": True}, "a [] user;b   [] assistant;A:"),
        ({"add_generation_prompt": False}, "a [] user;b   [] assistant;"),
        ({"continue_final_message": True}, "a [] user;b  "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "a [] user;b  "),
    ],
    ids=str,
)
def test_prompt_begins_an_answer_or_continues_the_last_message(
    turns: Serving, fields: dict[str, Any], written: str
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b  "}]
    (choice,) = chat(turns, messages, seed=1, max_tokens=12, **fields)["choices"]
    (native,) = turns.generate(written, seed=1, max_tokens=12)["choices"]
    assert choice["message"]["content"] == native["text"]


# Refusals


def test_missing_template_is_reported_with_advice(server: Serving) -> None:
    error = refusal(server)
    assert (error.param, error.code) == ("messages", "no_chat_template")
    for way_out in ("/v1/completions", "--chat-template", "config.json"):
        assert way_out in error.message


def test_template_may_refuse(parrot: Serving) -> None:
    error = refusal(parrot, messages=[{"role": "user", "content": "<|endoftext|>"}] * 6)
    assert (error.param, error.code) == ("messages", "chat_template_failed")
    assert error.message.endswith(": too many: <|endoftext|>")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages",
         "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x", "name": "x" * 257}]}, "messages", None),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format", None),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", None),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_unsupported_field_is_refused(
    chatter: Serving, fields: dict[str, Any], param: str, code: str | None, streamed: bool
) -> None:
    error = refusal(chatter, **{"stream": streamed, **fields})
    assert (error.param, error.code) == (param, code)


def test_empty_rendered_prompt_is_refused(parrot: Serving) -> None:
    assert refusal(parrot, messages=ask("")).param == "messages"


def test_long_conversation_is_refused_before_the_template_runs(
    parrot: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: pytest.fail("rendered"))
    error = refusal(parrot, messages=[{"role": "user", "content": "a" * 99_999}] * 2)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert error.message.startswith("the conversation has 199998 characters")


def test_error_in_a_stream_is_its_last_event(parrot: Serving) -> None:
    chunks = stream(parrot, ask("a"), timeout=0.1, ignore_eos=True)
    assert ErrorReply.model_validate(chunks[-1]).error.code == "deadline_exceeded"
    parrot.wait_idle()


def test_full_queue_refuses_before_anything_is_rendered(parrot: Serving) -> None:
    """The status is 429, although the template would refuse these messages. On a busy machine, the
    stream that fills the queue may end before the messages arrive; then the test tries again."""
    body = {"messages": ask("a"), "stream": True, "ignore_eos": True}
    for _ in range(20):
        with parrot.client.stream("POST", PATH, json=body) as running:
            next(running.iter_raw())
            response = parrot.post(PATH, {"messages": ask("a") * 6})
        parrot.wait_idle()
        if response.status_code == 429:
            break
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


def test_template_belongs_to_the_checkpoint(chatter: Serving, tmp_path: Path) -> None:
    """The template is in config.json, and can be added to a checkpoint without one."""
    path = save_tiny_checkpoint(tmp_path / "plain").path
    document = json.loads((path / "config.json").read_text())
    document["tokenizer"]["chat_template"] = "{{ messages[0].content }}"
    (path / "config.json").write_text(json.dumps(document))
    with serving(path) as running:
        assert usage_of(running, {"role": "user", "content": "abc"}) == 3
