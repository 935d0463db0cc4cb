"""Errors of the client: one class for each thing that can be wrong, `LogitdError` above them all.

A refusal of the server is an `APIStatusError` with the server's own sentence; without an answer
there is an `APIConnectionError`; an answer that breaks off or makes no sense is a `StreamError` or
a `MalformedReplyError`. Arguments that no request can be made of raise ValueError or TypeError
before anything is sent. Errors can be pickled; none holds an API key.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

__all__ = [
    "LogitdError",
    "APIStatusError",
    "BadRequestError",
    "AuthenticationError",
    "PermissionDeniedError",
    "NotFoundError",
    "ConflictError",
    "RequestTooLargeError",
    "UnsupportedMediaTypeError",
    "QueueFullError",
    "ServerError",
    "UnavailableError",
    "DeadlineExceededError",
    "APIConnectionError",
    "APITimeoutError",
    "StreamError",
    "MalformedReplyError",
]

MAX_QUOTED = 200
"""Characters that are repeated of a reply that is not the server's own."""


class LogitdError(Exception):
    """Whatever a call can end with, but a result. `request_id` is what the server's log calls the
    request, if there was one."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        named = "" if self.request_id is None else f" (request {self.request_id})"
        return self.message + named


class APIStatusError(LogitdError):
    """The server answered with an error.

    status       of HTTP; for an error in the middle of a stream, the one it would have had
    message      the server's sentence: what is wrong, with numbers, and the way out
    type, code   from the server's closed sets; None where something else answered, such as a proxy
    param        the field that is wrong, where it is one
    retry_after  seconds after which to ask again, where the server said so
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
    """403: the server lets nobody do that."""


class NotFoundError(APIStatusError):
    """404: another model was asked for, or another kind of server answers there."""


class ConflictError(APIStatusError):
    """409: the state of the server is in the way, which the sentence says."""


class RequestTooLargeError(APIStatusError):
    """413: the body is larger than the server takes."""


class UnsupportedMediaTypeError(APIStatusError):
    """415: the body's content type was changed on its way."""


class QueueFullError(APIStatusError):
    """429: more is waiting than the server takes, or the API key has asked for as much as it may;
    see `retry_after`."""


class ServerError(APIStatusError):
    """500: the server's own fault; its log has the request under `request_id`."""


class UnavailableError(APIStatusError):
    """503: loading, shutting down, or failed; see `retry_after`."""


class DeadlineExceededError(APIStatusError):
    """504: the request's `timeout` passed, or that of a proxy."""


class APIConnectionError(LogitdError):
    """No whole answer: the server cannot be reached, or the connection was lost."""


class APITimeoutError(APIConnectionError):
    """The server was silent for longer than the client's `timeout`."""


class StreamError(LogitdError):
    """A stream ended before its end; `tokens` of it had come, and stay in the stream's `text`."""

    def __init__(self, message: str, tokens: int, request_id: str | None = None) -> None:
        super().__init__(message, request_id)
        self.tokens = tokens


class MalformedReplyError(LogitdError):
    """A reply that is not what this client can read: from another kind of server, or from a newer
    one that has dropped what this client needs."""


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
"""The status that an error event would have had."""


def from_reply(
    status: int, headers: Mapping[str, str], body: bytes | bytearray, request_id: str
) -> APIStatusError:
    """The error that a reply says, whoever wrote it."""
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
    """The error that an event of a stream says."""
    known = detail if isinstance(detail, dict) else {}
    message = _text(known.get("message")) or "the stream ended with an error that says nothing"
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
    """A sentence for an answer that is not logitd's, such as a proxy's page."""
    try:
        named = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        named = str(status)
    page = body[: 40 * MAX_QUOTED].decode(errors="replace")
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL | re.IGNORECASE)
    words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    quoted = words if len(words) <= MAX_QUOTED else f"{words[:MAX_QUOTED]}..."
    return f"{named}, and not in logitd's words: {quoted or 'an empty body'}"


def _seconds(retry_after: str) -> float | None:
    """What a Retry-After header says in seconds; a date is not understood."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
