"""Errors as clients see them: one shape, and one table from errors to statuses.

    {"error": {"message": "...", "type": "...", "param": "...", "code": "..."}}

The message is a sentence that gives the numbers and says what to do; `type` and `code` have fixed
sets of values. A message repeats at most a name or a number from the request, shortened, so the
message is always small. After a bug in the server, the client gets only the request id.

Lower layers raise `InvalidRequest`, `QueueFull` and `EngineStopped`. `as_api_error` translates
them, so that routes need not catch them.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from logitd.model.files import without_surrogates
from logitd.model.inference.engine.events import (
    GRADIENTS_NOT_FINITE,
    FinishEvent,
    FinishReason,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import PARAM
from logitd.model.inference.sampling.sampler import NOT_FINITE
from logitd.model.operations.prompts import clip
from logitd.model.operations.validation import describe_problem
from logitd.model.plural import pluralize
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
"""`request.state` key of the limit that rejected the request; read by metrics and the log."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error reply. Code below a route may raise it anywhere, or write its `body` into a
    stream."""

    status: int
    type: ErrorType
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds
    limit: Limit | None = None  # the limit that rejected the request

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": without_surrogates(self.message),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 500 or self.code == NOT_LOADED:  # a retry would fail as well
            headers["X-Should-Retry"] = "false"
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            headers=headers,
            media_type="application/json",
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param, code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for a path, or a thing named in a request, that the server does not have."""
    return ApiError(404, "not_found_error", message, param, code)


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise --max-body-bytes"
    return ApiError(413, "invalid_request_error", message, None, "body_too_large")


def client_gone() -> ApiError:
    """The error for a client that has left. Only the log and the metrics show it."""
    return ApiError(499, "invalid_request_error", "the client closed the connection")


def internal_error(request_id: str) -> ApiError:
    message = f"internal error; the log has it under the request id {request_id}"
    return ApiError(500, "server_error", message, None, "internal")


def unavailable(message: str) -> ApiError:
    return ApiError(503, "unavailable_error", message, None, "unavailable", retry_after=1)


def not_loaded(message: str, param: str = "model") -> ApiError:
    """The error for a model that could not be loaded and will not be served before a restart.
    `param` is the field that names the model."""
    return ApiError(503, "unavailable_error", message, param, NOT_LOADED)


def timed_out(progress: str) -> ApiError:
    """The error for a request whose timeout expired. `progress` says how far it came."""
    message = f"the request's timeout expired {progress}"
    return ApiError(504, "timeout_error", message, "timeout", "deadline_exceeded")


EXPECTED = (ApiError, InvalidRequest, QueueFull, EngineStopped)
"""Errors that are not bugs. `as_api_error` translates them."""


def as_api_error(error: ApiError | InvalidRequest | QueueFull | EngineStopped) -> ApiError:
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


def queue_full(message: str, retry_after: int, limit: Limit, code: str = "queue_full") -> ApiError:
    return ApiError(429, "rate_limit_error", message, None, code, retry_after, limit)


def raise_failure(event: FinishEvent) -> None:
    """Raise ApiError if a sequence ended without an answer."""
    match event.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return
        case FinishReason.TIMEOUT:
            tokens = pluralize(event.completion_tokens, "token")
            raise timed_out(f"with {tokens} generated")
        case FinishReason.UNREAD:
            raise unavailable(
                "the client read the reply too slowly while other requests waited for its slot; "
                "request fewer positions at a time, or read faster"
            )
        case FinishReason.REPLACED:
            raise unavailable(REPLACED)
        case FinishReason.ABORT:
            raise unavailable("the request was aborted: the server is shutting down")
        case FinishReason.ERROR if event.param is not None:
            code = {PARAM: "intervention_failed", "direction": "direction_failed"}.get(
                event.param, "constraint_failed"
            )
            raise bad_request(f"{event.param}: {event.error}", event.param, code)
        case FinishReason.ERROR:
            message = "the engine failed on this request"
            if event.error in (NOT_FINITE.message, GRADIENTS_NOT_FINITE):
                message = f"{event.error}; the weights of the checkpoint are too large or damaged"
            raise ApiError(500, "server_error", message, None, "engine")


def install(app: FastAPI) -> None:

    async def expected(request: Request, error: Any) -> Response:
        reply = as_api_error(error)
        setattr(request.state, LIMIT, reply.limit)
        return reply.response()

    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)

    @app.exception_handler(RequestValidationError)
    async def wrong_query_or_path(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        location = first["loc"][1:]  # without "query" or "path"
        message = describe_problem({**first, "loc": location})
        return bad_request(message, str(location[0])).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        response = _from_status(error.status_code, request).response()
        response.headers.update(error.headers or {})
        return response


def _from_status(status: int, request: Request) -> ApiError:
    path = clip(request.scope["path"])
    match status:
        case 404:
            return not_found(f"there is no {path} here; see /docs")
        case 405:
            message = f"{path} does not support {request.method}; see /docs"
            return ApiError(405, "invalid_request_error", message)
        case _:
            return ApiError(status, "invalid_request_error", HTTPStatus(status).phrase)


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": description}
    for status, description in {
        400: "A field is wrong, or the context is too short",
        401: "The API key is missing or wrong",
        403: "The server does not allow this request",
        404: "The path, or the model, weight or feature, does not exist",
        406: "No format in `Accept` can be sent",
        408: "The request came too slowly",
        409: "The state of the server does not allow this",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "The queue is full; see Retry-After",
        431: "The headers are too large",
        500: "A bug of the server",
        503: "Loading, shutting down, or too many connections; see Retry-After",
        504: "The request's timeout passed",
    }.items()
}
"""OpenAPI responses for the errors of endpoints, shown in /docs."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for an endpoint whose only errors have these statuses, or 403 for a refused
    Host header."""
    return {status: ERRORS[status] for status in (*statuses, 403)}
