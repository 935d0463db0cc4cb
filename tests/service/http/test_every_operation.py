"""Properties of every operation over HTTP."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
from pydantic import TypeAdapter

from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.operations.body import Examples, PromptBody, PromptReply, Reply, TokenId
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Operation, Planning, Record, Subject, new_id
from logitd.model.operations.prompts import encode_all
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.application.app import create_app
from logitd.service.http import endpoint
from tests.service.http.asking import BY_NAME, PROMPT, SMALLEST, npy
from tests.service.serving import (
    Serving,
    eventually,
    serve_settings,
    serving,
    serving_app,
    statuses_in_a_row,
)

QUEUED = [name for name, operation in BY_NAME.items() if operation.form != "vocabulary"]
STREAMED = ("outputs", "listing")
"""Forms of replies that are written in pieces, or in a thread."""
WITH_PROMPTS = [
    name for name in BY_NAME if name not in ("sweep", "detokenize") and "prompt" in SMALLEST[name]
]


@pytest.mark.parametrize("name", BY_NAME)
def test_reply_fits_its_schema_and_names_the_weights(server: Serving, name: str) -> None:
    operation = BY_NAME[name]
    bodies: Sequence[Mapping[str, Any]] = [SMALLEST[name]]
    if operation.form == "vocabulary":  # replies to several texts differ
        bodies = [SMALLEST[name], {key: [value] for key, value in SMALLEST[name].items()}]
    for body in bodies:
        response = server.post(operation.path, body)
        assert response.status_code == 200, response.text
        timed = operation.form in ("record", "completions")
        assert ("prefill;dur=" in response.headers.get("server-timing", "")) == timed
        reply = response.json()
        TypeAdapter(operation.reply).validate_python(reply)
        assert reply["id"].startswith(f"{operation.reply_id}-")
        assert reply["model"] == reply["checkpoint"]["name"] == "tiny"
        assert (reply["checkpoint"]["step"], reply["checkpoint"]["val_loss"]) == (7, 2.5)
        sha256 = server.served.checkpoint.weights_sha256
        assert reply["checkpoint"]["weights_sha256"] == sha256


@pytest.mark.parametrize("name", [name for name in BY_NAME if BY_NAME[name].form not in STREAMED])
def test_operation_writes_a_whole_reply_off_the_event_loop(
    server: Serving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    dumps = orjson.dumps

    def watched(value: Any, *args: Any, **options: Any) -> bytes:
        if isinstance(value, dict) and "checkpoint" in value:
            threads.append(threading.current_thread().name)
        return dumps(value, *args, **options)

    monkeypatch.setattr(orjson, "dumps", watched)
    listed = {"logprobs": 1} if name == "generate" else {}
    server.json(BY_NAME[name].path, {**SMALLEST[name], **listed})
    assert threads
    assert "uvicorn" not in threads


@pytest.mark.parametrize("name", WITH_PROMPTS)
@pytest.mark.parametrize(("length", "on_loop"), [(4, True), (600, False)])
def test_only_short_texts_are_encoded_on_the_event_loop(
    server: Serving, monkeypatch: pytest.MonkeyPatch, name: str, length: int, on_loop: bool
) -> None:
    threads: list[str] = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    server.post(f"/{name}", {**SMALLEST[name], "prompt": "ab" * (length // 2)})
    assert threads
    assert ("uvicorn" in threads) == (on_loop and BY_NAME[name].form != "vocabulary")


@pytest.mark.parametrize("name", BY_NAME)
def test_request_may_name_the_model(server: Serving, name: str) -> None:
    assert server.json(f"/{name}", {**SMALLEST[name], "model": "tiny"})["model"] == "tiny"
    error = server.refused(f"/{name}", {**SMALLEST[name], "model": "gpt-4"}, 404)
    assert (error.param, error.code) == ("model", "model_not_found")
    assert "not served here, 'tiny' is" in error.message


@pytest.mark.parametrize("path", [*(each.path for each in BY_NAME.values()), "/v1/completions"])
def test_events_need_stream_and_not_accept(server: Serving, path: str) -> None:
    body = SMALLEST.get(path[1:], {"prompt": PROMPT, "max_tokens": 1})
    error = server.refused(path, body, 406, Accept="text/event-stream, application/json;q=0")
    streams = path in ("/generate", "/sweep", "/v1/completions")
    assert ('text/event-stream with "stream": true' in error.message) == streams
    error = server.refused(path, body, Accept="application/json;q=high")
    assert "q=high; weights range from 0 to 1" in error.message
    if streams:  # OpenAI's clients accept JSON and ask for a stream
        response = server.post(path, {**body, "stream": True}, Accept="application/json;q=0.5")
        assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("name", QUEUED)
def test_timeout_is_504(server: Serving, name: str) -> None:
    error = server.refused(f"/{name}", {**SMALLEST[name], "timeout": 1e-9}, 504)
    assert (error.type, error.code) == ("timeout_error", "deadline_exceeded")
    server.wait_idle()


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_prompt_among_many_has_the_same_reply(server: Serving, name: str) -> None:
    given = {**SMALLEST[name], **({"seed": 1} if name == "generate" else {})}
    prompts = [PROMPT, "x", "€" if name == "tokenize" else [256, 3]]
    member = "choices" if name == "generate" else "prompts"
    together = server.json(f"/{name}", {**given, "prompt": prompts})[member]
    assert [one["index"] for one in together] == [0, 1, 2]
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = server.json(f"/{name}", {**given, "prompt": [prompt]})[member]
        own = ("index", "prompt_index")
        assert {key: value for key, value in found.items() if key not in own} == {
            key: value for key, value in alone.items() if key not in own
        }


@pytest.mark.parametrize("name", [name for name in QUEUED if name != "generate"])
def test_other_operations_generate_nothing(server: Serving, name: str) -> None:
    before = server.sample("logitd_generation_tokens_total")
    server.json(f"/{name}", SMALLEST[name])
    assert server.sample("logitd_generation_tokens_total") == before


# The largest reply

ALL = {"positions": "all"}
LARGE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("generate", {"n": 2, "max_tokens": 10, "logprobs": 4}, {"logprobs": 5},
     "120 logprobs, but the limit is 100 (64 elements each, all prompts and completions together)"),
    ("generate", {"max_tokens": 10, "logprobs": 4}, {"n": 3}, "150 logprobs"),
    ("generate", {"prompt": "x" * 78, "max_tokens": None, "logprobs": 1}, {"logprobs": 2},
     "150 logprobs"),
    ("probs", {"prompt": ["a"] * 5, "top_k": 20}, {"top_k": 21}, "105 logprobs"),
    ("probs", {"prompt": ["a"] * 5, "token_ids": [1] * 20}, {"token_ids": [1] * 21}, "105 log"),
    ("logits", {"prompt": "a", "top_k": 100}, {"top_k": 101}, "101 logprobs"),
    ("score", {"prompt": "x" * 50}, {"logprobs": 5}, "300 logprobs, but the limit is 100"),
    ("lens", {**ALL, "layers": [0], "top_k": 1}, {"top_k": 2}, "118 logprobs"),
    ("attributions", {"prompt": "x" * 100}, {"prompt": ["x" * 100, "y"]},
     "101 tokens and parts, but the limit is 100"),
    ("attributions", {"prompt": "x" * 74}, {"methods": ["direct"]}, "101 tokens and parts"),
    ("circuit", {"max_parts": 60, "max_edges": 40}, {"max_edges": 41}, "101 parts and edges"),
    ("hidden_states", {"prompt": "x" * 50, **ALL}, {"prompt": ["x" * 50] * 2}, "12800 elements"),
    ("attention", {"prompt": "x" * 32, **ALL, "dtype": "float16"}, {"dtype": "float32"},
     "12288 elements, but the limit is 6400"),
    ("activations", {"prompt": "x" * 128, **ALL}, {"stages": ["embedding", "blocks.0.output"]},
     "8192 elements"),
]  # fmt: skip
"""An operation, fields with which its reply just fits, fields that make the reply too large, and
part of the error message."""


@pytest.fixture(scope="module")
def small(checkpoint_path: Path) -> Iterator[Serving]:
    with serving(checkpoint_path, slots=2, max_reply_elements=100 * 64) as running:
        yield running


@pytest.mark.parametrize(("name", "fits", "more", "said"), LARGE)
def test_too_large_reply_is_refused_with_both_sizes(
    small: Serving, name: str, fits: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    body = {**SMALLEST[name], **fits}
    assert small.post(f"/{name}", body).status_code == 200
    assert statuses_in_a_row(small, f"/{name}", body, body) == [200, 200], (
        "the budget is free again"
    )
    error = small.refused(f"/{name}", {**body, **more})
    assert said in error.message
    assert "--max-reply-elements" in error.message
    eventually(lambda: small.served.reply_budget.used == 0)


@pytest.mark.parametrize("name", ["generate", "probs", "sweep"])
def test_readings_are_bounded_as_replies_are(small: Serving, name: str) -> None:
    """Interventions that read other prompts are bounded too. Otherwise, a small request could read
    gigabytes of activations."""

    def reads(prompt: str) -> dict[str, Any]:
        change = {"stage": "blocks.*.output", "operation": "add", "positions": [-1],
                  "from": {"prompt": prompt, "positions": "all"}}  # fmt: skip
        field = {"vary": change} if name == "sweep" else {"interventions": [change]}
        return {**SMALLEST[name], **field}

    error = small.refused(f"/{name}", reads("x" * 67))
    assert error.param == "interventions"
    assert "6432 elements, but the limit is 6400" in error.message
    assert small.post(f"/{name}", reads("x" * 66)).status_code == 200


# A new operation in a single file


class RankRequest(PromptBody):
    """Ranks of given tokens among all candidates for the next token."""

    examples: ClassVar[Examples] = {"One token": {"prompt": "a", "token_ids": [1]}}

    token_ids: list[TokenId]


class PromptRanks(PromptReply):
    ranks: list[int]


class RankReply(Reply):
    prompts: list[PromptRanks]


def plan(body: RankRequest, subject: Subject) -> Planning:
    yield from ()
    requests = [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=prompt,
            positions=(len(prompt) - 1,),
            output=Logits(),
        )
        for prompt in encode_all(body.prompts, "prompt", subject)
    ]
    subject.check_listed(len(requests) * len(body.token_ids), "ranks", "token_ids")

    def reply(computed: Computed) -> dict[str, Any]:
        rows = [computed.rows[request.request_id][0] for request in requests]
        ranks = [[int((row > row[i]).sum()) + 1 for i in body.token_ids] for row in rows]
        prompts = [
            {"index": index, "token_ids": request.token_ids, "ranks": ranks[index]}
            for index, request in enumerate(requests)
        ]
        return {"prompts": prompts}

    return Record(requests, reply)


RANK = Operation("rank", RankRequest, RankReply, plan, "record", "Ranks", "")


def test_operation_is_one_file(checkpoint_path: Path) -> None:
    """From this one file, the service derives the route of the operation, its refusals, its
    deadline, its choice of a model and the limits on its replies."""
    app = create_app(serve_settings(checkpoint_path, max_reply_elements=100 * 64))
    app.router.routes[:0] = endpoint.router([RANK]).routes
    with serving_app(app) as running:
        eventually(lambda: running.state.status() == ("ok", None))
        ids = [5, 200, 256]
        reply = RankReply.model_validate(
            running.json("/rank", {"prompt": ["x", PROMPT], "token_ids": ids})
        )
        assert reply.id.startswith("rank-")
        row = npy(running, "/logits")[0]
        order = sorted(range(len(row)), key=lambda token_id: -row[token_id])
        assert reply.prompts[1].ranks == [order.index(token_id) + 1 for token_id in ids]
        for fields, status, param, said in (
            ({}, 400, "token_ids", "token_ids is required"),
            ({"token_ids": [1], "promt": "a"}, 400, "promt", "did you mean 'prompt'?"),
            ({"token_ids": [1] * 101}, 400, "token_ids", "101 ranks, but the limit is 100"),
            ({"token_ids": [1], "prompt": [999]}, 400, "prompt", "vocabulary of 257 ids"),
            ({"token_ids": [1], "model": "b"}, 404, "model", "'tiny' is"),
            ({"token_ids": [1], "timeout": 1e-9}, 504, "timeout", "expired"),
        ):
            error = running.refused("/rank", {"prompt": "x", **fields}, status)
            assert error.param == param
            assert said in error.message
