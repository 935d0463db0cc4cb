"""Life cycle of the server: loading, signals and the drain, in real processes."""

import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from logitd.service.application.server import serve
from logitd.service.http.schemas import ErrorReply
from logitd.service.models.served import Models
from tests.e2e.server import ServedProcess
from tests.model.factories import save_tiny_checkpoint, training_record
from tests.service.serving import (
    Poster,
    client,
    error_of,
    events,
    eventually,
    serve_settings,
    slow_checkpoint,
)

LONG = {"prompt": "a", "ignore_eos": True}
"""A generation that takes seconds."""


@pytest.fixture(scope="module")
def slow_path(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of a quarter of a gigabyte, which takes a second to load."""
    path = slow_checkpoint(checkpoint_path, tmp_path_factory.mktemp("slow"), 2**26)
    yield path
    shutil.rmtree(path)


def process(checkpoint: Path, *flags: str) -> ServedProcess:
    return ServedProcess("--checkpoint", str(checkpoint), "--threads", "1", *flags)


class Stream:
    """A streaming client that reads in a separate thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.received = b""
        self.begun = threading.Event()
        self._error: httpx.HTTPError | None = None
        self._body = {**LONG, "stream": True, **fields}
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(60)

    def _read(self) -> None:
        try:
            with (
                client(self._url) as http,
                http.stream("POST", "/generate", json=self._body) as response,
            ):
                for piece in response.iter_raw():
                    self.received += piece
                    self.begun.set()
        except httpx.HTTPError as error:
            self._error = error

    def events(self) -> list[Any]:
        """All events, after the stream has ended properly."""
        self._thread.join(60)
        assert self._error is None
        return events(self.received)

    def broken_off(self) -> bool:
        """True if the connection failed before the stream ended."""
        self._thread.join(60)
        return self._error is not None


def test_signal_while_loading_quits_at_once(slow_path: Path) -> None:
    with closing(process(slow_path)) as server:
        server.wait_for("listening on port")
        time.sleep(0.1)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - began < 1
        assert "SIGTERM while loading: quitting immediately" in server.output
        assert "Traceback" not in server.output


def test_drain_finishes_requests_and_refuses_new_ones(spelling_path: Path) -> None:
    # Plain torch: the native decoder would finish before the test sees the waiting request.
    with process(spelling_path, "--slots", "1", "--kernels", "torch") as server:
        stream = Stream(server.url, max_tokens=600)
        waiting = Poster(server.url, "/generate", LONG | {"max_tokens": 5})
        with client(server.url) as http:
            eventually(lambda: server.sample("logitd_num_sequences_waiting") == 1)
            server.signal(signal.SIGTERM)
            eventually(lambda: http.get("/health").status_code == 503)
            assert http.get("/health").json()["status"] == "draining"
            refused = http.post("/generate", json=LONG)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
        assert server.exit_code() == 0
        *_, last = stream.events()
        assert last["usage"]["completion_tokens"] == 600
        assert waiting.response().json()["usage"]["completion_tokens"] == 5
        assert "Traceback" not in server.output
        assert "ERROR" not in server.output


def test_drain_grace_keeps_answering(spelling_path: Path) -> None:
    with process(spelling_path, "--drain-grace", "1.5") as server, client(server.url) as http:
        server.signal(signal.SIGTERM)
        server.wait_for("no longer ready, draining in 1.5 s")
        assert http.get("/health").json()["status"] == "draining"
        answered = http.post("/generate", json={"prompt": "a", "max_tokens": 3})
        assert answered.status_code == 200
        assert answered.json()["usage"]["completion_tokens"] == 3
        assert server.exit_code() == 0
        assert "Traceback" not in server.output


def test_keys_are_read_again_on_sighup(spelling_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return http.get("/info", headers=headers).status_code

    keys.write_text("ann=the-key-of-ann\nbob=the-key-of-bob\n")
    with process(spelling_path, "--api-key-file", str(keys)) as server, client(server.url) as http:
        assert (status("the-key-of-ann"), status("the-key-of-eve")) == (200, 401)
        keys.write_text("eve=the-key-of-eve\nbob=another-of-bob\n")
        server.signal(signal.SIGHUP)
        server.wait_for("the keys of eve, bob are accepted now")
        assert (status("the-key-of-ann"), status("the-key-of-bob")) == (401, 401)
        assert (status("the-key-of-eve"), status("another-of-bob")) == (200, 200)
        for text, why in (("eve", "not of the form"), ("# none\n", "has no keys")):
            keys.write_text(text)
            server.signal(signal.SIGHUP)
            server.wait_for(why)
            assert (status("the-key-of-eve"), status("the-key-of-ann")) == (200, 401)
        headers = {"Authorization": "Bearer the-key-of-eve"}
        assert 'key="eve"' in http.get("/metrics", headers=headers).text


def test_sighup_during_the_start_reads_the_keys_later(spelling_path: Path, tmp_path: Path) -> None:
    """Such a signal ended the server, and systemd does not restart a service that SIGHUP ended."""
    keys = tmp_path / "keys"
    keys.write_text("ann=the-key-of-ann\n")
    flags = ("--checkpoint", str(spelling_path), "--threads", "1", "--api-key-file", str(keys))
    server = ServedProcess(*flags, cold=True)
    status = Path(f"/proc/{server.process.pid}/status")
    eventually(lambda: "SigBlk:\t0000000000000001" in status.read_text())
    server.signal(signal.SIGHUP)
    with server:
        server.wait_for("SIGHUP: the keys of ann are accepted now")


def test_sighup_leaves_the_served_checkpoint_alone(tmp_path: Path) -> None:
    """The server keeps its checkpoint even if the run has a new best one."""
    run, keys = tmp_path / "run", tmp_path / "keys"
    for step in (1, 2):
        save_tiny_checkpoint(run / f"step-{step}", training=training_record(step=step))
    (run / "run.json").write_text("{}")
    (run / "best").symlink_to("step-1")
    keys.write_text("ann=the-key-of-ann\n")
    headers = {"Authorization": "Bearer the-key-of-bob"}
    with process(run, "--api-key-file", str(keys)) as server, client(server.url) as http:
        (run / "best").unlink()
        (run / "best").symlink_to("step-2")
        keys.write_text("bob=the-key-of-bob\n")
        server.signal(signal.SIGHUP)
        server.wait_for("the keys of bob are accepted now")
        assert http.get("/info", headers=headers).json()["checkpoint"]["step"] == 1
        assert server.output.count("SIGHUP") == 1
    with process(run) as server:
        server.signal(signal.SIGHUP)
        server.wait_for("SIGHUP: this server has no API keys")


def test_short_drain_ends_requests_with_an_error(spelling_path: Path) -> None:
    with process(
        spelling_path, "--slots", "2", "--drain-timeout", "0.1", "--kernels", "torch"
    ) as server:
        streams = [Stream(server.url), Stream(server.url)]
        waiting = Poster(server.url, "/generate", LONG)
        eventually(lambda: server.sample("logitd_num_sequences_waiting") == 1)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        for stream in streams:
            *before, last = stream.events()
            assert before
            error = ErrorReply.model_validate(last).error
            assert error.type == "unavailable_error"
            assert "shutting down" in error.message
        error_of(waiting.response(), 503)
        assert waiting.response().headers["retry-after"] == "1"
        assert "aborting 3 sequences: the server is shutting down" in server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_quits_at_once(spelling_path: Path, second: signal.Signals) -> None:
    with process(spelling_path, "--kernels", "torch") as server:
        stream = Stream(server.url)
        server.signal(signal.SIGTERM)
        server.wait_for("SIGTERM: draining")
        server.signal(second)
        assert server.exit_code() == 128 + second
        assert stream.broken_off()
        assert "Traceback" not in server.output


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "port {port} is in use: .*--port 0 picks a free one"),
        ("192.0.2.1", "--host 192.0.2.1 is not an address of this machine: "),
        ("no.such.host.invalid", "--host no.such.host.invalid"),
    ],
)
def test_bind_failure_is_one_line(
    host: str, reason: str, checkpoint_path: Path, logged_errors: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = serve_settings(checkpoint_path, host=host, port=port)
        assert serve(settings, announce=lambda served, port: None) == 1
    (line,) = logged_errors
    assert re.search(reason.format(port=port), line)
    logged_errors.clear()


@pytest.mark.usefixtures("signals_as_before")
def test_failed_engine_ends_the_server_with_1(
    checkpoint_path: Path, logged_errors: list[str]
) -> None:
    """The process exits, so that a supervisor can restart it."""
    requests: list[Poster] = []

    def break_engine(models: Models, port: int) -> None:
        def broken(on_compute: object) -> NoReturn:
            raise RuntimeError("a fault of the engine")

        models.served[0].engine._driver._engine.step = broken  # type: ignore[assignment]
        body = {"prompt": "a", "max_tokens": 1}
        requests.append(Poster(f"http://127.0.0.1:{port}", "/generate", body))

    assert serve(serve_settings(checkpoint_path), announce=break_engine) == 1
    assert requests[0].response().status_code == 503
    assert "a fault of the engine" in logged_errors[0]
    assert logged_errors[1] == "the engine failed: exiting with 1"
    logged_errors.clear()
