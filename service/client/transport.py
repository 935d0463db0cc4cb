"""Transport: what both clients do around httpx, less the waiting.

Where the server is and how it is asked; when a call is tried again; which of our errors an error of
httpx is. A call is tried again only before any of its reply has come, so never in the middle of a
stream, and only where another try can help: 429, 502, 503, or a connection that was not made or was
lost. Never after 504, whoever says it, nor after a timeout: the request ran for all that time and
would run again. Every request computes and changes nothing, so one that ran unseen does no harm.
"""

import os
import random
import re
import time
import uuid
from dataclasses import dataclass, field

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
"""To make a connection takes no longer than this, whatever the timeout for a reply."""
MAX_WAIT_SECONDS = 60.0
"""A server that wants more before the next try gets none."""
FIRST_WAIT_SECONDS = 0.5
"""Without a word of the server; twice as long before each further try, up to the next."""
MAX_OWN_WAIT_SECONDS = 8.0
MAX_REFUSAL_BYTES = 2**16
"""Of a refusal no more is read."""

RETRIED_STATUSES = (429, 502, 503)
CONNECTION_LOST = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.CloseError,
    httpx.RemoteProtocolError,
)

_KEY = re.compile(r"[!-~]+")  # what a header can hold without quotes or encodings


@dataclass(frozen=True, slots=True)
class Settings:
    """How a client asks. `key` stands in no repr, and httpx hides it in that of its headers."""

    base_url: str
    timeout: float | None
    max_retries: int
    key: str | None = field(repr=False)

    @property
    def limits(self) -> httpx.Timeout:
        """Seconds without a byte of the reply; less for making the connection."""
        connect = CONNECT_SECONDS if self.timeout is None else min(self.timeout, CONNECT_SECONDS)
        return httpx.Timeout(self.timeout, connect=connect)

    def headers(self, request: Request, request_id: str) -> httpx.Headers:
        headers = httpx.Headers({"Accept": request.accept, "X-Request-ID": request_id})
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers


