"""HostCheck: a web page that points its own domain at the loopback address cannot use the
server."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.service.access.hosts import binds_loopback
from tests.service.serving import Serving, error_of, read_until, serving

LOOPBACK = (
    *("localhost", "localhost:8000", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000"),
    *("127.9.8.7:1", "[::1]", "[::1]:8000"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("evil.example:localhost", "localhost@evil.example", "[::1].evil.example", "", "[", "\xff"),
)
ADDRESSES = ("192.0.2.1", "192.0.2.1:8000", "[2001:db8::1]:8000", "10.0.0.7")
KEY = {"Authorization": "Bearer the-key-of-ann"}
PATHS = ("/", "/docs", "/info", "/health", "/metrics", "/static/playground/main.js", "/nowhere")


@pytest.fixture(scope="module")
def server(checkpoint_path: Path) -> Any:
    with serving(checkpoint_path) as running:
        yield running


def status(server: Serving, host: str, path: str = "/version", **headers: str) -> int:
    sent = {
        name.encode(): value.encode("latin-1") for name, value in {"Host": host, **headers}.items()
    }
    return httpx.get(f"{server.url}{path}", headers=sent, trust_env=False).status_code


@pytest.mark.parametrize("host", LOOPBACK)
def test_host_of_the_loopback_is_accepted(host: str, server: Serving) -> None:
    assert status(server, host) == 200


@pytest.mark.parametrize(
    ("host", "path"),
    [*((host, "/version") for host in (*FOREIGN, *ADDRESSES)),
     *(("evil.example", path) for path in PATHS)],
)  # fmt: skip
def test_foreign_host_cannot_read(host: str, path: str, server: Serving) -> None:
    assert status(server, host, path) == 403


def test_foreign_host_cannot_compute(server: Serving) -> None:
    response = httpx.post(
        f"{server.url}/generate",
        json={"prompt": "a"},
        headers={"Host": "evil.example", "Origin": "http://evil.example"},
        trust_env=False,
    )
    error = error_of(response, 403)
    assert (error.type, error.code) == ("permission_error", "host_not_allowed")
    assert "'evil.example'" in error.message
    assert "--allowed-hosts" in error.message
    assert server.sample("logitd_sequences_finished_total") == 0


def test_request_without_a_host_is_answered(server: Serving) -> None:
    """Some health checks use HTTP/1.0, which needs no Host. A browser always sends one."""
    with server.connect() as raw:
        raw.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("hosts", "found"), [(0, b"has no Host header;"), (2, b"2 Host headers")])
def test_http_1_1_requires_one_host(server: Serving, hosts: int, found: bytes) -> None:
    with server.connect() as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\n" + b"Host: localhost\r\n" * hosts + b"\r\n")
        reply = read_until(raw, b"}}")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert found in reply


def test_every_host_of_a_request_is_checked(server: Serving) -> None:
    with server.connect() as raw:
        raw.sendall(b"GET /info HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 403 " in raw.recv(100).splitlines()[0]


@pytest.mark.parametrize(
    ("settings", "accepted", "refused"),
    [
        ({"allowed_hosts": "gpt.example.org,b.example"},
         ["gpt.example.org", "GPT.example.org:443", "b.example:1", "localhost"],
         ["evil.example", "a.gpt.example.org", "192.0.2.1"]),
        ({"allowed_hosts": "*"}, ["evil.example", "192.0.2.1"], []),
        ({"host": "localhost"}, ["localhost"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["evil.example", "192.0.2.1"], []),
        # No page can redirect an address, and probes use them.
        ({"host": "0.0.0.0", "allowed_hosts": "gpt.example.org"},
         ["gpt.example.org", "localhost", *ADDRESSES], ["evil.example", "1.2.3.4.evil.example"]),
        ({"api_keys": "ann=the-key-of-ann"}, ["evil.example"], []),
        ({"api_keys": "ann=the-key-of-ann", "allowed_hosts": "gpt.example.org"},
         ["gpt.example.org"], ["evil.example"]),
    ],
)  # fmt: skip
def test_settings_decide_which_hosts_are_accepted(
    settings: dict[str, str], accepted: list[str], refused: list[str], checkpoint_path: Path
) -> None:
    with serving(checkpoint_path, **settings) as server:
        assert [status(server, host, **KEY) for host in accepted] == [200] * len(accepted)
        assert [status(server, host, **KEY) for host in refused] == [403] * len(refused)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("no.such.host.invalid", False)],
)  # fmt: skip
def test_loopback_is_recognized(host: str, loopback: bool) -> None:
    assert binds_loopback(host) is loopback


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_page_of_another_origin_cannot_post(media_type: str | None, server: Serving) -> None:
    """Requests that a browser sends without a preflight are refused, and so is the preflight."""
    headers = {"Origin": "http://evil.example"}
    for path in ("/generate", "/v1/completions"):
        url, body = f"{server.url}{path}", b'{"prompt": "a"}'
        types = {} if media_type is None else {"Content-Type": media_type}
        reply = httpx.post(url, content=body, headers={**headers, **types}, trust_env=False)
        assert reply.status_code == 415
        asked = {**headers, "Access-Control-Request-Method": "POST"}
        reply = httpx.options(url, headers=asked, trust_env=False)
        assert reply.status_code == 405
        assert "access-control-allow-origin" not in reply.headers
    assert server.sample("logitd_sequences_finished_total") == 0
