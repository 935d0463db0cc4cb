"""Transport: the settings of a client, its rules for retries, and the translation of httpx's
errors.

A call is retried if a retry can help: after 429, 502 or 503, or if the connection failed or was
lost. It is never retried once a part of its result has arrived, for example in the middle of a
stream. It is not retried after 504 either, or if the server was silent for longer than `timeout`,
because a retry would probably take as long. Requests only compute, so it does no harm if the server
computes one twice.

`wire.py` sends the requests and waits between them.
"""

import os
import random
import re
import time
import uuid
from dataclasses import dataclass, field
from numbers import Integral, Real

import httpx

from logitd.service.client import errors
from logitd.service.client.calls import Answer, Request
from logitd.service.client.errors import (
    APIConnectionError,
    APITimeoutError,
    LogitdError,
    StreamError,
)

DEFAULT_BASE_URL = "http://127.0.0.1:8000"

CONNECT_SECONDS = 10.0
"""Time limit in seconds for establishing a connection, even if `timeout` is longer."""
MAX_WAIT_SECONDS = 60.0
"""Longest wait in seconds that a client accepts from a Retry-After header. If the header asks for
more, the call fails."""
MAX_TIMEOUT_SECONDS = 2**21
"""Longest timeout in seconds: 24 days, because sockets store a timeout as milliseconds in 31
bits."""
FIRST_WAIT_SECONDS = 0.5
"""Longest wait in seconds before the second try if the server does not set the wait with
Retry-After. It doubles before each further try, up to MAX_OWN_WAIT_SECONDS."""
MAX_OWN_WAIT_SECONDS = 8.0
MAX_REFUSAL_BYTES = 2**16
"""Maximum number of bytes read from a refusal."""

RETRIED_STATUSES = (429, 502, 503)
CONNECTION_LOST = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.CloseError,
    httpx.RemoteProtocolError,
)

_KEY = re.compile(r"[!-~]+")  # characters that a header can contain without encoding


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a client. Neither their repr nor the repr of httpx's headers shows `key`."""

    base_url: str
    timeout: float | None
    max_retries: int
    model: str | None
    key: str | None = field(repr=False)

    @property
    def limits(self) -> httpx.Timeout:
        """The time limits for connecting, and for waiting without receiving a byte of the reply."""
        connect = CONNECT_SECONDS if self.timeout is None else min(self.timeout, CONNECT_SECONDS)
        return httpx.Timeout(self.timeout, connect=connect)

    def headers(self, request: Request, request_id: str) -> httpx.Headers:
        headers = httpx.Headers({"Accept": request.accept, "X-Request-ID": request_id})
        if request.method == "POST":
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers


def settings_of(
    base_url: str | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retries: int = 0,
    model: str | None = None,
    http: httpx.Client | httpx.AsyncClient | None = None,
    *,
    kind: type[httpx.Client] | type[httpx.AsyncClient] = httpx.Client,
) -> Settings:
    """The settings of a client. Each setting comes from the first source that has it: the
    arguments, the caller's httpx client (of type `kind`), LOGITD_BASE_URL and LOGITD_API_KEY, the
    defaults. Raises ValueError and TypeError for unusable values."""
    for name, value, types, words in (
        ("base_url", base_url, str, "a text"),
        ("api_key", api_key, str, "a text"),
        ("timeout", timeout, Real, "a number of seconds"),
        ("max_retries", max_retries, Integral, "a whole number"),
        ("model", model, str, "a text"),
        ("http", http, kind, f"an httpx.{kind.__name__}"),
    ):
        if not isinstance(value, types) and (value is not None or name == "max_retries"):
            shown = f"a {type(value).__name__}" if name == "api_key" else repr(value)
            raise TypeError(f"{name} is {shown}; it must be {words}")
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT_SECONDS:
        raise ValueError(
            f"timeout is {timeout}; it must be a number of seconds above 0 and at most "
            f"{MAX_TIMEOUT_SECONDS}, or None for no limit"
        )
    if max_retries < 0:
        raise ValueError(f"max_retries is {max_retries}; it must be 0 (one try) or more")
    own = "" if http is None else str(http.base_url)
    url = base_url or own or os.environ.get("LOGITD_BASE_URL") or DEFAULT_BASE_URL
    key = api_key or os.environ.get("LOGITD_API_KEY") or None
    if key is not None and not _KEY.fullmatch(key):
        raise ValueError(
            f"the API key has {len(key)} characters, some of which an HTTP header cannot contain: "
            "remove line breaks, spaces and non-ASCII characters"
        )
    return Settings(_checked(url), timeout, max_retries, model, key)