def settings_of(
    base_url: str | None,
    api_key: str | None,
    timeout: float | None,
    max_retries: int,
    http: httpx.Client | httpx.AsyncClient | None,
) -> Settings:
    """The settings of a client: arguments, then the caller's own httpx client, then LOGITD_BASE_URL
    and LOGITD_API_KEY, then the defaults. ValueError if they cannot be used."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it is a number of seconds above 0, or None")
    if max_retries < 0:
        raise ValueError(f"max_retries is {max_retries}; 0 means one try")
    own = "" if http is None else str(http.base_url)
    url = base_url or own or os.environ.get("LOGITD_BASE_URL") or DEFAULT_BASE_URL
    key = api_key or os.environ.get("LOGITD_API_KEY") or None
    if key is not None and not _KEY.fullmatch(key):
        raise ValueError(
            f"the API key has {len(key)} characters, of which a header cannot hold all: line "
            "breaks, blanks and letters beyond ASCII have no place in it"
        )
    return Settings(_checked(url), timeout, max_retries, key)


def _checked(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is not a URL: {error}") from None
    if url.userinfo:  # not repeated: it may hold a password
        raise ValueError(
            "base_url holds a user name or a password; leave them out, and give http= an "
            "httpx.Client with auth= if a proxy wants them"
        )
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(
            f"base_url is {base_url!r}; it is http:// or https://, a host, and at most a path"
        )
    return str(url).rstrip("/")


class Exchange:
    """One call on its way: its request id, how often it was tried, and which error is which."""

    def __init__(self, settings: Settings, request: Request) -> None:
        self._sent_id = uuid.uuid4().hex  # each try has the same
        self.request_id = self._sent_id  # by which the server's log names it
        self._settings = settings
        self._request = request
        self._tries = 0
        self._began = time.monotonic()

    def next_try(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as it is sent."""
        self._tries += 1
        return http.build_request(
            self._request.method,
            self._settings.base_url + self._request.path,
            content=self._request.body,
            headers=self._settings.headers(self._request, self._sent_id),
            timeout=self._settings.limits,
        )

    def begun(self, response: httpx.Response) -> bool:
        """Take note of a reply that begins. True if it is an answer, False if it is a refusal."""
        self.request_id = response.headers.get("x-request-id", self._sent_id)
        return response.status_code in self._request.answers

    def wait_after_error(self, error: httpx.RequestError) -> float:
        """Seconds until the next try; raises the error if there is none."""
        failure = self._no_answer(error)
        if not isinstance(error, CONNECTION_LOST):
            raise failure from error
        return self._wait(failure, None)

    def wait_after_refusal(self, response: httpx.Response, body: bytes) -> float:
        """The same after a reply that says no."""
        if self._settings.key is not None:  # some proxies' pages repeat a request's headers
            body = body.replace(self._settings.key.encode(), b"[API key]")
        status = response.status_code
        failure = errors.from_reply(status, response.headers, body, self.request_id)
        if status not in RETRIED_STATUSES:
            raise failure
        return self._wait(failure, failure.retry_after)

    def answer(self, response: httpx.Response, body: bytearray) -> Answer:
        """A reply that was read to its end."""
        content_type = response.headers.get("content-type", "").partition(";")[0]
        return Answer(response.status_code, content_type, body, self.request_id)

    def broken_off(self, error: httpx.RequestError, received: int) -> APIConnectionError:
        """The error of a reply that has no end."""
        if isinstance(error, httpx.TimeoutException):
            message = f"the reply stood still for {self._seconds} s after {received} bytes"
            return APITimeoutError(message, self.request_id)
        message = f"the reply broke off after {received} bytes: {_said(error)}"
        return APIConnectionError(message, self.request_id)

    def stream_broken_off(self, error: httpx.RequestError, tokens: int) -> LogitdError:
        """The same of a stream."""
        if isinstance(error, httpx.TimeoutException):
            message = f"the stream stood still for {self._seconds} s after {tokens} tokens"
            return APITimeoutError(message, self.request_id)
        message = f"the stream broke off after {tokens} tokens: {_said(error)}"
        return StreamError(message, tokens, self.request_id)

    def _no_answer(self, error: httpx.RequestError) -> APIConnectionError:
        """The error of a request whose reply never began."""
        url = self._settings.base_url
        match error:
            case httpx.ConnectTimeout():
                limit = self._settings.limits.connect
                return APITimeoutError(f"no connection to {url} within {limit} s", self.request_id)
            case httpx.PoolTimeout():
                message = f"too many calls at once: none of them ended within {self._seconds} s"
                return APITimeoutError(message, self.request_id)
            case httpx.TimeoutException():
                message = f"{url} did not answer within {self._seconds} s"
                return APITimeoutError(message, self.request_id)
            case httpx.ConnectError():
                message = f"no connection to {url}: {_said(error)}. Is the server running?"
            case _:
                message = f"{url} gave no answer: {_said(error)}"
        return APIConnectionError(message, self.request_id)

    def _wait(self, failure: LogitdError, asked: float | None) -> float:
        """As long as the server asked for, and a little more so that those who were refused
        together do not come back together; never beyond the client's own timeout."""
        if self._tries > self._settings.max_retries:
            raise failure
        spread = random.uniform(0.5, 1.0)
        if asked is None:
            own = FIRST_WAIT_SECONDS * 2 ** (self._tries - 1)
            wait = min(own, MAX_OWN_WAIT_SECONDS) * spread
        elif asked > MAX_WAIT_SECONDS:
            raise failure
        else:
            wait = asked + FIRST_WAIT_SECONDS * (spread - 0.5)
        waited = time.monotonic() - self._began
        if self._settings.timeout is not None and waited + wait > self._settings.timeout:
            raise failure
        return wait

    @property
    def _seconds(self) -> str:
        return f"{self._settings.timeout:g}"


def _said(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
