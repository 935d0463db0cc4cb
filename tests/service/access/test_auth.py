"""API keys: accepted and refused requests; no key is ever shown."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from logitd.service.access.auth import KEY_FILE_BYTES, ApiKeyError, read_api_keys
from logitd.service.application.server import serve
from logitd.service.http.schemas import ErrorReply
from logitd.service.settings.serve import ServeSettings
from tests.service.serving import (
    Serving,
    eventually,
    read_all,
    read_until,
    request_bytes,
    serve_settings,
    serving,
)

ALICE, CI = "alices-secret-key", "0123456789=#/+~"
KEYS = f"alice={ALICE},ci={CI}"
PROTECTED = (
    *("/generate", "/logits", "/probs", "/score", "/hidden_states"),
    *("/attention", "/activations", "/stages", "/sweep", "/lens", "/attributions", "/circuit"),
    *("/induction", "/weights", "/weights/{name}", "/features", "/features/{index}", "/history"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"),
    *("/info", "/card", "/metrics", "/nothing", "/openapi", "/versions", "/healthz", "/static.js"),
)
PUBLIC = (
    *("/", "/docs", "/docs/assets/favicon.png", "/openapi.json", "/version"),
    *("/static/playground/main.js", "/health", "/health/live", "/health/ready"),
)


@pytest.fixture(scope="module")
def locked(checkpoint_path: Path) -> Iterator[Serving]:
    """A server that requires one of two keys."""
    with serving(checkpoint_path, api_keys=KEYS) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def unauthorized(response: httpx.Response) -> str:
    """The message of a response that must be 401."""
    assert response.status_code == 401, response.text[:300]
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = ErrorReply.model_validate(response.json()).error
    assert (error.type, error.code) == ("authentication_error", "invalid_api_key")
    return error.message


# Accepted and refused requests


@pytest.mark.parametrize("path", PROTECTED)
def test_protected_path_needs_a_key(locked: Serving, path: str) -> None:
    """Not even a 404 reveals which paths exist."""
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        assert "is required" in unauthorized(locked.client.request(method, path))
        response = locked.client.request(method, path, headers=bearer(ALICE))
        assert response.status_code != 401


@pytest.mark.parametrize("path", PUBLIC)
@pytest.mark.parametrize("headers", [{}, bearer("a wrong one"), bearer(CI)], ids=str)
def test_public_path_needs_no_key(locked: Serving, path: str, headers: dict[str, str]) -> None:
    assert locked.client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   "])
@pytest.mark.parametrize("key", [ALICE, CI])
def test_every_key_is_accepted(locked: Serving, scheme: str, key: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    response = locked.post("/generate", body, Authorization=f"{scheme}{key}")
    assert response.status_code == 200


@pytest.mark.parametrize(
    "value",
    [b"Bearer", b"Bearer ", b"", b"Bearer x", b"Bearer " + ALICE[:-1].encode(),
     b"Bearer " + ALICE.encode() + b"x", b"Bearer " + ALICE.upper().encode(),
     b"Basic " + ALICE.encode(), ALICE.encode(), b"Bearer alice", b"Bearer alice=" + ALICE.encode(),
     b"Bearer " + KEYS.encode(), b"Bearer " + ALICE.encode() + b" " + CI.encode(),
     b"Bearer \xc3\xa9", b"Bearer \xff\xfe", b"Bearer " + b"x" * 60_000,
     b"Bearer " + ALICE.encode() + b"\r\nAuthorization: Bearer " + CI.encode()],
    ids=lambda value: repr(value[:24]),
)  # fmt: skip
def test_other_authorization_is_refused(locked: Serving, value: bytes) -> None:
    for path in ("/info", "/generate"):
        with locked.connect() as raw:  # no client sends all of these headers
            head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode()
            raw.sendall(head + b"Authorization: " + value + b"\r\n\r\n")
            assert read_all(raw).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "target",
    ["/health/../info", "/version/../info", "//info", "/docs/%2e%2e/info", "/static/..%2f../info",
     "/%2e/info", "/docs/assets/../../info", "/info/", "/INFO", "/info%00", "/;/info", "/?/info",
     "/version?path=/info", "/health#/info", "http://x/health/../info"],
)  # fmt: skip
def test_no_spelling_of_a_path_avoids_the_check(locked: Serving, target: str) -> None:
    with locked.connect() as raw:
        raw.sendall(
            f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        assert b'"checkpoint"' not in read_all(raw)


def test_refusal_comes_before_the_body(locked: Serving) -> None:
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for more in ("Content-Length: 4000000", "Transfer-Encoding: chunked",
                 "Content-Length: 4000000\r\nExpect: 100-continue"):  # fmt: skip
        with locked.connect() as raw:
            raw.sendall(f"{head}{more}\r\n\r\n".encode())
            assert read_until(raw, b"\r\n\r\n").startswith(b"HTTP/1.1 401 ")


def test_refused_body_does_not_affect_the_next_request(locked: Serving) -> None:
    with locked.connect() as raw:
        raw.sendall(request_bytes("/tokenize", {"prompt": "x" * 100_000}))
        key = f"Authorization: Bearer {ALICE}"
        raw.sendall(request_bytes("/tokenize", {"prompt": "x"}, key, "Connection: close"))
        replies = read_all(raw)
    assert replies.count(b"HTTP/1.1 401 ") == 1
    assert replies.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("public", ["/metrics,/generate", ""])
def test_setting_decides_which_paths_are_public(checkpoint_path: Path, public: str) -> None:
    """/health is public whatever the setting says."""
    with serving(checkpoint_path, api_keys=KEYS, public_endpoints=public) as server:
        for path in ("/metrics", "/generate"):
            open_to_all = server.client.request("GET", path).status_code != 401
            assert open_to_all == bool(public)
        assert server.client.get("/health/live").status_code == 200
        for path in ("/", "/docs", "/version", "/metrics-not", "/info"):
            unauthorized(server.client.get(path))


# Names of callers


def test_log_and_metrics_name_callers(
    checkpoint_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    with serving(checkpoint_path, api_keys=KEYS) as server:
        assert calls(server) == {"alice": 0, "ci": 0, "none": 0}
        server.client.get("/stages", headers=bearer(ALICE) | {"X-Request-ID": "a"})
        server.client.get("/version", headers=bearer(CI) | {"X-Request-ID": "b"})
        server.client.get("/version", headers=bearer("wrong-key") | {"X-Request-ID": "c"})
        server.client.get("/info", headers={"X-Request-ID": "d"})
        eventually(lambda: calls(server) == {"alice": 1, "ci": 1, "none": 2})
        eventually(lambda: len(http_lines(caplog)) == 4)  # the log line is written after the reply
    lines = http_lines(caplog)
    assert [line.partition(" ms ")[2] for line in lines] == [
        "a key=alice", "b key=ci", "c key=none", "d key=none"
    ]  # fmt: skip


def http_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines of requests."""
    return [record.getMessage() for record in caplog.records if record.name == "logitd.http"]


