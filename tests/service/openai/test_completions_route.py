"""POST /v1/completions: OpenAI's exact format, with the values of /generate and of the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.transformer.gpt import GPT
from logitd.service.http.schemas import ErrorDetail, ErrorReply
from logitd.service.openai.schemas import CompletionReply
from tests.service.serving import Serving, events, serving

PATH = "/v1/completions"
PROMPT = "A prompt"
HEAD = {"id", "object", "created", "model", "system_fingerprint"}


def complete(server: Serving, prompt: Any = PROMPT, **fields: Any) -> Any:
    reply = server.json(PATH, {"prompt": prompt, **fields})
    CompletionReply.model_validate(reply)
    return reply


def stream(server: Serving, prompt: Any = PROMPT, **fields: Any) -> list[Any]:
    response = server.post(PATH, {"prompt": prompt, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response.content)


def refusal(server: Serving, **fields: Any) -> ErrorDetail:
    return server.refused(PATH, {"prompt": PROMPT, **fields})


def joined(chunks: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """A choice joined from the chunks of a stream."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    whole: dict[str, Any] = {
        "index": index,
        "text": "".join(part["text"] for part in parts),
        "logprobs": None,
        "finish_reason": parts[-1]["finish_reason"],
        "seed": parts[-1]["seed"],
    }
    if parts[0]["logprobs"] is not None:
        whole["logprobs"] = {
            name: [one for part in parts for one in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return whole


# The shape


def test_reply_has_openais_format(server: Serving) -> None:
    reply = complete(server, [PROMPT, [1, 2]], n=2, max_tokens=6, seed=9)
    assert set(reply) == {*HEAD, "choices", "usage"}
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny")
    sha256 = server.served.checkpoint.weights_sha256
    assert reply["system_fingerprint"] == f"step-7-{sha256[:12]}"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    for choice in reply["choices"]:
        assert set(choice) == {"index", "text", "logprobs", "finish_reason", "seed"}
        assert choice["logprobs"] is None
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(PROMPT) + 2
    assert usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_usage_has_the_cached_tokens(server: Serving) -> None:
    fields: dict[str, Any] = {"prompt": "c" * 70, "max_tokens": 1}
    cached = [complete(server, **fields)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert cached[1] == {"cached_tokens": 64}


# The same as /generate

FIELDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sampling": {"temperature": 3.0, "top_p": 0.9, "frequency_penalty": 2.0,
                 "logit_bias": {"65": 4.0, "66": -50}},
    "stop": {"stop": ["a", "\ufffd"]},
    "stop token": {"stop_token_ids": [147, 186]},
    "without an end": {"ignore_eos": True, "logit_bias": {"256": 30}},
    "several": {"n": 3, "prompt": ["a", [7, 8, 9], "é"]},
    "one list of ids": {"prompt": [1, 2, 3]},
    "echo": {"echo": True, "n": 2},
    "seed": {"seed": 2**63 - 1},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("streamed", [False, True])
def test_choices_are_those_of_generate(server: Serving, name: str, streamed: bool) -> None:
    fields = {"prompt": PROMPT, "seed": 5, "max_tokens": 12, **FIELDS[name]}
    native = server.json("/generate", fields)
    if streamed:
        chunks = stream(server, **fields, stream_options={"include_usage": True})
        choices = [joined(chunks, index) for index in range(len(native["choices"]))]
        usage = chunks[-1]["usage"]
    else:
        reply = complete(server, **fields)
        choices, usage = reply["choices"], reply["usage"]
    found = [(c["index"], c["text"], c["finish_reason"]) for c in choices]
    assert found == [(c["index"], c["text"], c["finish_reason"]) for c in native["choices"]]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counts] == [native["usage"][name] for name in counts]


def test_negative_seed_is_distinct(server: Serving) -> None:
    (choice,) = complete(server, seed=-2, max_tokens=24)["choices"]
    (native,) = server.generate(PROMPT, seed=2**64 - 2, max_tokens=24)["choices"]
    assert (choice["text"], choice["seed"]) == (native["text"], -2)
    assert choice["text"] != complete(server, seed=2, max_tokens=24)["choices"][0]["text"]


def test_max_tokens_defaults_to_sixteen(speller: Serving) -> None:
    for fields in ({}, {"max_tokens": None}):
        (choice,) = complete(speller, "a", **fields)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("bcdefghijklmnopq", "length")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stop", ["def", ["xyz", "gh", "hi"], "b", "é", "€"])
def test_stop_strings_cut_text_and_lists(speller: Serving, stop: Any, streamed: bool) -> None:
    fields: dict[str, Any] = {"stop": stop, "max_tokens": 60, "logprobs": 0}
    (native,) = speller.generate("a", **fields)["choices"]
    choice = (
        joined(stream(speller, "a", **fields)) if streamed
        else complete(speller, "a", **fields)["choices"][0]
    )  # fmt: skip
    assert (choice["text"], choice["finish_reason"]) == (native["text"], "stop")
    assert choice["logprobs"]["tokens"] == [
        chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in native["text"].encode()
    ]


# Logprobs


def prompt_logprobs(gpt: GPT, ids: Sequence[int]) -> list[float | None]:
    """Logprobs of the tokens of a prompt, computed with the plain forward pass. The first token has
    none."""
    rows = gpt(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return [None, *(rows[i, ids[i + 1]].item() for i in range(len(ids) - 1))]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["a", "\ufffd"]}], ids=str)
