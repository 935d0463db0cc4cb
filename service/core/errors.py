"""Errors as clients see them: one shape, one place that says which status is which.

    {"error": {"message": "...", "type": "...", "param": "...", "code": "..."}}

The message is a sentence with the numbers and the way out; `type` and `code` are from closed sets.
Of the request no more than a clipped name or number is repeated, so an error's body is small
whatever was sent; of our own bugs nothing is told but the request's id.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from model.inference.engine.events import FinishEvent, FinishReason
from model.inference.errors import ContextLengthExceeded, InvalidRequest
from service.schemas.generate import ALIASES, MAX_IDS, MAX_PROMPTS, MAX_STOP_TEXTS, ErrorReply

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "unavailable_error",
    "timeout_error",
    "server_error",
]
MAX_REPORTED = 5
"""Field errors named in one message."""
MAX_PROBLEMS = 1000
"""With more, a body's errors are only counted: to describe each would hold up everybody else."""

SEVERAL_FORMS = {
    "prompt": f"a string, a list of token ids (integers from 0, {MAX_IDS} at most), "
    f"or a list of either ({MAX_PROMPTS} at most)",
    "continuations": f"a list of strings and of lists of token ids (integers from 0, {MAX_IDS} at "
    "most)",
    "stop": f"a string or a list of strings ({MAX_STOP_TEXTS} at most)",
    "positions": f"'last', 'all', a list of integers ({MAX_IDS} at most) or "
    "{'from': first, 'to': first left out}",
    "tokens": f"a list of token ids (integers from 0, {MAX_IDS} at most), or a list of such lists "
    f"({MAX_PROMPTS} at most)",
}
"""Fields that take values of several forms, in words."""


@dataclass(eq=False)
class ApiError(Exception):
    """A reply that is an error. Raise it anywhere below a route, or write `body` into a stream."""

    status: int
    type: ErrorType
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

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
        if self.status == 500:  # a client that sends it again would meet the same fault again
            headers["X-Should-Retry"] = "false"
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            headers=headers,
            media_type="application/json",
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param, code)


def context_too_long(length: int, wanted: int, limit: int) -> ApiError:
    """A prompt, with what is to follow it, that the model's context cannot hold."""
    if length >= limit:
        message = (
            f"the prompt has {length} tokens; the model's context is {limit} and at least one "
            f"token must be left for the completion. Shorten the prompt to {limit - 1} tokens"
        )
    else:
        message = (
            f"the prompt has {length} tokens and max_tokens is {wanted}: together "
            f"{length + wanted}, the model's context is {limit}. Shorten the prompt or lower "
            f"max_tokens to {limit - length}"
        )
    return bad_request(message, "prompt", "context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise --max-body-bytes"
    return ApiError(413, "invalid_request_error", message, None, "body_too_large")


def client_gone() -> ApiError:
    """For the log and the metrics alone: nobody is there to read it."""
    return ApiError(499, "invalid_request_error", "the client closed the connection")


def internal_error(request_id: str) -> ApiError:
    """Our own bug."""
    message = f"internal error; the log has it under the request id {request_id}"
    return ApiError(500, "server_error", message, None, "internal")


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, "unavailable_error", message, None, "unavailable", retry_after)


def from_validation(error: ValidationError, fields: Container[str] = ()) -> ApiError:
    """A body that does not fit its model, whose fields are `fields`: a sentence per wrong one."""
    if (count := error.error_count()) > MAX_PROBLEMS:
        return bad_request(f"the body is wrong in {count} places; /docs describes its fields")
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A field that may be several things fails once for each of them: one sentence says it.
    sentences = list(dict.fromkeys(_sentence(problem, fields) for problem in problems))
    if len(sentences) > MAX_REPORTED:
        sentences[MAX_REPORTED:] = [f"and {len(sentences) - MAX_REPORTED} more"]
    location = problems[0]["loc"]
    return bad_request("; ".join(sentences), clip(str(location[0])) if location else None)


def from_invalid(error: InvalidRequest) -> ApiError:
    code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
    return bad_request(str(error), error.param, code)


def from_finish(event: FinishEvent) -> ApiError | None:
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
        case FinishReason.ABORT:
            return unavailable("the request was aborted: the server is shutting down")
        case FinishReason.ERROR if event.param is not None:
            return bad_request(f"{event.param}: {event.error}", event.param, "constraint_failed")
        case FinishReason.ERROR:
            return ApiError(
                500, "server_error", "the engine failed on this request", None, "engine"
            )


def install(app: FastAPI) -> None:
    """Give every error of the application the one shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        response = _from_status(error.status_code, request).response()
        response.headers.update(error.headers or {})
        return response


def clip(text: str, limit: int = 80) -> str:
    """The beginning of something a client sent, to repeat it in a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


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


def _sentence(problem: Mapping[str, Any], fields: Container[str]) -> str:
    location = problem["loc"]
    field = clip(".".join(str(part) for part in location))
    own = ALIASES.get(location[0], location[0]) if location else ""
    if own in SEVERAL_FORMS and len(location) > 1:
        return f"{location[0]} must be {SEVERAL_FORMS[own]}"
    match problem["type"]:
        case "extra_forbidden" if own != location[0] and own in fields:  # or it were taken
            return f"{field} is another name of {own}, and both are given; leave one of them out"
        case "extra_forbidden":
            return f"{field} is no field of this endpoint"
        case "missing":
            return f"{field} is required"
        case "json_invalid":
            return f"the body is no JSON: {problem['msg'].removeprefix('Invalid JSON: ')}"
        case "model_type":
            return "the body must be a JSON object"
        case "value_error":  # a sentence of our own
            return str(problem["msg"]).removeprefix("Value error, ")
        case _:
            return f"{field}: {problem['msg'][:300]}" if field else str(problem["msg"])[:300]


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "A field is wrong, or the context is too short"},
    401: {"model": ErrorReply, "description": "An API key is needed, and none or another was sent"},
    404: {"model": ErrorReply, "description": "Another model was asked for"},
    413: {"model": ErrorReply, "description": "The body is too large"},
    415: {"model": ErrorReply, "description": "The body is no JSON"},
    429: {"model": ErrorReply, "description": "The queue is full; see Retry-After"},
    431: {"model": ErrorReply, "description": "The headers are too large"},
    500: {"model": ErrorReply, "description": "Our own fault"},
    503: {"model": ErrorReply, "description": "Loading or shutting down; see Retry-After"},
    504: {"model": ErrorReply, "description": "The request's timeout passed"},
}
"""What an endpoint can answer besides its reply, for /docs."""
