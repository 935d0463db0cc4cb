"""Settings of a client, and its waits before retries. Nothing is sent."""

import re
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd import APIConnectionError, APIStatusError, AsyncClient, Client, LogitdError
from logitd.service.client.calls import Request
from logitd.service.client.transport import DEFAULT_BASE_URL, Exchange, Settings, settings_of

KEY = "sk-0123456789abcdef"
GET = Request("GET", "/info")


def settings(
    base_url: str | None = None,
    api_key: str | None = None,
    timeout: float | None = 600.0,
    max_retries: int = 2,
    http: httpx.Client | None = None,
) -> Settings:
    return settings_of(base_url, api_key, timeout, max_retries, http=http)


def exchange(request: Request = GET, tries: int = 1, **options: Any) -> Exchange:
    """Prepare a call as if it had been tried this many times."""
    one = Exchange(settings(**options), request)
    with httpx.Client(verify=False) as http:  # reads no certificates: nothing is sent
        for _ in range(tries):
            one.next_try(http)
    return one


def wait(status: int, asked: str | None = None, **options: Any) -> float:
    headers = {} if asked is None else {"Retry-After": asked}
    return exchange(**options).wait_after_refusal(httpx.Response(status, headers=headers), b"")


# Settings


def test_arguments_win_over_the_environment_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().base_url == DEFAULT_BASE_URL == "http://127.0.0.1:8000"
    assert settings().key is None
    monkeypatch.setenv("LOGITD_BASE_URL", "http://environment:1")
    monkeypatch.setenv("LOGITD_API_KEY", KEY)
    assert (settings().base_url, settings().key) == ("http://environment:1", KEY)
    with httpx.Client(base_url="https://own/prefix") as http:
        assert settings(http=http).base_url == "https://own/prefix"
        assert settings("http://given/", "other", http=http).base_url == "http://given"
    with httpx.Client() as http:
        assert settings(http=http).base_url == "http://environment:1"
    assert settings(api_key="other").key == "other"
    monkeypatch.setenv("LOGITD_API_KEY", "")
    assert settings().key is None


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("127.0.0.1:8000", "http:// or https://"),
        ("localhost", "http:// or https://"),
        ("ftp://host", "http:// or https://"),
        ("http://", "http:// or https://"),
        ("http://host/?a=b", "http:// or https://"),
        ("http://host/#a", "http:// or https://"),
        ("http://host:port", "not a URL"),
        ("http://\n", "not a URL"),
    ],
)
def test_wrong_addresses_are_refused(url: str, complaint: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=complaint):
            kind(url)


def test_password_in_an_address_is_refused_and_not_repeated() -> None:
    """Otherwise, httpx would send the password instead of the API key."""
    with pytest.raises(ValueError, match="password") as caught:
        Client("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\nb", "abc\n", "a b", "kéy", "\0"])