def calls(server: Serving) -> dict[str, float | None]:
    """Number of counted requests for each key name; None for a name without a series in the
    metric."""
    sample = server.state.metrics.registry.get_sample_value
    names = ("alice", "ci", "none")
    return {name: sample("logitd_api_key_requests_total", {"key": name}) for name in names}


def test_server_without_keys_names_no_callers(
    server: Serving, locked: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "logitd.http")
    server.client.get("/version", headers=bearer(ALICE))
    eventually(lambda: len(http_lines(caplog)) == 1)
    assert "key=" not in caplog.text
    assert 'key="' not in server.client.get("/metrics").text
    assert server.client.get("/info").json()["api_keys"] is False
    assert locked.client.get("/info", headers=bearer(CI)).json()["api_keys"] is True


def test_unknown_keys_create_no_series(locked: Serving) -> None:
    before = locked.client.get("/metrics", headers=bearer(CI)).text.count("logitd_api_key_requests")
    for number in range(20):
        locked.client.get("/info", headers=bearer(f"key-number-{number}"))
    after = locked.client.get("/metrics", headers=bearer(CI)).text.count("logitd_api_key_requests")
    assert after == before


# Secrecy


def test_no_reply_or_log_line_contains_a_key(
    locked: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = "a-key-with-a-typing-error"
    replies = [
        locked.client.request(method, path, headers=bearer(key), json={"prompt": "a", "n": 0})
        for method in ("GET", "POST")
        for path in (*PROTECTED, *PUBLIC)
        for key in (sent, ALICE)
    ]
    shown = [*(reply.text for reply in replies), *(str(reply.headers) for reply in replies)]
    shown += [caplog.text, repr(locked.state.keys), repr(vars(locked.state))]
    shown += [str(vars(locked.served)), repr(locked.app.user_middleware)]
    for secret in (sent, ALICE, CI):
        assert not any(secret in one for one in shown)
    assert "/info" in caplog.text


def test_keys_show_not_even_a_digest() -> None:
    assert repr(read_api_keys(SecretStr(KEYS), None)) == "ApiKeys()"


def test_openapi_marks_what_needs_a_key(locked: Serving, server: Serving) -> None:
    document = locked.client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path in PROTECTED), path
    assert "securitySchemes" not in server.client.get("/openapi.json").json()["components"]


# Keys from a setting and from a file


