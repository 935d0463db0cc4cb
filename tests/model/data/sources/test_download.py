"""Downloads from a real server on this machine, and their cache."""

import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.sources import download as module
from logitd.model.data.sources.download import Downloaded, Downloading, cache_folder, download
from logitd.model.data.sources.open_text import open_text
from logitd.model.training.events import Event, ignore_events, line

STORY = "Es war einmal ein König.\n" * 4000


class Server(ThreadingHTTPServer):
    """Answers by path and records the requests."""

    asked: list[tuple[str, str | None]]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["accept-encoding"]))
        raw = STORY.encode()
        replies: dict[str, tuple[int, bytes, dict[str, Any]]] = {
            "/story.txt": (200, raw, {}),
            "/unannounced.txt": (200, raw, {"content-length": None}),
            "/moved.txt": (302, b"", {"location": "/story.txt"}),
            "/latest": (302, b"", {"location": "/table.csv?id=1"}),
            "/export": (200, b"text\none\n", {"content-type": "text/csv; charset=utf-8"}),
            "/table.csv": (200, b"text\none\n", {}),
            "/circle.txt": (302, b"", {"location": "/circle.txt"}),
            "/ftp.txt": (302, b"", {"location": "ftp://127.0.0.1/story.txt"}),
            "/cut.txt": (200, raw, {"content-length": len(raw) + 5}),
            "/lines.jsonl.gz": (200, gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'), {}),
            "/encoded.txt": (200, gzip.compress(raw), {"content-encoding": "gzip"}),
            "/members.txt": (
                200,
                gzip.compress(raw[:999]) + gzip.compress(raw[999:]),
                {"content-encoding": "x-gzip"},
            ),
            "/part.txt": (200, gzip.compress(raw)[:-20], {"content-encoding": "gzip"}),
            "/damaged.txt": (200, raw, {"content-encoding": "gzip"}),
            "/brotli.txt": (200, raw, {"content-encoding": "br"}),
        }
        status, body, headers = replies.get(self.path.partition("?")[0], (404, b"no", {}))
        self.send_response(status)
        headers = {"content-length": len(body), "connection": "close"} | headers
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass  # keeps the log out of the test's output


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path / "cache" / "logitd" / "texts"


def get(url: str, max_mb: int = 1) -> Downloaded:
    return download(url, max_mb=max_mb, report=ignore_events)


def test_text_is_fetched_once_per_address(server: Server, cache: Path) -> None:
    url = f"{server.address}/story.txt?version=2"
    events: list[Event] = []
    first = download(url, max_mb=1, report=events.append)
    second = download(url, max_mb=1, report=events.append)
    assert server.asked == [("/story.txt?version=2", "identity")]
    assert first.path.read_text(encoding="utf-8") == STORY
    assert first.path.parent == cache == cache_folder()
    assert first.path.name.endswith("-story.txt")
    assert first.record() == {
        "url": url,
        "sha256": hashlib.sha256(STORY.encode()).hexdigest(),
        "bytes": len(STORY.encode()),
    }
    assert events == [first, second]
    assert (first.from_cache, second) == (False, replace(first, from_cache=True))
    other = get(f"{server.address}/story.txt?version=3")
    assert other.path != first.path


def test_documents_are_named_by_their_address(server: Server) -> None:
    """Opening the same addresses again sends no request."""
    url = f"{server.address}/lines.jsonl.gz"
    addresses = (url, f"{server.address}/story.txt")
    for _ in range(2):
        text = open_text(addresses)
        documents = {document.name: "".join(document.pieces()) for document in text.documents}
        assert documents == {
            f"{url}, line 1": "one",
            f"{url}, line 2": "two",
            f"{server.address}/story.txt": STORY,
        }
        assert [download["url"] for download in text.downloads] == list(addresses)
        assert text.downloads[1]["sha256"] == hashlib.sha256(STORY.encode()).hexdigest()
    assert len(server.asked) == 2


def test_progress_is_reported_with_and_without_a_length(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY", 0.0)
    size = len(STORY.encode())
    for path, total in (("/story.txt", size), ("/unannounced.txt", None)):
        events: list[Event] = []
        download(server.address + path, max_mb=1, report=events.append)
        progress = [event for event in events if isinstance(event, Downloading)]
        done = [event.done for event in progress]
        assert done == sorted(done)
        assert done[-1] == size
        assert {event.total for event in progress} == {total}
    assert line(Downloading("http://a/b", 500_000, 2_000_000)) == (
        "downloading http://a/b: 0.5 of 2.0 MB, 25%"
    )
    assert line(Downloading("http://a/b", 500_000, None)) == "downloading http://a/b: 0.5 MB"


@pytest.mark.parametrize("path", ["/moved.txt", "/encoded.txt", "/members.txt"])
def test_redirects_and_encodings_are_resolved(server: Server, path: str) -> None:
    assert get(server.address + path).path.read_text(encoding="utf-8") == STORY


def test_downloaded_compressed_file_keeps_its_suffix(server: Server) -> None:
    fetched = get(f"{server.address}/lines.jsonl.gz")
    assert fetched.path.name.endswith("-lines.jsonl.gz")
    assert gzip.decompress(fetched.path.read_bytes()).startswith(b'{"text": "one"}')


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nothing.txt", "answered 404 Not Found"),
        ("/circle.txt", "TooManyRedirects"),
        (
            "/latest",
            r"leads to \S+/table\.csv\?id=1, a file of type \.csv, which the name",
        ),
        ("/export", r"a file of type \.csv, which the name does not show: download the file"),
        ("/ftp.txt", "UnsupportedProtocol"),
        ("/cut.txt", "RemoteProtocolError"),
        ("/part.txt", "incomplete gzip"),
        ("/damaged.txt", "damaged gzip"),
        ("/brotli.txt", "content-encoding br.*only gzip"),
    ],
)
def test_failed_download_is_explained_and_leaves_nothing(
    server: Server, cache: Path, path: str, reason: str
) -> None:
    with pytest.raises(DataError, match=f"{path}.*{reason}"):
        get(server.address + path)
    assert list(cache.iterdir()) == []