def test_logprobs_are_those_of_generate(
    server: Serving, fields: dict[str, Any], streamed: bool
) -> None:
    fields = {"prompt": [PROMPT, [200, 201]], "n": 2, "seed": 5, "max_tokens": 20, "logprobs": 3,
              **fields}  # fmt: skip
    native = server.json("/generate", fields)
    if streamed:
        chunks = stream(server, **fields)
        choices = [joined(chunks, index) for index in range(4)]
    else:
        choices = complete(server, **fields)["choices"]
    for choice, own in zip(choices, native["choices"], strict=True):
        lists, count = choice["logprobs"], len(choice["logprobs"]["tokens"])
        assert {len(each) for each in lists.values()} == {count}
        tokens = own["tokens"][:count]
        assert fields.get("stop") or count == len(own["tokens"])
        assert lists["token_logprobs"] == [token["logprob"] for token in tokens]
        for name, value, top, token in zip(
            lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], tokens, strict=True
        ):
            assert len(name) == 1 or name in (f"bytes:\\x{token['id']:02x}", "<|endoftext|>")
            if value is None:
                assert top is None
                continue
            assert top[name] == value, "the very same number"
            ranked = sorted(top.values(), reverse=True)
            assert ranked[:3] == [one["logprob"] for one in token["top"]]
            assert len(top) == (3 if token["rank"] <= 3 else 4)


def test_lm_eval_scoring_call_is_answered(server: Serving, gpt: GPT) -> None:
    """The call sends prompts as ids, sets `echo`, and requests one token after each prompt.
    Logprobs are listed by position; a token counts as greedy if its logprob is the largest at its
    position."""
    prompts = [[72, 105, 32, 116, 104, 101], [1, 2, 3, 200, 201], [256, 9, 9, 9]]
    (likely,) = server.generate([72, 105, 32], max_tokens=3, temperature=0)["choices"]
    prompts.append([72, 105, 32, *likely["token_ids"]])
    reply = complete(
        server, prompts, model="tiny", max_tokens=1, temperature=0, logprobs=1, seed=1234, echo=True
    )
    found = set()
    for ids, choice in zip(prompts, reply["choices"], strict=True):
        lists = choice["logprobs"]
        values, tops = lists["token_logprobs"], lists["top_logprobs"]
        assert len(values) == len(tops) == len(ids) + 1
        assert values[:-1] == pytest.approx(prompt_logprobs(gpt, ids), abs=1e-4)
        rows = gpt(torch.tensor([ids])).logits[0]
        for place in range(1, len(ids)):
            is_greedy = values[place] == max(tops[place].values())
            assert is_greedy == (int(rows[place - 1].argmax()) == ids[place])
            found.add(is_greedy)
    assert found == {True, False}


def test_stop_token_is_in_the_lists_but_not_in_the_text(speller: Serving) -> None:
    """lm-eval expects one entry more than the prompt has tokens, and removes the last entry."""
    (choice,) = complete(speller, ".", max_tokens=1, logprobs=1, echo=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (".", "stop")
    assert choice["logprobs"]["tokens"] == [".", "<|endoftext|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["Hello é", [200, 201, 65], ["a", [195]], "."])
def test_prompt_is_scored_without_generating(server: Serving, prompt: Any, streamed: bool) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "temperature": 0, "n": 2}
    one_more = complete(server, prompt, max_tokens=1, **fields)
    count = len(one_more["choices"])
    if streamed:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        chunks = stream(server, prompt, max_tokens=0, **fields)
        choices = [joined(chunks, index) for index in range(count)]
        assert all(chunk["usage"]["completion_tokens"] == 0 for chunk in chunks)
        usage = chunks[-1]["usage"]
    else:
        reply = complete(server, prompt, max_tokens=0, **fields)
        choices, usage = reply["choices"], reply["usage"]
    for choice, more in zip(choices, one_more["choices"], strict=True):
        lists = more["logprobs"]
        assert choice["logprobs"] == {name: values[:-1] for name, values in lists.items()}
        assert choice["finish_reason"] == "length"
        prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
        own = prompts[choice["index"] // 2]
        raw = own.encode() if isinstance(own, str) else bytes(own)
        assert choice["text"] == raw.decode(errors="replace")
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] == one_more["usage"]["prompt_tokens"]


# Streams


def test_chunk_has_one_choice_and_the_shape_of_the_reply(server: Serving) -> None:
    chunks = stream(server, [PROMPT, "more"], n=2, max_tokens=5, seed=5)
    heads = [{name: chunk[name] for name in HEAD} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["id"].startswith("cmpl-")
    for chunk in chunks:
        assert set(chunk) == {*HEAD, "choices"}
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "text", "logprobs", "finish_reason", "seed"}
        assert choice["text"] or choice["finish_reason"], "it says something"
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}


