"""Errors of the client: `LogitdError` and its subclasses, one per kind of failure.

A refusal of the server is an `APIStatusError` with the server's message, and a missing answer an
`APIConnectionError`. An answer that breaks off is a `StreamError`, an unreadable one a
`MalformedReplyError`. Unusable arguments raise ValueError or TypeError before anything is sent.
Errors can be pickled; none contains an API key.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

MAX_QUOTED = 200
"""Characters that an error quotes of a foreign reply, at most."""


class LogitdError(Exception):
    """A failed call. `request_id` names the request in the server's log, if one was sent."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        named = "" if self.request_id is None else f" (request {self.request_id})"
        return self.message + named

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


def _restored(
    kind: type[LogitdError], args: tuple[Any, ...], state: Mapping[str, Any]
) -> LogitdError:
    """An error as pickled; the arguments of subclasses differ from `args`."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


class APIStatusError(LogitdError):
    """The server answered with an error.

    status       HTTP status; within a stream, the status that the error has outside of one
    message      the server's sentence: the fault, its numbers, and the fix
    type, code   members of the server's fixed sets; None if something else answered, like a proxy
    param        the wrong field, if there is one
    retry_after  seconds before the next try, if the server named them
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, request_id)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after


class BadRequestError(APIStatusError):
    """400: a field is wrong, or the context is too short."""


class AuthenticationError(APIStatusError):
    """401: no API key, or not one of the server's."""


class PermissionDeniedError(APIStatusError):
    """403: the server allows this to no client."""


class NotFoundError(APIStatusError):
    """404: the server has no such model or path."""


class ConflictError(APIStatusError):
    """409: the state of the server prevents it; the message explains how."""


class RequestTooLargeError(APIStatusError):
    """413: the body is too large for the server."""


class UnsupportedMediaTypeError(APIStatusError):
    """415: a proxy changed the content type of the body."""


class QueueFullError(APIStatusError):
    """429: the server's queue is full, or the API key is at its limit; see `retry_after`."""


class ServerError(APIStatusError):
    """500: a fault of the server; its log has the request under `request_id`."""


class UnavailableError(APIStatusError):
    """503: the server is loading, shutting down, or failed; see `retry_after`."""


class DeadlineExceededError(APIStatusError):
    """504: the `timeout` of the request or of a proxy passed."""


class APIConnectionError(LogitdError):
    """The server is unreachable, or the connection was lost before the end of the answer."""


class APITimeoutError(APIConnectionError):
    """The server was silent for longer than the client's `timeout`."""


class StreamError(LogitdError):
    """A stream broke off after `tokens` tokens, which stay in the stream's `text`."""

    def __init__(self, message: str, tokens: int, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.tokens = tokens


class MalformedReplyError(LogitdError):
    """A reply that this client cannot read: that of another kind of server, or of a newer one
    without a member that this client needs."""


BY_STATUS: Mapping[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: RequestTooLargeError,
    415: UnsupportedMediaTypeError,
    429: QueueFullError,
    500: ServerError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
STATUS_OF_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "rate_limit_error": 429,
    "server_error": 500,
    "unavailable_error": 503,
    "timeout_error": 504,
}
"""Status of an error event's type."""


def from_reply(
    status: int, headers: Mapping[str, str], body: bytes | bytearray, request_id: str
) -> APIStatusError:
    """The error of a reply, which may be that of a proxy."""
    retry_after = _seconds(headers.get("retry-after", ""))
    try:
        detail = json.loads(body)["error"]
        message = detail["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        detail, message = {}, None
    if not isinstance(message, str):
        detail, message = {}, _foreign_message(status, body)
    return _status_error(status, message, detail, request_id, retry_after)


def from_event(detail: Any, request_id: str) -> APIStatusError:
    """The error of an event in a stream."""
    known = detail if isinstance(detail, dict) else {}
    message = _text(known.get("message")) or "the stream ended with an error without a message"
    status = STATUS_OF_TYPE.get(_text(known.get("type")) or "", 200)
    return _status_error(status, message, known, request_id, None)


def _status_error(
    status: int,
    message: str,
    detail: Mapping[str, Any],
    request_id: str,
    retry_after: float | None,
) -> APIStatusError:
    kind, param, code = (_text(detail.get(name)) for name in ("type", "param", "code"))
    error = BY_STATUS.get(status, APIStatusError)
    return error(status, message, kind, param, code, request_id, retry_after)


def _foreign_message(status: int, body: bytes | bytearray) -> str:
    """The message of an answer that is not logitd's, such as a proxy's page."""
    try:
        named = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        named = str(status)
    page = body[: 40 * MAX_QUOTED].decode(errors="replace")
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL | re.IGNORECASE)
    words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    quoted = words if len(words) <= MAX_QUOTED else f"{words[:MAX_QUOTED]}..."
    return f"{named}, and the reply is not logitd's: {quoted or 'an empty body'}"


def _seconds(retry_after: str) -> float | None:
    """The seconds of a Retry-After header; None for a date."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
