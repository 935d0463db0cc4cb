"""Clients that disconnect or stop reading: their slots are soon free, and other clients are not
affected. Real sockets."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.service.serving import (
    TEST_TIMEOUT,
    Serving,
    events,
    eventually,
    read_all,
    read_chunks,
    request_bytes,
    serving,
)
from tests.service.spelling import long_prompt, spelled

LONG: dict[str, Any] = {"prompt": "a", "ignore_eos": True, "n": 4}
"""Four sequences of 8,191 tokens."""
WHOLE: dict[str, Any] = {"prompt": long_prompt(8000), "positions": "all"}
"""A request for rows of logits that take 25 MB as JSON, which is more than socket buffers hold."""


@pytest.fixture
def server(spelling_path: Path) -> Iterator[Serving]:
    """A server for one test alone, because the test checks the server's slots and metrics."""
    with serving(spelling_path, slots=4, max_queue=40) as running:
        yield running


def begin(server: Serving, path: str, body: Any, **connect: Any) -> socket.socket:
    """Send a request and wait until it is accepted."""
    open_before = server.served.engine.admission.sequences
    raw = server.connect(**connect)
    raw.sendall(request_bytes(path, body))
    eventually(lambda: server.served.engine.admission.sequences > open_before)
    return raw


def vanish(raw: socket.socket) -> None:
    """Reset the connection."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.close()


LEAVE: dict[str, Callable[[socket.socket], None]] = {
    "closes": socket.socket.close,
    "is cut off": vanish,
}


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", LONG | {"stream": True}),
        ("/generate", LONG),
        ("/v1/completions", LONG | {"max_tokens": 8000, "stream": True}),
        ("/v1/completions", LONG | {"max_tokens": 8000}),
        ("/logits", WHOLE),
        ("/logits", WHOLE | {"prompt": [WHOLE["prompt"]] * 3}),
    ],
    ids=["a stream", "one reply", "openai stream", "openai reply", "rows", "rows of three prompts"],
)
def test_client_leaves_a_running_request(server: Serving, path: str, body: Any, leave: str) -> None:
    raw = begin(server, path, body)
    eventually(lambda: server.sample("logitd_kv_slots_used") > 0)
    LEAVE[leave](raw)
    server.wait_idle()
    raw.close()
    assert server.finished("abort") == (1 if path == "/logits" else 4)
    assert server.finished("length") == server.finished("stop") == 0


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("body", [LONG | {"stream": True}, LONG], ids=["a stream", "one reply"])
def test_client_that_leaves_is_noticed_through_all_middleware(
    spelling_path: Path, leave: str, body: Any
) -> None:
    keys = {"cors_origins": "*", "api_keys": "page=a-key-of-the-page"}
    headers = ("Origin: https://page.example", "Authorization: Bearer a-key-of-the-page")
    with serving(spelling_path, slots=4, **keys) as server, server.connect() as raw:
        raw.sendall(request_bytes("/generate", body, *headers))
        eventually(lambda: server.sample("logitd_kv_slots_used") > 0)
        LEAVE[leave](raw)
        server.wait_idle()
        assert server.finished("abort") == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_client_leaves_the_queue(server: Serving, streamed: bool) -> None:
    running = begin(server, "/generate", LONG)
    eventually(lambda: server.sample("logitd_num_sequences_running") == 4)
    queued = [
        begin(server, "/generate", LONG | {"stream": streamed}),
        begin(server, "/logits", WHOLE),
        begin(server, "/probs", {"prompt": ["a", "b"]}),
    ]
    eventually(lambda: server.sample("logitd_num_sequences_waiting") == 7)
    for raw in queued:
        raw.close()
    eventually(lambda: server.sample("logitd_num_sequences_waiting") == 0)
    assert server.sample("logitd_num_sequences_running") == 4
    assert server.finished("abort") == 7
    running.close()
    server.wait_idle()


def test_client_leaves_during_prefill(spelling_path: Path) -> None:
    with serving(spelling_path, slots=1, prefill_chunk=32) as server:
        raw = begin(server, "/generate", LONG | {"prompt": long_prompt(8000), "n": 1})
        eventually(lambda: server.sample("logitd_prefill_tokens_total") > 0)
        raw.close()
        server.wait_idle()
        assert server.finished("abort") == 1
        assert server.sample("logitd_prefill_tokens_total") < 8000
        assert server.sample("logitd_generation_tokens_total") == 0


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0])
def test_client_leaves_before_its_request_is_complete(server: Serving, sent: float) -> None:
    whole = request_bytes("/generate", {"prompt": "a", "max_tokens": 1})
    head, _, body = whole.partition(b"\r\n\r\n")
    with server.connect() as raw:
        raw.sendall(head + b"\r\n\r\n" + body[: int(sent * (len(body) - 1))])
    counted = {"endpoint": "/generate", "status": "499"}
    eventually(lambda: server.sample("logitd_http_requests_total", **counted) == 1)
    server.wait_idle()


@pytest.mark.slow
def test_many_clients_leave_at_random_moments(server: Serving) -> None:
    """Clients of streams, texts and arrays disconnect at random moments; afterwards the server is
    idle again."""
    chance = random.Random(0)
    fields = [
        ("/generate", {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}),
        ("/generate", {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "n": 2}),
        ("/logits", {"prompt": long_prompt(2000), "positions": "all"}),
        ("/probs", {"prompt": ["a", "b"]}),
    ]

    def visit(number: int) -> None:
        path, body = fields[number % len(fields)]
        with server.connect() as raw:
            raw.sendall(request_bytes(path, body))
            raw.settimeout(chance.random() * 0.2)
            try:
                while raw.recv(4096):
                    pass
            except TimeoutError:
                pass

    def visits(first: int) -> None:
        for number in range(first, first + 10):
            visit(number)

    threads = [threading.Thread(target=visits, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TEST_TIMEOUT)
    server.wait_idle()
    ended = sum(server.finished(reason) for reason in ("stop", "length", "abort"))
    assert server.sample("logitd_sequence_seconds_count") == ended
    assert server.finished("error") == server.finished("timeout") == 0
    (choice,) = server.generate("a", max_tokens=30)["choices"]
    assert choice["token_ids"] == spelled("a", 30)


# Slow readers

GIVEN_UP = (
    "a client left a reply unread for 0.5 s",
    # On a busy machine the check of all connections may come first.
    "ended a connection: too little of a reply was read within 0.5 s",
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/logits", WHOLE),
        ("/generate", {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 900,
                       "logprobs": 257}),
    ],
    ids=["rows", "a stream"],
)  # fmt: skip
def test_stopped_reader_is_ended_without_affecting_others(
    spelling_path: Path, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(spelling_path, slots=2, slow_reader_timeout=0.5) as server,
        begin(server, path, body, receive_buffer=4096) as stopped,
    ):
        # Other clients are answered meanwhile.
        while not caplog.messages:
            (choice,) = server.generate("a", max_tokens=30)["choices"]
            assert choice["token_ids"] == spelled("a", 30)
        assert caplog.messages[0] in GIVEN_UP
        server.wait_idle()
        received = read_all(stopped)  # the body ends without the last chunk
        assert not received.endswith(b"0\r\n\r\n")
        if path == "/logits":
            assert server.finished("abort") == 1


def test_reader_that_pauses_gets_everything(spelling_path: Path) -> None:
    """The reader is slower than the engine, so the rows wait for it."""
    with serving(spelling_path, slots=2, slow_reader_timeout=TEST_TIMEOUT) as server:
        body = {"prompt": long_prompt(4000), "positions": "all"}
        with server.connect(receive_buffer=4096) as raw:
            raw.sendall(request_bytes("/logits", body, "Connection: close"))
            eventually(lambda: server.sample("logitd_prefill_tokens_total") > 0)
            server.generate("a", max_tokens=300, ignore_eos=True)
            assert server.sample("logitd_prefill_tokens_total") < 4000
            whole = b"".join(read_chunks(raw))
        (prompt,) = orjson.loads(whole)["prompts"]
        assert np.array(prompt["logits"]).shape == (4000, 257)
        server.wait_idle()
        assert server.finished("stop") == 1
        assert server.sample("logitd_http_requests_total", endpoint="/logits", status="200") == 1


def test_streams_continue_while_another_reader_has_stopped(spelling_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(
            serving(spelling_path, slots=2, slow_reader_timeout=TEST_TIMEOUT)
        )
        stack.enter_context(begin(server, "/logits", WHOLE, receive_buffer=4096))
        eventually(lambda: server.sample("logitd_prefill_tokens_total") > 256)
        response = server.post(
            "/generate", {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 500}
        )
        *chunks, last = events(response.content)
        assert last["usage"]["completion_tokens"] == 500
        ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]]
        assert ids == spelled("a", 500)
        assert server.sample("logitd_kv_slots_used") == 1, "the rows still wait"