def _checked(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is not a URL: {error}") from None
    if url.userinfo:  # do not repeat it: it may contain a password
        raise ValueError(
            "base_url contains a user name or a password; remove them. If a proxy needs them, pass "
            "an httpx.Client with auth= as http="
        )
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(
            f"base_url is {base_url!r}; it must be http:// or https:// and a host, optionally with "
            "a path"
        )
    return str(url).rstrip("/")


class Exchange:
    """A call in progress: its request id, its tries, and their errors."""

    def __init__(self, settings: Settings, request: Request) -> None:
        self.request_id = uuid.uuid4().hex  # the same for each try; the server may replace it
        self._settings = settings
        self._request = request.to_model(settings.model)
        self._headers = settings.headers(request, self.request_id)
        self._body = self._request.body
        self._tries = 0
        self._began = time.monotonic()

    def next_try(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Begin the next try, and return the request to send."""
        self._tries += 1
        return http.build_request(
            self._request.method,
            self._settings.base_url + self._request.target,
            content=self._body,
            headers=self._headers,
            timeout=self._settings.limits,
        )

    def begun(self, response: httpx.Response) -> bool:
        """Take the request id from the beginning of a reply. Returns False if the reply is a
        refusal."""
        self.request_id = response.headers.get("x-request-id", self._headers["x-request-id"])
        return response.status_code in self._request.answers

    def wait_after_error(self, error: httpx.RequestError) -> float:
        """Seconds until the next try. Raises the error if there is no further try."""
        failure = self._no_answer(error)
        if not isinstance(error, CONNECTION_LOST):
            raise failure from error
        return self._wait(failure, None)

    def wait_after_refusal(self, response: httpx.Response, body: bytes) -> float:
        """Seconds until the next try. Raises the error if there is no further try."""
        if self._settings.key is not None:  # some proxies' error pages repeat the request's headers
            body = body.replace(self._settings.key.encode(), b"[API key]")
        status = response.status_code
        failure = errors.from_reply(status, response.headers, body, self.request_id)
        if status not in RETRIED_STATUSES:
            raise failure
        return self._wait(failure, failure.retry_after)

    def answer(self, response: httpx.Response, body: bytearray) -> Answer:
        """The reply as an `Answer`. Its whole `body` must have been read."""
        return Answer(response.status_code, response.headers, body, self.request_id)

    def broken_off(self, error: httpx.RequestError, received: int, *, stream: bool) -> LogitdError:
        """The error for a reply that ended early. `received` is the number of bytes received, or of
        tokens for a stream."""
        kind, unit = ("stream", "tokens") if stream else ("reply", "bytes")
        if isinstance(error, httpx.TimeoutException):
            message = f"the {kind} stalled for {self._settings.timeout:g} s after {received} {unit}"
            return APITimeoutError(message, self.request_id)
        message = f"the {kind} broke off after {received} {unit}: {_reason(error)}"
        if stream:
            return StreamError(message, received, self.request_id)
        return APIConnectionError(message, self.request_id)

    def _no_answer(self, error: httpx.RequestError) -> APIConnectionError:
        """The error for a request whose reply never began."""
        url, seconds = self._settings.base_url, self._settings.timeout
        match error:
            case httpx.ConnectTimeout():
                message = f"no connection to {url} within {self._settings.limits.connect} s"
            case httpx.PoolTimeout():
                message = (
                    f"no connection became free within {seconds:g} s: too many calls at once for "
                    "the limits of this httpx client"
                )
            case httpx.TimeoutException():
                message = f"{url} did not answer within {seconds:g} s"
            case httpx.ConnectError():
                message = f"no connection to {url}: {_reason(error)}. Is the server running?"
            case _:
                message = f"{url} did not answer: {_reason(error)}"
        kind = APITimeoutError if isinstance(error, httpx.TimeoutException) else APIConnectionError
        return kind(message, self.request_id)

    def _wait(self, failure: LogitdError, asked: float | None) -> float:
        """Seconds until the next try: at least the wait that the server `asked` for. If `asked` is
        None, the client chooses the wait, up to MAX_OWN_WAIT_SECONDS. The wait is partly random, so
        that clients refused at the same time do not retry at the same time. Raises the failure if
        no try is left, if `asked` exceeds MAX_WAIT_SECONDS, or if the wait would exceed the
        client's timeout."""
        spread = random.uniform(0.5, 1.0)
        if asked is None:
            own = FIRST_WAIT_SECONDS * 2 ** (self._tries - 1)
            wait = min(own, MAX_OWN_WAIT_SECONDS) * spread
        else:
            wait = asked + FIRST_WAIT_SECONDS * (spread - 0.5)
        waited = time.monotonic() - self._began
        limit = self._settings.timeout
        if (
            self._tries > self._settings.max_retries
            or (asked is not None and asked > MAX_WAIT_SECONDS)
            or (limit is not None and waited + wait > limit)
        ):
            raise failure
        return wait


def _reason(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
