"""`logitd health`: exit code 0 for a ready server, else 1 and the reason."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from logitd.service.application.app import create_app
from logitd.service.cli.main import run
from tests.service.serving import Serving, serve_settings, serving, serving_app


@pytest.fixture(autouse=True)
def broken_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that must not be used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def server(checkpoint_path: Path) -> Iterator[Serving]:
    with serving(checkpoint_path, api_keys="ann=the-key-of-ann") as running:
        yield running


@contextmanager
def answering(raw: bytes) -> Iterator[int]:
    """Run another server that always sends this reply. Returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(raw)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("flags", [(), ("--live",), ("--host", "0.0.0.0"), ("--timeout", "30")])
def test_ready_servers_exit_0(
    server: Serving, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Health checks of containers have no API key."""
    assert run(["health", "--port", str(server.port), *flags]) == 0
    assert capsys.readouterr() == ("ok\n", "")


def test_address_may_be_a_url_or_a_variable(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["health", f"http://127.0.0.1:{server.port}/"]) == 0
    monkeypatch.setenv("LOGITD_PORT", str(server.port))
    monkeypatch.setenv("LOGITD_HOST", "0.0.0.0")
    assert run(["health"]) == 0
    assert capsys.readouterr().err == ""


def test_servers_that_shut_down_exit_1(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(checkpoint_path) as server:
        server.state.leave()
        url = f"http://127.0.0.1:{server.port}/health"
        assert run(["health", "--port", str(server.port)]) == 1
        assert capsys.readouterr() == ("", f"logitd health: {url}: 503 draining\n")
        assert run(["health", "--port", str(server.port), "--live"]) == 0


def test_failed_servers_name_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged_errors: list[str]
) -> None:
    app = create_app(serve_settings(tmp_path / "nowhere"))
    with serving_app(app) as server:
        while run(["health", "--port", str(server.port)]) == 1:
            err = capsys.readouterr().err
            if "503 failed: " in err:
                break
            assert "503 loading" in err
    assert "nowhere" in err
    logged_errors.clear()


def test_missing_servers_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert run(["health", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"logitd health: http://127.0.0.1:{port}/health: ")
    assert "refused" in err


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
    ],
)
def test_foreign_answers_exit_1(raw: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(raw) as port:
        assert run(["health", "--port", str(port)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_silent_servers_exit_1_after_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert run(["health", "--port", str(port), "--timeout", "0.2"]) == 1
    assert "timed out" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["gpt.example", "ftp://127.0.0.1:1", "http://"])
def test_wrong_addresses_exit_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["health", url]) == 1
    assert capsys.readouterr().err.startswith("logitd health: ")
