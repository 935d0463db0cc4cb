"""Overload: requests that do not fit get 429 at once; every accepted one is answered."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from logitd.model.inference.constraints.compiler import Source
from logitd.model.operations.prompts import encode_text
from logitd.model.plural import pluralize
from logitd.service.engine.admission import Limit, QueueFull
from logitd.service.engine.session import EngineSession
from logitd.service.engine.submission import Submission
from logitd.service.http import sse
from logitd.service.http.schemas import ErrorReply
from logitd.service.models.constraints import Constraints
from tests.service.serving import (
    TEST_TIMEOUT,
    Poster,
    Serving,
    dechunked,
    error_of,
    events,
    eventually,
    occupy,
    occupy_elements,
    read_all,
    read_chunks,
    read_until,
    request_bytes,
    serving,
)
from tests.service.spelling import CONTEXT_LENGTH, long_prompt, spelled

POSTS: dict[str, Any] = {
    "/generate": {"prompt": "a", "max_tokens": 5},
    "/logits": {"prompt": "a"},
    "/probs": {"prompt": "a"},
    "/v1/completions": {"prompt": "a"},
}

ELEMENTS_LEFT = 10 * 257
"""Elements for which the queue has room after `occupy_elements`: ten rows of logits."""
LARGE: dict[str, tuple[Any, int]] = {
    "/logits": ({"prompt": "l" * 11, "positions": "all", "token_ids": [1]}, 11 * 257),
    "/probs": ({"prompt": ["p"] * 11}, 11 * 257),
    "/score": ({"prompt": "s" * 12}, 11 * 257),
    "/hidden_states": ({"prompt": "h" * 21, "positions": "all"}, 21 * 2 * 64),
    "/attention": ({"prompt": "a" * 36, "positions": "all"}, 36 * 2 * 36),
    "/generate": ({"prompt": "g" * 12, "max_tokens": 1, "prompt_logprobs": 0}, 11 * 257),
    "/v1/completions": (
        {"prompt": "c" * 12, "max_tokens": 0, "echo": True, "logprobs": 0},
        11 * 257,
    ),
}
"""Small requests, each with the number of elements that it needs, which is more than
ELEMENTS_LEFT."""


@pytest.fixture
def server(spelling_path: Path) -> Iterator[Serving]:
    """A server with one slot and a queue of two."""
    with serving(spelling_path, slots=1, max_queue=2, slow_reader_timeout=TEST_TIMEOUT) as running:
        yield running


def queue_full(response: httpx.Response, reason: str = ", limit 2") -> None:
    assert response.status_code == 429, response.text
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = ErrorReply.model_validate(response.json()).error
    assert (error.type, error.code) == ("rate_limit_error", "queue_full")
    assert re.search(reason, error.message)
    assert f"try again in about {response.headers['retry-after']} s" in error.message


def test_full_queue_rejects_before_encoding_but_answers_accepted_requests(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    def encode(text: str, *rest: Any, **named: Any) -> list[int]:
        encoded.append(text)
        return encode_text(text, *rest, **named)

    monkeypatch.setattr("logitd.model.operations.prompts.encode_text", encode)
    with ExitStack() as stack:
        occupy(server, stack)
        accepted = Poster(server.url, "/generate", {"prompt": "a", "n": 2, "max_tokens": 5})
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == 2)
        encoded.clear()
        for path, body in POSTS.items():
            queue_full(server.post(path, body))
        queue_full(server.post("/generate", POSTS["/generate"] | {"stream": True}))
        assert encoded == [], "encoding would be a waste of time"
        assert server.client.get("/health").status_code == 200
    choices = accepted.response().json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [spelled("a", 5)] * 2
    server.wait_idle()
    for path, body in POSTS.items():
        assert server.post(path, body).status_code == 200
    assert answered(server, 429) == 2
    assert encoded


def test_request_keeps_its_place_during_compilation(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests are rejected during the compilation."""
    compiling, go_on = threading.Event(), threading.Event()
    tried = Constraints._try

    async def try_later(constraints: Constraints, source: Source) -> None:
        compiling.set()
        assert await asyncio.to_thread(go_on.wait, TEST_TIMEOUT)
        await tried(constraints, source)

    monkeypatch.setattr(Constraints, "_try", try_later)
    with ExitStack() as stack:
        occupy(server, stack)
        body = {"prompt": "a", "n": 2, "max_tokens": 5, "regex": "[a-z]{3}"}
        accepted = Poster(server.url, "/generate", body)
        assert compiling.wait(TEST_TIMEOUT)
        queue_full(server.post("/generate", POSTS["/generate"]))
        go_on.set()
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == 2)
    choices = accepted.response().json()["choices"]
    assert [len(choice["text"]) for choice in choices] == [3, 3]
    server.wait_idle()