def test_keys_come_from_setting_and_file(tmp_path: Path, checkpoint_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who: key\n\n  bob = {'b' * 8}  \ncarol={'c' * 8}=#\n")
    keys = read_api_keys(SecretStr(f" alice = {ALICE} , ci={CI}"), file)
    assert keys.names == ("alice", "ci", "bob", "carol")
    for name, key in {"alice": ALICE, "ci": CI, "bob": "b" * 8, "carol": "c" * 8 + "=#"}.items():
        assert keys.name_of(key.encode()) == name
    with serving(checkpoint_path, api_key_file=file) as server:
        unauthorized(server.client.get("/info", headers=bearer(ALICE)))
        assert server.client.get("/info", headers=bearer("bbbbbbbb")).status_code == 200


def test_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice={ALICE}\n", encoding="utf-8-sig")
    assert read_api_keys(None, file).names == ("alice",)


@pytest.mark.parametrize(("length", "warned"), [(15, True), (16, False)])
def test_short_key_is_accepted_with_a_warning(
    length: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key = "k" * length
    assert read_api_keys(SecretStr(f"ann={key}"), None).names == ("ann",)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert ("entry 1 of the API keys has a key of 15 characters" in caplog.text) == warned
    assert key not in caplog.text


@given(st.binary())
def test_any_key_bytes_are_handled(presented: bytes) -> None:
    keys = read_api_keys(SecretStr(KEYS), None)
    expected = {ALICE.encode(): "alice", CI.encode(): "ci"}.get(presented)
    assert keys.name_of(presented) == expected


LISTED = {
    "": "entry 1 of the API keys is not of the form NAME=KEY",
    "alice": "entry 1 of the API keys is not of the form NAME=KEY",
    f"alice={ALICE},": "entry 2 of the API keys is not of the form NAME=KEY",
    f"alice={ALICE},hidden-secret": "entry 2 of the API keys is not of the form NAME=KEY",
    "alice=": "entry 1 of the API keys has a key of 0 characters; at least 8 are needed",
    "alice=1234567": "entry 1 of the API keys has a key of 7 characters; at least 8 are needed",
    f"={ALICE}": "entry 1 of the API keys has a name that cannot be used",
    f"a b={ALICE}": "entry 1 of the API keys has a name that cannot be used",
    f"ä={ALICE}": "entry 1 of the API keys has a name that cannot be used",
    f"{'n' * 65}={ALICE}": "entry 1 of the API keys has a name that cannot be used",
    f"none={ALICE}": "entry 1 of the API keys has a name that cannot be used",
    "alice=hidden secret": "entry 1 of the API keys has a key that a header cannot hold",
    "alice=hidden-sécret": "entry 1 of the API keys has a key that a header cannot hold",
    "alice=hidden\x00secret": "entry 1 of the API keys has a key that a header cannot hold",
    f"a={ALICE},b={CI},a=hidden-secret": "entry 3 of the API keys has the same name as entry 1",
    f"a={ALICE},b={ALICE}": "entry 2 of the API keys has the same key as entry 1",
}


@pytest.mark.parametrize("listed", LISTED)
def test_unusable_key_is_refused_without_being_shown(listed: str) -> None:
    with pytest.raises(ApiKeyError) as caught:
        read_api_keys(SecretStr(listed), None)
    message = str(caught.value)
    assert message.startswith(LISTED[listed])
    for secret in (ALICE, CI, "hidden", "1234567"):
        assert secret not in message


def test_unusable_line_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text, problem in {
        "# none yet\n\n": f"the API key file {file} has no keys; write one NAME=KEY on each line",
        "": f"the API key file {file} has no keys; write one NAME=KEY on each line",
        f"# a\ncarol={'c' * 9}\nbob\n": f"line 3 of the API key file {file} is not of the form",
        f"carol={CI}\n": f"line 1 of the API key file {file} has the same key as entry 2 of the",
        f"alice={'x' * 8}": f"line 1 of the API key file {file} has the same name as entry 1 of",
    }.items():
        file.write_text(text)
        with pytest.raises(ApiKeyError) as caught:
            read_api_keys(SecretStr(KEYS), file)
        assert str(caught.value).startswith(problem)
        assert ALICE not in str(caught.value)
    file.write_bytes(b"alice=\xff\xff\xff\xff\xff\xff\xff\xff")
    with pytest.raises(ApiKeyError, match="is not UTF-8 text"):
        read_api_keys(None, file)
    with pytest.raises(ApiKeyError, match="cannot be read: No such file or directory"):
        read_api_keys(None, tmp_path / "missing")


@pytest.mark.parametrize(
    ("put", "problem"),
    [
        (os.mkfifo, "is a pipe"),
        (os.mkdir, "is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"#" * (KEY_FILE_BYTES + 1)), "the limit is"),
    ],
    ids=["pipe", "directory", "zeros", "loop", "large"],
)  # fmt: skip
def test_unusable_file_is_refused_at_once(
    tmp_path: Path, put: Callable[[Path], object], problem: str
) -> None:
    """The server rereads the file while it answers requests, so reading must not block."""
    put(tmp_path / "keys")
    with pytest.raises(ApiKeyError, match=problem):
        read_api_keys(None, tmp_path / "keys")


def test_server_with_unusable_keys_does_not_start(
    checkpoint_path: Path, logged_errors: list[str]
) -> None:
    settings: ServeSettings = serve_settings(checkpoint_path, port=0, api_keys="alice=short")
    assert serve(settings, announce=lambda served, port: None) == 1
    (line,) = logged_errors
    assert line.startswith("cannot serve: entry 1 of the API keys has a key of 5 characters; ")
    logged_errors.clear()