def test_key_with_other_characters_is_refused_and_not_repeated(key: str) -> None:
    """Otherwise, h11 would repeat the key in its error."""
    with pytest.raises(ValueError, match=f"has {len(key)} characters") as caught:
        Client(api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": 0}, {"timeout": -1.0}, {"timeout": float("nan")}, {"timeout": float("inf")},
     {"timeout": 2.0**21 + 1}, {"max_retries": -1}],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Client(**wrong)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"base_url": 5}, "base_url is 5; it must be a text"),
        ({"api_key": 12345}, "api_key is a int; it must be a text"),
        ({"timeout": "5"}, "timeout is '5'; it must be a number of seconds"),
        ({"max_retries": None}, "max_retries is None; it must be a whole number"),
        ({"max_retries": 1.5}, "max_retries is 1.5; it must be a whole number"),
        ({"model": 5}, "model is 5; it must be a text"),
        ({"http": "x"}, "http is 'x'; it must be an httpx."),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(
    kind: type[Client | AsyncClient], wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        kind(**wrong)


@pytest.mark.parametrize(
    ("kind", "other"), [(Client, httpx.AsyncClient), (AsyncClient, httpx.Client)]
)
def test_http_client_of_the_other_kind_is_refused(kind: Any, other: Any) -> None:
    with pytest.raises(TypeError, match="it must be an httpx"):
        kind(http=other())


def test_limits_include_that_of_connecting() -> None:
    assert settings(timeout=600).limits == httpx.Timeout(600, connect=10)
    assert settings(timeout=2).limits == httpx.Timeout(2)
    assert settings(timeout=None).limits == httpx.Timeout(None, connect=10)


def test_request_has_the_settings() -> None:
    post = Request("POST", "/logits", {}, accept="a/b")
    with httpx.Client(headers={"X-Own": "1"}) as http:
        first = Exchange(settings("https://host/prefix/", KEY, timeout=5), post)
        request = first.next_try(http)
        other = Exchange(settings(), GET).next_try(http)
    assert str(request.url) == "https://host/prefix/logits"
    assert (request.method, request.content) == ("POST", b"{}")
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert request.headers["Content-Type"] == "application/json"
    assert (request.headers["Accept"], request.headers["X-Own"]) == ("a/b", "1")
    assert request.headers["X-Request-ID"] == first.request_id
    assert request.extensions["timeout"]["read"] == 5
    assert "Authorization" not in other.headers
    assert "Content-Type" not in other.headers
    assert other.headers["X-Request-ID"] != first.request_id


# Retries


@pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 415, 431, 499, 500, 501, 504])
def test_other_refusals_are_not_tried_again(status: int) -> None:
    """A 504 is not retried either, because the request ran until its deadline."""
    with pytest.raises(APIStatusError) as caught:
        wait(status, "1")
    assert caught.value.status == status


@given(st.integers(0, 60), st.sampled_from([429, 503]))
def test_wait_is_the_servers_and_a_little_more(asked: int, status: int) -> None:
    assert asked <= wait(status, str(asked)) <= asked + 0.25


@given(st.integers(61, 10**8))
def test_too_long_a_wait_is_refused(asked: int) -> None:
    with pytest.raises(APIStatusError) as caught:
        wait(429, str(asked), timeout=None)
    assert caught.value.retry_after == asked


def test_waits_stay_within_the_timeout() -> None:
    assert wait(429, "5", timeout=6) >= 5
    with pytest.raises(APIStatusError):
        wait(429, "5", timeout=4.9)
    late = exchange(timeout=6)
    late._began = time.monotonic() - 3  # the client has already waited this long
    with pytest.raises(APIStatusError):
        late.wait_after_refusal(httpx.Response(429, headers={"Retry-After": "5"}), b"")
    assert wait(429, "5", timeout=None) >= 5


@given(st.integers(1, 40))
def test_waits_double_up_to_a_limit(tries: int) -> None:
    longest = min(0.5 * 2 ** (tries - 1), 8)
    assert longest / 2 <= wait(503, tries=tries, max_retries=40) <= longest


def test_waits_are_random() -> None:
    assert len({wait(503) for _ in range(20)}) > 10
    assert len({wait(503, "3") for _ in range(20)}) > 10


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError("x"), httpx.ConnectTimeout("x"), httpx.ReadError(""),
     httpx.WriteError("x"), httpx.RemoteProtocolError("x"), httpx.CloseError("x")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_lost_connections_are_made_again(error: httpx.RequestError) -> None:
    assert 0 < exchange().wait_after_error(error) <= 0.5
    with pytest.raises(APIConnectionError, match=r"127\.0\.0\.1:8000") as caught:
        exchange(max_retries=0).wait_after_error(error)
    assert caught.value.request_id


@pytest.mark.parametrize(
    "error",
    [httpx.ReadTimeout("x"), httpx.WriteTimeout("x"), httpx.PoolTimeout("x"),
     httpx.LocalProtocolError("x"), httpx.ProxyError("x"), httpx.UnsupportedProtocol("x"),
     httpx.DecodingError("x"), httpx.TooManyRedirects("x")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_other_errors_are_not_tried_again(error: httpx.RequestError) -> None:
    with pytest.raises(APIConnectionError) as caught:
        exchange().wait_after_error(error)
    assert isinstance(caught.value, LogitdError)
    assert caught.value.__cause__ is error


def test_key_appears_in_no_repr() -> None:
    known = settings(api_key=KEY)
    assert KEY not in repr(known)
    assert KEY not in repr(known.headers(GET, "id"))
