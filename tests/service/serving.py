"""The real application in a real uvicorn, in a thread of the test process, on its own port; and raw
sockets for badly behaved clients."""

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Message

from logitd.model.checkpoint.checkpoint import read_checkpoint, save_checkpoint
from logitd.model.checkpoint.load import empty_gpt
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.load import LoadedModel, load_model
from logitd.service.application.app import create_app
from logitd.service.application.server import uvicorn_config
from logitd.service.connections.open_connections import OpenConnections
from logitd.service.http.schemas import ErrorDetail, ErrorReply
from logitd.service.models.served import ServedModel
from logitd.service.models.state import ServiceState
from logitd.service.models.turns import CallerTurns
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings
from tests.e2e.server import raw_connection
from tests.service.spelling import CONTEXT_LENGTH, long_prompt

TEST_TIMEOUT = 60.0
"""Seconds after which something that should be immediate counts as failed."""


LARGEST_ERROR = 4096
"""Largest error reply in bytes."""

Checkpoints = Path | Mapping[str, Path]
"""One checkpoint, or several by name."""


DOCUMENTS: dict[tuple[bool, tuple[str, ...]], dict[str, Any]] = {}
"""OpenAPI documents. The key says whether the server has API keys, and which paths are public."""


class Serving:
    """A running server, seen from outside (`client`, `connect`) and from inside (`state`)."""

    def __init__(self, app: Any, server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.state: ServiceState = app.state.service
        self.loop = loop
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = client(self.url)
        self.client.event_hooks["response"] = [self._check_described]

    def _check_described(self, response: httpx.Response) -> None:
        """Assert that the OpenAPI document describes the status."""
        if response.status_code == 200:
            return
        request = response.request
        path = self._document()["paths"].get(request.url.path, {})
        if (operation := path.get(request.method.lower())) is not None:
            assert str(response.status_code) in operation["responses"], request.url

    def _document(self) -> dict[str, Any]:
        """The OpenAPI document, cached because making one takes a third of a second."""
        guarded = bool(self.state.keys.names), self.state.settings.public_endpoints
        if self.app.openapi_schema is not None:  # a test may have replaced it
            return dict(self.app.openapi_schema)
        self.app.openapi_schema = DOCUMENTS.get(guarded)
        return DOCUMENTS.setdefault(guarded, self.app.openapi())

    @property
    def served(self) -> ServedModel:
        """The first model."""
        return self.state.models.served[0]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST JSON; bytes are sent unchanged."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(
            path, content=content, headers={"Content-Type": "application/json"} | headers
        )

    def json(self, path: str, body: Any) -> Any:
        """The body of a reply that must be 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any, status: int = 400, **headers: str) -> ErrorDetail:
        """The error of a reply that must have this status."""
        return error_of(self.post(path, body, **headers), status)

    def generate(self, prompt: Any, **fields: Any) -> Any:
        return self.json("/generate", {"prompt": prompt, **fields})

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection. With a small receive buffer, the server soon notices a slow reader."""
        return raw_connection(self.port, receive_buffer)

    def sample(self, name: str, /, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        families = self.state.metrics.registry.collect()
        samples = (sample for family in families for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def finished(self, reason: str) -> float:
        return self.sample("logitd_sequences_finished_total", reason=reason)

    def wait_idle(self) -> None:
        """Wait until no sequence, slot or element is in use."""
        models = self.state.models.served
        eventually(lambda: not any(model.engine.admission.sequences for model in models))
        for name in ("kv_slots_used", "queue_elements", "num_sequences_running",
                     "num_sequences_waiting"):  # fmt: skip
            eventually(lambda name=name: self.sample(f"logitd_{name}") == 0)  # type: ignore[misc]
        eventually(lambda: self.served.reply_budget.used == 0)


class _ThreadServer(uvicorn.Server):
    """Reports when it is listening, and on which loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.listening.set()


@contextmanager
def serving_app(app: Any) -> Iterator[Serving]:
    """Run an application of `create_app`; it may still be loading."""
    state: ServiceState = app.state.service
    settings = state.settings
    server = _ThreadServer(uvicorn_config(app, settings, OpenConnections(settings, state.metrics)))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        assert server.listening.wait(TEST_TIMEOUT)
        running = Serving(app, server, server.loop)
        with running.client:
            yield running
    finally:
        server.should_exit = True
        thread.join(TEST_TIMEOUT)
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def serving(checkpoint: Checkpoints, **settings: Any) -> Iterator[Serving]:
    """Serve checkpoints; the server is ready when the block begins."""
    with serving_app(create_app(serve_settings(checkpoint, **settings))) as running:
        settled = asyncio.run_coroutine_threadsafe(running.state.settled.wait(), running.loop)
        settled.result(TEST_TIMEOUT)
        assert running.state.status() == ("ok", None)
        yield running


def serve_settings(checkpoint: Checkpoints, **settings: Any) -> ServeSettings:
    """Settings for tests, with decoding in plain torch: many tests do something during a long
    generation, which the native decoder would finish too soon."""
    values: dict[str, Any] = {
        "port": 0, "threads": 1, "drain_timeout": 0.0, "kernels": "torch",
        "constraint_timeout": TEST_TIMEOUT,
        **settings,
    }  # fmt: skip
    sources: Any = checkpoint
    if not isinstance(checkpoint, Path):
        sources = [ModelSource(path, name) for name, path in checkpoint.items()]
    return ServeSettings(_env_file=None, checkpoint=sources, device="cpu", **values)


def slow_checkpoint(like: Path, folder: Path, elements: int) -> Path:
    """A checkpoint that takes a long time to load: each layer's feed-forward is so wide that all of
    them together have about `elements` weights, all zero."""
    info = read_checkpoint(like)
    config = replace(info.config, d_ff=elements // (2 * info.config.n_layer * info.config.d_model))
    weights = {
        name: torch.zeros(1).expand(tensor.shape)
        for name, tensor in empty_gpt(config, torch.device("meta")).state_dict().items()
    }
    save_checkpoint(
        folder / "slow",
        config=config,
        weights=weights,
        tokenizer=info.tokenizer,
        training=info.training,
        card="",
    )
    return folder / "slow"


@contextmanager
def held_loading() -> Iterator[threading.Event]:
    """Servers that start in this block load only once the event is set."""
    gate = threading.Event()

    def load(*arguments: Any, **flags: Any) -> LoadedModel:
        assert gate.wait(TEST_TIMEOUT)
        return load_model(*arguments, **flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitd.service.engine.build.load_model", load)
        try:
            yield gate
        finally:
            gate.set()


def statuses_in_a_row(server: Serving, path: str, *bodies: Any, **headers: str) -> list[int]:
    """The statuses of POST requests to the application itself. It receives each one when it sends
    the message that ends the reply before it, which is earlier than any client could send it."""
    statuses: list[int] = []
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", **headers}

    async def ask(body: Any, *others: Any) -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        ended = False

        async def receive() -> Message:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not ended and (
                not message.get("more_body") or message["body"].endswith(b"data: [DONE]\n\n")
            ):
                ended = True
                if others:
                    await ask(*others)

        scope = {
            "type": "http", "method": "POST", "scheme": "http", "http_version": "1.1",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in fields.items()],
            "server": ("127.0.0.1", server.port), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await server.app(scope, receive, send)

    asyncio.run_coroutine_threadsafe(ask(*bodies), server.loop).result(TEST_TIMEOUT)
    return statuses


def error_of(response: httpx.Response, status: int = 400) -> ErrorDetail:
    """The error of a response, which must be small and have a message."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= LARGEST_ERROR
    error = ErrorReply.model_validate(response.json()).error
    assert len(error.message.split()) >= 3, "a sentence"
    return error


def engine_of(server: Serving) -> Engine:
    return server.served.engine._driver._engine


def client(url: str) -> httpx.Client:
    """An HTTP client that reads no certificates, because that takes longer than most tests."""
    return httpx.Client(base_url=url, trust_env=False, verify=False, timeout=TEST_TIMEOUT)


class Poster:
    """A request in a separate thread."""

    def __init__(self, url: str, path: str, body: Any, **headers: str) -> None:
        self._response: httpx.Response | None = None

        def post() -> None:
            with client(url) as http:
                self._response = http.post(path, json=body, headers=headers)

        self._thread = threading.Thread(target=post)
        self._thread.start()

    @property
    def answered(self) -> bool:
        return self._response is not None

    def response(self) -> httpx.Response:
        self._thread.join(TEST_TIMEOUT)
        assert self._response is not None
        return self._response


@contextmanager
def held(server: Serving, turns: CallerTurns) -> Iterator[None]:
    """Hold a place of `turns` in the server."""
    turn = turns.turn("another caller")
    asyncio.run_coroutine_threadsafe(turn.__aenter__(), server.loop).result(TEST_TIMEOUT)
    try:
        yield
    finally:
        ending = turn.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(ending, server.loop).result(TEST_TIMEOUT)


@contextmanager
def at_work(work: Callable[[int], object], count: int) -> Iterator[None]:
    """Threads that each call `work` with their own number, again and again, until the block
    ends."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def repeat(number: int) -> None:
        try:
            while not stop.is_set():
                work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def app_with_bugs(checkpoint: Path, **settings: Any) -> FastAPI:
    """The application with two endpoints that raise."""
    app = create_app(serve_settings(checkpoint, **settings))

    @app.get("/bug", include_in_schema=False)
    def bug() -> None:
        raise ZeroDivisionError("/secret/path of our own")

    @app.get("/late-bug", include_in_schema=False)
    def late_bug() -> StreamingResponse:
        def body() -> Iterator[bytes]:
            yield b"one"
            raise ZeroDivisionError("/secret/path of our own")

        return StreamingResponse(body())

    return app


def occupy(server: Serving, stack: ExitStack) -> None:
    """Hold the only slot of a server of the spelling checkpoint with a long generation, until the
    stack is closed."""
    raw = stack.enter_context(server.connect())
    body = {"prompt": "a", "max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True, "stream": True}
    raw.sendall(request_bytes("/generate", body))
    eventually(lambda: server.sample("logitd_kv_slots_used") == 1)


def occupy_elements(server: Serving, stack: ExitStack) -> None:
    """Hold 8000 rows of logits until the stack is closed, with a client that does not read."""
    raw = stack.enter_context(server.connect(receive_buffer=4096))
    raw.sendall(request_bytes("/logits", {"prompt": long_prompt(8000), "positions": "all"}))
    eventually(lambda: server.sample("logitd_kv_slots_used") == 1)


def eventually(condition: Callable[[], bool], timeout: float = TEST_TIMEOUT) -> None:
    """Poll until a condition is true. The intervals grow, because checking a condition may take a
    request."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout, f"not within {timeout} s"
        time.sleep(min(0.002 + waited / 10, 0.1))


def request_bytes(path: str, body: Any, *headers: str) -> bytes:
    """The bytes of a POST."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def read_until(raw: socket.socket, *wanted: bytes) -> bytes:
    """Read until one of `wanted` has arrived or the connection ends."""
    received = bytearray()
    while data := raw.recv(65536):
        looked_at = max(0, len(received) - max(map(len, wanted)))
        received += data
        if any(received.find(part, looked_at) >= 0 for part in wanted):
            break
    return bytes(received)


def read_all(raw: socket.socket) -> bytes:
    """Read until the other side closes."""
    received = bytearray()
    while data := raw.recv(65536):
        received += data
    return bytes(received)


def read_chunks(raw: socket.socket) -> list[bytes]:
    """The chunks of a chunked body, until the connection is closed."""
    return dechunked(read_all(raw))


def dechunked(response: bytes) -> list[bytes]:
    """The chunks of a response."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    stream = io.BytesIO(body)
    found = []
    while size := int(stream.readline(), 16):
        found.append(stream.read(size))
        assert stream.read(2) == b"\r\n"
    assert stream.read() == b"\r\n"
    return found


def events(stream: bytes) -> list[Any]:
    """The events of a stream, whose format must be exact: `data: `, one line, a blank line;
    comments between them; `[DONE]` at the end."""
    assert b"\r" not in stream
    assert stream.endswith(b"\n\n")
    parts = [part for part in stream[:-2].split(b"\n\n") if not part.startswith(b":")]
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    assert parts[-1] == b"data: [DONE]"
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-1]]
