"""Broken bodies, wrong paths and methods: each is refused with a short message, and the service
continues."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitd.model.operations.generate import GenerateRequest
from tests.profiles import examples
from tests.service.serving import Serving, error_of, read_all, read_until, request_bytes, serving

POSTS = ("/generate", "/logits", "/probs", "/v1/completions")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small(checkpoint_path: Path) -> Iterator[Serving]:
    """A service with low limits."""
    with serving(
        checkpoint_path, slots=2, max_queue=3, max_sequences=8, max_body_bytes=2000
    ) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def it_goes_on(server: Serving) -> Iterator[None]:
    """Check that the server still generates after all tests of this module."""
    yield
    assert server.generate("a", max_tokens=1, seed=1)["choices"][0]["token_ids"]


# Limits


def test_more_sequences_than_slots_and_queue_are_refused_with_400(small: Serving) -> None:
    """With 429 the client would retry forever."""
    for path, body in [("/generate", {"prompt": "a", "n": 6}), ("/probs", {"prompt": ["a"] * 6}),
                       ("/logits", {"prompt": ["a"] * 6})]:  # fmt: skip
        error = small.refused(path, body)
        assert "only 5 fit: 2 in slots and 3 in the queue" in error.message
    assert len(small.generate("a", n=5, max_tokens=1)["choices"]) == 5


# Bodies

BAD_JSON = {
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "huge int": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "huge exponent": b'{"prompt": "a", "n": 1e400000000000}',
    "surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
    "bad utf-8": b'{"prompt": "\xff\xfe"}',
    "empty": b"",
    "list": b'["a"]',
    "deep list": b'{"prompt": ' + b"[" * 100_000,
    "deep closed list": b'{"prompt": ' + b"[" * 180 + b"]" * 180 + b"}",
    "deep object": b'{"a":' * 100_000,
    "many names": b"{" + b",".join(b'"f%d":1' % i for i in range(100_000)) + b"}",
    "a long name": b'{"prompt": "a", "' + b"x" * 1_000_000 + b'": 1}',
    "a million nulls": b'{"prompt": [' + b"null," * 800_000 + b"null]}",
    "a million negative ids": b'{"prompt": [' + b"-1," * 1_000_000 + b"-1]}",
    "a million texts": b'{"prompt": [' + b'"",' * 1_000_000 + b'""]}',
    "a million stops": b'{"prompt": "a", "stop": [' + b'"",' * 1_000_000 + b'""]}',
    "a million positions": b'{"prompt": "a", "positions": [' + b"0," * 1_500_000 + b"0]}",
}
"""Large, deep or broken bodies; `tests/model/operations/test_body.py` has more broken ones."""


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", BAD_JSON)
def test_wrong_body_is_refused(server: Serving, path: str, name: str) -> None:
    server.refused(path, BAD_JSON[name])


LARGE = {
    "lists": (b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}", 2_600_004, 1_300_004),
    "nulls": (BAD_JSON["a million nulls"], 800_003, 3),
    "lists that nest": (b'{"prompt": [' + (b"[" * 60 + b"]" * 60 + b",") * 30_000 + b"1]}",
                        1_830_003, 1_800_003),
    "unknown names": (BAD_JSON["many names"], 100_001, 100_001),
    "ids": (b'{"prompt": [' + b"1," * 150_000 + b"1]}", 150_003, 3),
}  # fmt: skip
"""Bodies that consist almost only of structure. Each comes with its number of values (an empty list
counts as one) and its number of lists, objects and keys."""


@pytest.mark.parametrize("name", LARGE)
def test_deeply_structured_body_is_not_parsed(
    server: Serving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of nested lists once blocked the event loop, and with it every stream, for a second."""

    def parsed(*_: Any, **__: Any) -> Any:
        raise AssertionError("this body must be refused before it is parsed")

    body, values, parts = LARGE[name]
    with monkeypatch.context() as patch:
        patch.setattr(GenerateRequest, "model_validate_json", parsed)
        error = server.refused("/generate", body)
    assert error.code == "body_too_large"
    assert f"has up to {values} JSON values" in error.message
    assert f"and {parts} lists, objects and keys" in error.message


def test_structure_inside_a_text_is_text(server: Serving) -> None:
    """A prompt of code may have any number of brackets and commas."""
    error = server.refused("/generate", {"prompt": 'f([{"a": 1}, \\"],' * 150_000})
    assert error.code == "context_length_exceeded"


def test_nul_and_other_odd_characters_are_fine(server: Serving) -> None:
    prompt = "\x00\x1f\u2028\ufeff\uffff😀"
    reply = server.generate(prompt, max_tokens=1, echo=True)
    assert reply["choices"][0]["text"].startswith(prompt)
    assert reply["usage"]["prompt_tokens"] == len(prompt.encode())


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/octet-stream", "", None, "json", "application/jsonx", "x" * 5000, "\xff"],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_wrong_content_type_is_refused(server: Serving, content_type: str | None) -> None:
    headers = [] if content_type is None else [(b"Content-Type", content_type.encode("latin-1"))]
    response = server.client.post("/generate", content=b'{"prompt": "a"}', headers=headers)
    assert "application/json" in error_of(response, 415).message