def test_later_prompts_of_a_reply_have_room_from_the_start(spelling_path: Path) -> None:
    """A reply that has begun is completed even if the queue is full."""
    with (
        serving(spelling_path, slots=2, max_queue=1, slow_reader_timeout=TEST_TIMEOUT) as server,
        server.connect(receive_buffer=4096) as raw,
    ):
        body = {"prompt": [long_prompt(4000), "a", "b"], "positions": "all", "token_ids": [98, 99]}
        whole = {"prompt": [long_prompt(4000), "a", "b"], "positions": "all"}
        raw.sendall(request_bytes("/logits", whole, "Connection: close"))
        eventually(lambda: server.sample("logitd_kv_slots_used") == 1)
        refused = server.post("/probs", {"prompt": "a"})
        assert refused.status_code == 429, "two slots and a queue of one are taken"
        reply = orjson.loads(b"".join(read_chunks(raw)))
        assert [len(prompt["logits"]) for prompt in reply["prompts"]] == [4000, 1, 1]
        server.wait_idle()
        assert server.post("/logits", body).status_code == 200


@pytest.fixture
def elements_server(spelling_path: Path) -> Iterator[Serving]:
    """A server with room for the elements of `occupy_elements` and ELEMENTS_LEFT."""
    with serving(
        spelling_path,
        slots=4,
        max_queue_elements=8000 * 257 + ELEMENTS_LEFT,
        slow_reader_timeout=TEST_TIMEOUT,
    ) as running:
        yield running


def test_queue_full_of_elements_rejects_outputs_only(elements_server: Serving) -> None:
    server = elements_server
    with ExitStack() as stack:
        occupy_elements(server, stack)
        assert server.sample("logitd_queue_elements") == 8000 * 257
        for path, (body, elements) in LARGE.items():
            queue_full(
                server.post(path, body),
                f"{8000 * 257} output elements .* {elements} requested, limit "
                f"{8000 * 257 + ELEMENTS_LEFT}; try again",
            )
        assert server.sample("logitd_queue_elements") == 8000 * 257
        just_fits = {"prompt": "l" * 10, "positions": "all"}
        assert server.post("/logits", just_fits).status_code == 200
        # Logprobs of generated tokens are no outputs.
        body = {"prompt": "a" * 500, "max_tokens": 60, "ignore_eos": True, "logprobs": 5, "n": 4}
        streamed = server.post("/generate", body | {"stream": True})
        ids = [c["token_ids"] for chunk in events(streamed.content) for c in chunk["choices"]]
        assert sum(map(len, ids)) == 4 * 60
        whole = server.generate(**body)["choices"]
        assert [choice["token_ids"] for choice in whole] == [spelled("a", 60)] * 4
    server.wait_idle()
    for path, (body, _) in LARGE.items():
        assert server.post(path, body).status_code == 200, path
    server.wait_idle()


def test_request_larger_than_the_queue_is_invalid(elements_server: Serving) -> None:
    """The status is 400, so that clients do not retry."""
    limit = 8000 * 257 + ELEMENTS_LEFT
    for path, body, elements in (
        ("/logits", {"prompt": long_prompt(8011), "positions": "all"}, 8011 * 257),
        ("/logits", {"prompt": [long_prompt(4006)] * 2, "positions": "all"}, 8012 * 257),
        ("/score", {"prompt": long_prompt(8012)}, 8011 * 257),
    ):
        error = elements_server.refused(path, body)
        assert re.search(f"{elements} .* {limit}.* --max-queue-elements", error.message)
    elements_server.wait_idle()