def test_text_above_the_limit_is_refused(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MB", 50_000)
    with pytest.raises(DataError, match=r"104,000 bytes.* 1 MB.*--max-download-mb"):
        get(f"{server.address}/story.txt")
    with pytest.raises(DataError, match=r"more than 50,000 bytes.*--max-download-mb"):
        get(f"{server.address}/unannounced.txt")
    with pytest.raises(DataError, match="more than 50,000"):
        get(f"{server.address}/encoded.txt")  # small in transit, large once unpacked
    assert list(cache.iterdir()) == []
    assert get(f"{server.address}/story.txt", max_mb=3).size == 104_000


def test_interrupted_download_leaves_nothing(server: Server, cache: Path) -> None:
    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REPORT_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            download(f"{server.address}/story.txt", max_mb=1, report=stop)
    assert list(cache.iterdir()) == []


def test_unreachable_address_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DataError, match=r"ConnectError.*Connection refused.*--data"):
        get(f"http://127.0.0.1:{port}/story.txt")

    def unknown(*host: object, **how: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DataError, match=r"ConnectError.*Name or service not known"):
        get("http://no-such-host.invalid/story.txt")
    assert list(cache.iterdir()) == []


def test_silent_server_times_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", httpx.Timeout(0.1))
    mute = socket.create_server(("127.0.0.1", 0))
    with mute, pytest.raises(DataError, match="ReadTimeout"):
        get(f"http://127.0.0.1:{mute.getsockname()[1]}/story.txt")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "is not an address"),
        ("http://host:port/a.txt", "is not an address"),
        ("https://me:secret@host/a.txt", "text on host .* password"),
    ],
)
def test_invalid_address_is_refused(url: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        get(url)
    assert "secret" not in str(caught.value)


def test_unwritable_cache_is_explained(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be stored in .*XDG_CACHE_HOME"):
        get(f"{server.address}/story.txt")