def test_usage_comes_last_if_requested(server: Serving) -> None:
    for options in ({}, {"include_usage": False}, None):
        chunks = stream(server, max_tokens=3, stream_options=options)
        assert all("usage" not in chunk for chunk in chunks)
    *chunks, last = stream(server, max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert set(last["usage"]) == {
        *("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    }


@pytest.mark.parametrize("last", [False, True])
def test_continuous_usage_is_in_every_chunk(speller: Serving, last: bool) -> None:
    options = {"include_usage": last, "continuous_usage_stats": True}
    chunks = stream(speller, "a", max_tokens=8, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)
    assert (chunks[-1]["choices"] == []) == last


def test_error_in_a_stream_is_its_last_event(speller: Serving) -> None:
    chunks = stream(speller, "a", timeout=0.1, max_tokens=8000, ignore_eos=True)
    assert ErrorReply.model_validate(chunks[-1]).error.code == "deadline_exceeded"
    assert all(chunk["object"] == "text_completion" for chunk in chunks[:-1])
    speller.wait_idle()


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": "x" * 129, "max_tokens": 0, "echo": True}, "prompt"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 258}, "logprobs"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"echo": True, "logprobs": 1, "logprobs_stage": "processed"}, "echo"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_unsupported_field_is_refused(
    server: Serving, fields: dict[str, Any], param: str | None, streamed: bool
) -> None:
    """A refused stream has the same status and sends no event."""
    assert refusal(server, **{"stream": streamed, **fields}).param == param


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "json_schema"}},
         "response_format.json_schema must be set if type is 'json_schema'"),
        ({"response_format": {"type": "text", "schema": {}}},
         "response_format.schema requires the type 'json_object'"),
        ({"structured_outputs": {"whitespace_pattern": "x", "regex": "a"}},
         "structured_outputs.whitespace_pattern is not supported; leave it out or send null"),
        *(
            ({"structured_outputs": outputs},
             "structured_outputs has no constraint; give one of json, regex, choice, grammar and "
             "json_object, or leave it out")
            for outputs in ({}, {"json": None}, {"json_object": False})
        ),
    ],
)  # fmt: skip
def test_message_names_a_nested_field_once(
    server: Serving, fields: dict[str, Any], said: str
) -> None:
    assert refusal(server, **fields).message.startswith(said)


@pytest.mark.parametrize("streamed", [False, True])
def test_max_tokens_beyond_the_context_ends_with_it(server: Serving, streamed: bool) -> None:
    context = server.served.checkpoint.config.context_length
    fields: dict[str, Any] = {"max_tokens": 10 * context, "ignore_eos": True, "seed": 1}
    if streamed:
        fields["stream_options"] = {"include_usage": True}
        *_, choice, usage = stream(server, "ab", **fields)
        reason, counted = choice["choices"][0]["finish_reason"], usage["usage"]
    else:
        reply = complete(server, ["ab", "abcd"], **fields)
        assert [c["finish_reason"] for c in reply["choices"]] == ["length"] * 2
        reply = complete(server, "ab", **fields)
        reason, counted = reply["choices"][0]["finish_reason"], reply["usage"]
    assert (reason, counted["total_tokens"]) == ("length", context)
    refused = server.post("/generate", {"prompt": "ab", "max_tokens": 10 * context})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_unknown_model_names_may_be_allowed(checkpoint_path: Path) -> None:
    with serving(checkpoint_path, any_model_name=True) as running:
        for name in ("gpt-4o-mini", "default", "", None):
            assert complete(running, model=name, max_tokens=1)["model"] == "tiny"
        assert running.client.get("/v1/models/gpt-4o-mini").json()["id"] == "tiny"