def answered(server: Serving, status: int) -> float:
    return server.sample("logitd_http_requests_total", endpoint="/generate", status=str(status))


def test_ten_times_too_many_requests_are_answered_or_rejected(spelling_path: Path) -> None:
    """Every request gets 200 with the right tokens, or 429 with a time to wait."""
    with serving(spelling_path, slots=4, max_queue=8) as server:
        posters = [
            Poster(
                server.url, "/generate",
                {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": bool(i % 2)},
            )
            for i in range(80)
        ]  # fmt: skip
        responses = [poster.response() for poster in posters]
        statuses = [response.status_code for response in responses]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 12
        for response in responses:
            if response.status_code == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 60
            elif response.headers["content-type"].startswith("application/json"):
                assert response.json()["choices"][0]["token_ids"] == spelled("a", 60)
            else:
                deltas = [c for chunk in events(response.content) for c in chunk["choices"]]
                assert [i for c in deltas for i in c["token_ids"]] == spelled("a", 60)
        server.wait_idle()
        assert server.finished("length") == statuses.count(200)
        eventually(lambda: answered(server, 200) == statuses.count(200))
        assert answered(server, 429) == statuses.count(429)


def test_deadline_passes_in_the_queue(server: Serving) -> None:
    with ExitStack() as stack:
        occupy(server, stack)
        for path, body in POSTS.items():
            response = server.post(path, body | {"timeout": 0.05})
            assert response.status_code == 504
            assert ErrorReply.model_validate(response.json()).error.code == "deadline_exceeded"
        assert server.served.engine.admission.sequences == 1
    server.wait_idle()
    assert server.finished("timeout") == len(POSTS)


def test_stream_delivers_all_tokens_before_its_timeout(server: Serving) -> None:
    """The last tokens and the end of the sequence often arrive together."""
    body = POSTS["/generate"] | {"max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True}
    reply = server.post("/generate", body | {"stream": True, "timeout": 0.1})
    *chunks, error = events(reply.content)
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]]
    assert ids == spelled("a", len(ids))
    assert f"with {pluralize(len(ids), 'token')} generated" in error["error"]["message"]


def test_deadline_passes_while_a_sweep_waits_for_room(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue becomes full after the first part of the sweep, so no cell is ever submitted."""
    submit = EngineSession.submit

    def full_for_cells(self: EngineSession, requests: Any, **more: bool) -> Submission:
        if requests[0].request_id.startswith("cell"):
            raise QueueFull("2 sequences waiting", 2, 1, Limit.SEQUENCES)
        return submit(self, requests, **more)

    monkeypatch.setattr(EngineSession, "submit", full_for_cells)
    vary = {"stage": "blocks.*.mlp.out", "operation": "zero"}
    body = {"prompt": "a", "vary": vary, "over": ["layers"], "timeout": 0.5}
    assert error_of(server.post("/sweep", body), 504).code == "deadline_exceeded"


def test_waiting_stream_is_kept_alive(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are sent, so that proxies keep the connection open."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    with server.connect() as raw:
        with ExitStack() as stack:
            occupy(server, stack)
            body = POSTS["/generate"] | {"stream": True}
            raw.sendall(request_bytes("/generate", body, "Connection: close"))
            begun = read_until(raw, b": keep-alive\n\n\r\ne\r\n: keep-alive\n\n")
        stream = b"".join(dechunked(begun + read_all(raw)))
    assert stream.startswith(b": keep-alive\n\n: keep-alive\n\n")
    deltas = [choice for chunk in events(stream) for choice in chunk["choices"]]
    assert [i for choice in deltas for i in choice["token_ids"]] == spelled("a", 5)


def test_waiting_stream_echoes_its_prompt(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    body = POSTS["/generate"] | {"echo": True, "stream": True}
    with server.connect() as raw:
        with ExitStack() as stack:
            occupy(server, stack)
            raw.sendall(request_bytes("/generate", body, "Connection: close"))
            begun = read_until(raw, b": keep-alive\n\n")
        stream = b"".join(dechunked(begun + read_all(raw)))
    deltas = [choice for chunk in events(stream) for choice in chunk["choices"]]
    assert [i for choice in deltas for i in choice["token_ids"]] == [97, *spelled("a", 5)]
