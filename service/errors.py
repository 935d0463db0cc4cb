"""Errors as clients see them: one shape, and one place that maps each error to its status.

    {"error": {"message": "...", "type": "...", "param": "...", "code": "..."}}

The message is a sentence with the numbers and what to do; `type` and `code` are from closed sets. A
message repeats at most a clipped name or number of the request, so it is small whatever was sent.
Of our own bugs a client is told the request's id alone.

What lower layers raise (`InvalidRequest`, `QueueFull`, `EngineStopped`) is translated here, by
`as_api_error`, wherever it was raised: routes and what they call let it pass.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import PARAM
from logitd.model.operations.prompts import clip
from logitd.service.engine.admission import Limit, QueueFull
from logitd.service.engine.submission import REPLACED, EngineStopped
from logitd.service.http.schemas import ErrorReply

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "conflict_error",
    "not_found_error",
    "rate_limit_error",
    "unavailable_error",
    "timeout_error",
    "server_error",
]
NOT_LOADED = "model_not_loaded"
LIMIT = "limit"
"""Where the state of a request holds the limit that it has met, for the metrics and the log."""


@dataclass(eq=False)
class ApiError(Exception):
    """A reply that is an error. Raise it anywhere below a route, or write `body` into a stream."""

    status: int
    type: ErrorType
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds
    limit: Limit | None = None  # that a rejected request has met, for the metrics

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 500 or self.code == NOT_LOADED:  # the same would come of another try
            headers["X-Should-Retry"] = "false"
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            headers=headers,
            media_type="application/json",
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param, code)


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise --max-body-bytes"
    return ApiError(413, "invalid_request_error", message, None, "body_too_large")


def client_gone() -> ApiError:
    """For the log and the metrics alone: the client cannot read it any more."""
    return ApiError(499, "invalid_request_error", "the client closed the connection")


def internal_error(request_id: str) -> ApiError:
    """Our own bug."""
    message = f"internal error; the log has it under the request id {request_id}"
    return ApiError(500, "server_error", message, None, "internal")


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, "unavailable_error", message, None, "unavailable", retry_after)


def not_loaded(message: str) -> ApiError:
    """Of a model that this server will not have however often it is asked."""
    return ApiError(503, "unavailable_error", message, "model", NOT_LOADED)


EXPECTED = (ApiError, InvalidRequest, QueueFull, EngineStopped)
"""Errors that are not bugs: `as_api_error` says what each means for a client."""


def as_api_error(error: ApiError | InvalidRequest | QueueFull | EngineStopped) -> ApiError:
    """One of EXPECTED as its client sees it."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return bad_request(str(error), error.param, error.code)
        case QueueFull():
            message = f"{error}; try again in about {error.retry_after} s"
            return queue_full(message, error.retry_after, error.limit)
        case EngineStopped():
            return unavailable(str(error))


def queue_full(message: str, retry_after: int, limit: Limit) -> ApiError:
    return ApiError(429, "rate_limit_error", message, None, "queue_full", retry_after, limit)


def raise_failure(event: FinishEvent) -> None:
    """Raise ApiError if a sequence ended without an answer."""
    if (failure := _from_finish(event)) is not None:
        raise failure


def _from_finish(event: FinishEvent) -> ApiError | None:
    """The error that a sequence's end means for its client, if it is one."""
    match event.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            waited = event.times.finished - event.times.arrived
            return ApiError(
                504,
                "timeout_error",
                f"the request's timeout passed after {waited:.3g} s, with "
                f"{event.completion_tokens} tokens generated",
                "timeout",
                "deadline_exceeded",
            )
        case FinishReason.UNREAD:
            return unavailable(
                "the reply was read too slowly while others waited for its place; ask again for "
                "fewer positions at once, or read faster"
            )
        case FinishReason.REPLACED:
            return unavailable(REPLACED)
        case FinishReason.ABORT:
            return unavailable("the request was aborted: the server is shutting down")
        case FinishReason.ERROR if event.param is not None:
            code = "intervention_failed" if event.param == PARAM else "constraint_failed"
            return bad_request(f"{event.param}: {event.error}", event.param, code)
        case FinishReason.ERROR:
            return ApiError(
                500, "server_error", "the engine failed on this request", None, "engine"
            )


def install(app: FastAPI) -> None:
    """Give every error of the application the one shape."""

    async def expected(request: Request, error: Any) -> Response:
        said = as_api_error(error)
        setattr(request.state, LIMIT, said.limit)
        return said.response()

    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        response = _from_status(error.status_code, request).response()
        response.headers.update(error.headers or {})
        return response


def _from_status(status: int, request: Request) -> ApiError:
    path = clip(request.scope["path"])
    match status:
        case 404:
            return ApiError(404, "not_found_error", f"there is no {path} here; see /docs")
        case 405:
            message = f"{path} does not answer {request.method}; see /docs"
            return ApiError(405, "invalid_request_error", message)
        case _:
            return ApiError(status, "invalid_request_error", HTTPStatus(status).phrase)


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "A field is wrong, or the context is too short"},
    401: {
        "model": ErrorReply,
        "description": "The API key is missing or wrong",
    },
    403: {"model": ErrorReply, "description": "This server lets nobody do that"},
    404: {"model": ErrorReply, "description": "Another model was asked for"},
    408: {"model": ErrorReply, "description": "The request came too slowly"},
    409: {"model": ErrorReply, "description": "The state of the server is in the way"},
    413: {"model": ErrorReply, "description": "The body is too large"},
    415: {"model": ErrorReply, "description": "The body is not JSON"},
    429: {"model": ErrorReply, "description": "The queue is full; see Retry-After"},
    431: {"model": ErrorReply, "description": "The headers are too large"},
    500: {"model": ErrorReply, "description": "A bug of the server"},
    503: {
        "model": ErrorReply,
        "description": "Loading, shutting down, or too many connections; see Retry-After",
    },
    504: {"model": ErrorReply, "description": "The request's timeout passed"},
}
"""What an endpoint can answer besides its reply, for /docs."""
