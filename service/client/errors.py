"""Errors of the client: `LogitdError` and its subclasses, one per kind of failure.

`APIStatusError`: the server refused the request; the message is the server's. `APIConnectionError`:
the answer is missing or incomplete. `StreamError`: a stream ended early. `MalformedReplyError`: the
client cannot read the answer.

Unusable arguments raise ValueError or TypeError before the request is sent. Errors can be pickled;
none contains an API key.
"""

import copyreg
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

MAX_QUOTED = 200
"""Maximum number of characters quoted from a reply that is not logitd's."""


class LogitdError(Exception):
    """A failed call. `request_id` identifies the request in the server's log; it is None if no
    request was sent."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        named = "" if self.request_id is None else f" (request {self.request_id})"
        return self.message + named

    def __reduce__(self) -> tuple[Any, ...]:
        """Make unpickling bypass the constructor, because subclasses' constructors do not take
        `args` as their arguments."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class APIStatusError(LogitdError):
    """The server answered with an error.

    status       HTTP status; for an error in a stream, the status it would have outside a stream
    message      the server's explanation: the fault, its numbers, and the fix
    type, code   values from the server's fixed sets; None if another program, such as a proxy,
                 answered
    param        the invalid field, if there is one
    retry_after  seconds to wait before the next try, if the server specified them
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
    """400: a field is invalid, or the model's context is too short for the request."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing or unknown to the server."""


class PermissionDeniedError(APIStatusError):
    """403: the server does not allow this request."""


class NotFoundError(APIStatusError):
    """404: the server has no such path, or no model, weight or feature of this name."""


class ConflictError(APIStatusError):
    """409: the state of the server prevents the request; the message gives the reason."""


class RequestTooLargeError(APIStatusError):
    """413: the body exceeds the server's size limit."""


class UnsupportedMediaTypeError(APIStatusError):
    """415: a proxy changed the content type of the body."""


class QueueFullError(APIStatusError):
    """429: the server's queue is full, or the API key is at its limit; see `retry_after`."""


class ServerError(APIStatusError):
    """500: a fault in the server, which logs it under `request_id`."""


class UnavailableError(APIStatusError):
    """503: the server is loading or shutting down, or has failed; see `retry_after`."""


class DeadlineExceededError(APIStatusError):
    """504: the request took longer than its field `timeout`, or longer than a proxy allows."""


class APIConnectionError(LogitdError):
    """The server is unreachable, or the connection was lost before the answer was complete."""


class APITimeoutError(APIConnectionError):
    """The server was silent for longer than the client's `timeout`, or a connection could not be
    established in time."""


class StreamError(LogitdError):
    """A stream ended early, after `tokens` tokens. The stream's `text` is the text received."""

    def __init__(self, message: str, tokens: int, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.tokens = tokens


class MalformedReplyError(LogitdError):
    """The client cannot read a reply: the server is not logitd, or is a newer version whose replies
    lack a member that this client needs."""


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
"""The HTTP status for each type of error event."""


def from_reply(
    status: int, headers: Mapping[str, str], body: bytes | bytearray, request_id: str
) -> APIStatusError:
    """The error that a reply reports. The reply may also come from a proxy."""
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
    """The error that an event of a stream reports."""
    known = detail if isinstance(detail, dict) else {}
    message = _text(known.get("message")) or "the server ended the stream with an unexplained error"
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
    """The message for a reply that does not come from logitd, such as a proxy's error page."""
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
    """Seconds in a Retry-After header; None if the header has a date."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