@pytest.mark.parametrize("charset", ["utf-16", "iso-8859-1", '"latin1"', ""])
def test_charset_other_than_utf8_is_refused(server: Serving, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    response = server.client.post("/generate", content=b'{"prompt": "a"}', headers=headers)
    assert repr(charset.strip('"')) in error_of(response, 415).message


@pytest.mark.parametrize("charset", ["utf-8", '"UTF-8"', "utf8", "us-ascii"])
def test_utf8_charset_is_accepted(server: Serving, charset: str) -> None:
    headers = {"Content-Type": f"application/json; a=b; Charset={charset}"}
    content = b'{"prompt": "a", "max_tokens": 1}'
    assert server.client.post("/generate", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "pr\\u006fmpt" : "b"}',
        b'{"prompt": [' + b"1," * 9000 + b'1], "prompt": "b"}',
    ],
    ids=["short", "escaped", "long"],
)
def test_repeated_key_is_refused(server: Serving, path: str, body: bytes) -> None:
    error = server.refused(path, body)
    assert error.param == "prompt"
    assert "'prompt' is twice" in error.message


@pytest.mark.parametrize(
    "header",
    [
        "Content-Encoding: gzip",
        "Content-Encoding: identity, br",
        "Transfer-Encoding: gzip, chunked",
    ],
)
def test_encoded_body_is_refused(server: Serving, header: str) -> None:
    """If the server read the body without decoding it, it would read a different body."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    framing = "" if header.startswith("Transfer") else "Transfer-Encoding: chunked\r\n"
    with server.connect() as raw:
        raw.sendall(f"{head}{framing}{header}\r\nConnection: close\r\n\r\n".encode())
        raw.sendall(b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n')
        reply = read_all(raw)
    assert reply.startswith(b"HTTP/1.1 415 ")
    assert b"the body is encoded as" in reply


def test_identity_encoded_body_is_read(server: Serving) -> None:
    headers = {"Content-Encoding": "identity", "Content-Type": "application/json"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert server.client.post("/generate", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON",
     "application/vnd.api+json"],
)  # fmt: skip
def test_json_content_types_are_accepted(server: Serving, content_type: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    response = server.client.post("/generate", content=body, headers={"Content-Type": content_type})
    assert response.status_code == 200


# Size


def padded(size: int) -> bytes:
    body = b'{"prompt": "a", "max_tokens": 1'
    return body + b" " * (size - len(body) - 1) + b"}"


def test_body_up_to_the_limit_is_read(small: Serving) -> None:
    assert small.post("/generate", padded(2000)).status_code == 200
    error = small.refused("/generate", padded(2001), 413)
    assert error.code == "body_too_large"
    assert "2000 bytes" in error.message
    assert "--max-body-bytes" in error.message


@pytest.mark.parametrize("size", [2001, 5_000_000])
def test_chunked_body_is_counted_on_arrival(small: Serving, size: int) -> None:
    body = padded(size)
    pieces = (body[start : start + 1000] for start in range(0, size, 1000))
    error_of(small.client.post("/generate", content=pieces, headers=JSON), 413)
    pieces = (padded(2000)[start : start + 1] for start in range(2000))
    assert small.client.post("/generate", content=pieces, headers=JSON).status_code == 200


def test_declared_too_large_body_is_not_read(small: Serving) -> None:
    """curl sends `Expect: 100-continue` and waits before it sends a large body."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for length, answer in [(10**12, b"HTTP/1.1 413 "), (2000, b"HTTP/1.1 100 Continue")]:
        with small.connect() as raw:
            raw.sendall(f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert read_until(raw, b"\r\n\r\n").startswith(answer)


def test_connection_continues_after_a_refused_body(small: Serving) -> None:
    with small.connect() as raw:
        raw.sendall(request_bytes("/generate", padded(100_000)))
        raw.sendall(request_bytes("/generate", padded(1000), "Connection: close"))
        replies = read_all(raw)
    assert replies.count(b"HTTP/1.1 413 ") == 1
    assert replies.count(b"HTTP/1.1 200 ") == 1


# Paths and methods


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/generate_stream", "/api/generate", "/api/chat", "/api/tags", "/generate/",
     "//generate", "/Generate", "/health/dead", "/%00", "/a%0d%0ab",
     "/docs/assets/", "/docs/assets/../app.py", "/docs/assets/%2e%2e/__init__.py", "/" + "x" * 9000,
     "/%ff"],
    ids=lambda path: path[:30],
)  # fmt: skip
def test_unknown_path_is_404(server: Serving, path: str) -> None:
    for send in (server.client.get, server.client.post):
        response = send(f"{server.url}{path}")
        if response.status_code != 405:  # a missing file has no methods either
            assert "there is no /" in error_of(response, 404).message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(method, path, "POST") for path in POSTS for method in ("GET", "PUT", "DELETE", "PATCH")]
    + [(method, path, "GET") for path in ("/health", "/info", "/metrics") for method in ("POST",)]
    + [(method, "/", "GET") for method in ("POST", "PUT", "OPTIONS")],
)  # fmt: skip
def test_wrong_method_is_405(server: Serving, method: str, path: str, allowed: str) -> None:
    response = server.client.request(method, path, json={"prompt": "a"})
    error = error_of(response, 405)
    assert response.headers["allow"] == allowed
    assert f"does not support {method}" in error.message


# Random bytes

JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("path", POSTS)
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60) | JSON_VALUE.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_get_an_answer(server: Serving, path: str, raw: bytes) -> None:
    response = server.post(path, raw)
    assert response.status_code < 500
    assert response.status_code == 200 or error_of(response, response.status_code)
