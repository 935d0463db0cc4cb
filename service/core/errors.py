"""Errors as clients see them: one shape, and one place that maps each error to its status.

    {"error": {"message": "...", "type": "...", "param": "...", "code": "..."}}

The message is a sentence with the numbers and what to do; `type` and `code` are from closed sets. A
message repeats at most a clipped name or number of the request, so it is small whatever was sent.
Of our own bugs a client is told the request's id alone.

What lower layers raise (`InvalidRequest`, `QueueFull`, `EngineStopped`) is translated here, by
`as_api_error`, wherever it was raised: routes and what they call let it pass.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.inference.interventions import PARAM
from logitd.service.engine.admission import Limit, QueueFull
from logitd.service.engine.submission import REPLACED, EngineStopped
from logitd.service.schemas.base import MAX_IDS, MAX_PROMPTS, ErrorReply
from logitd.service.schemas.generate import MAX_STOP_TEXTS

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
MAX_REPORTED = 5
"""Field errors named in one message."""
MAX_PROBLEMS = 1000
"""With more, a body's errors are only counted: describing each would block the event loop."""

MAX_GUESSED = 40
"""Characters of an unknown field up to which a known one like it is looked for."""
COMMON_NAMES = {
    "inputs": "prompt",
    "text": "prompt",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}
"""Names that other servers use, to suggest ours."""

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
    "interventions.positions": "'all', 'prompt', 'generated', 'last', a list of integers or "
    "{'from': first, 'to': first left out}",
    "interventions.values": "a list of numbers, or a list of such lists, up to three deep",
    **dict.fromkeys(
        ("interventions.from.prompt", "interventions.minus.prompt"), "a string or a list of ids"
    ),
    **dict.fromkeys(
        ("interventions.from.positions", "interventions.minus.positions"),
        "'last', 'all', a list of integers or {'from': first, 'to': first left out}",
    ),
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
            too_long = isinstance(error, ContextLengthExceeded)
            code = "context_length_exceeded" if too_long else None
            return bad_request(str(error), error.param, code)
        case QueueFull():
            message = f"{error}; try again in about {error.retry_after} s"
            return queue_full(message, error.retry_after, error.limit)
        case EngineStopped():
            return unavailable(str(error))


def queue_full(message: str, retry_after: int, limit: Limit) -> ApiError:
    return ApiError(429, "rate_limit_error", message, None, "queue_full", retry_after, limit)


def from_validation(error: ValidationError, fields: Collection[str] = ()) -> ApiError:
    """A body that does not fit its model, whose fields are `fields`: a sentence per wrong one."""
    if (count := error.error_count()) > MAX_PROBLEMS:
        return bad_request(f"the body is wrong in {count} places; /docs describes its fields")
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A field that may be several things fails once for each of them: one sentence says it.
    distinct: dict[str, None] = {}
    for problem in problems:  # to look for a suggestion takes time, so only where it is shown
        known = fields if len(distinct) < MAX_REPORTED else ()
        distinct[_sentence(problem, known)] = None
    sentences = list(distinct)
    if len(sentences) > MAX_REPORTED:
        sentences[MAX_REPORTED:] = [f"and {len(sentences) - MAX_REPORTED} more"]
    location = problems[0]["loc"]
    return bad_request("; ".join(sentences), clip(str(location[0])) if location else None)


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


def _sentence(problem: Mapping[str, Any], fields: Collection[str]) -> str:
    location = problem["loc"]
    field = clip(".".join(str(part) for part in location))
    for length in range(1, len(location)):  # what follows names a form that it does not have
        if (form := SEVERAL_FORMS.get(_field_name(location[:length]))) is not None:
            return f"{_place(location[:length])} must be {form}"
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown field {field!r}{_suggestion(location, fields)}"
        case "missing":
            return f"{field} is required"
        case "json_invalid":
            return f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}"
        case "model_type":
            return "the body must be a JSON object"
        case "value_error":  # a sentence of our own
            item = f"{_place(location)}: " if len(location) > 1 else ""
            return item + str(problem["msg"]).removeprefix("Value error, ")
        case _:
            return f"{field}: {problem['msg'][:300]}" if field else str(problem["msg"])[:300]


def _field_name(location: tuple[int | str, ...]) -> str:
    """A field's name with those that it is within: interventions.from.prompt."""
    return ".".join(part for part in location if isinstance(part, str))


def _place(location: tuple[int | str, ...]) -> str:
    """A field as one would write it: interventions[1].values."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return clip("".join(parts).removeprefix("."))


def _suggestion(location: tuple[int | str, ...], fields: Collection[str]) -> str:
    """The field that was probably meant; unknown fields of nested objects have none."""
    name = str(location[0])
    if len(location) > 1 or len(name) > MAX_GUESSED:
        return ""
    if (known := COMMON_NAMES.get(name)) is None or known not in fields:
        known = next(iter(get_close_matches(name, fields, n=1, cutoff=0.75)), None)
    return "" if known is None else f"; did you mean {known!r}?"


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
