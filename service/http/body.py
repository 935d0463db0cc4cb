"""Body: reads the JSON body of a request up to its size limit and parses it strictly.

The operations (`model/operations/`) define the fields.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from logitd.model.operations.body import MAX_IDS, RequestBody
from logitd.model.operations.prompts import clip
from logitd.model.operations.validation import describe_errors
from logitd.service.errors import ApiError, bad_request, body_too_large, client_gone
from logitd.service.http.structure import count_structure, repeated_key

MAX_VALUES = MAX_IDS + 2**14
"""Maximum number of JSON values in a body: enough for the longest list of ids and the other
fields."""
MAX_PARTS = 2**14
"""Maximum number of lists, objects and keys in a body. Parsing one of these takes as long as
parsing ten numbers."""
UNCOUNTED_BYTES = 2**14
"""Bodies up to this size are parsed without counting their values first, in at most a few ms."""

BODY = "body"
"""`request.state` key of the parsed body; read by tracing."""
BODY_BYTES = "body_bytes"
"""`request.state` key of the body's size."""

Body = TypeVar("Body", bound=BaseModel)


def body_of(model: type[Body], *, required: bool = True) -> Callable[[Request], Awaitable[Body]]:
    """Return a FastAPI dependency that reads the JSON body of a request into `model`. Unless the
    body is `required`, a request without one counts as `{}`.

    pydantic parses the raw bytes. Unlike `json`, it rejects NaN, Infinity, 1e999, lone surrogates
    and bodies that are not UTF-8.
    """

    async def read(request: Request) -> Body:
        if not required and not _has_body(request):
            return model()
        media_type, *parameters = request.headers.get("content-type", "").lower().split(";")
        media_type = media_type.strip()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise ApiError(
                415,
                "invalid_request_error",
                f"the body's content type is {clip(media_type)!r}; send application/json "
                "(curl: --json, or -H 'Content-Type: application/json')",
            )
        _require_utf8(parameters)
        _require_plain(request)
        raw = await _bounded_body(request)
        if len(raw) > UNCOUNTED_BYTES:
            await _check_structure(raw)
        try:
            body = model.model_validate_json(raw)
        except ValidationError as error:
            raise describe_errors(error, model.model_fields) from error
        # A proxy or a log may read the first of two values, and pydantic has read the last.
        if (key := await _repeated_key(raw)) is not None:
            message = f"the key {clip(key)!r} is twice in the same object; send it once"
            raise bad_request(message, clip(key))
        setattr(request.state, BODY, body)
        setattr(request.state, BODY_BYTES, len(raw))
        return body

    return read


def _has_body(request: Request) -> bool:
    length = request.headers.get("content-length", "0")
    return int(length) > 0 or "transfer-encoding" in request.headers


def described_by(model: type[RequestBody], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI description of a body that `body_of` reads."""
    content = {
        "schema": {"$ref": f"#/components/schemas/{model.__name__}"},
        "examples": {
            summary: {"summary": summary, "value": body} for summary, body in model.examples.items()
        },
    }
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


async def _bounded_body(request: Request) -> bytes:
    """Read the body of a request. Raises ApiError if the body exceeds the limit. If its declared
    length already exceeds the limit, nothing is read."""
    limit: int = request.app.state.service.settings.max_body_bytes
    # The HTTP parser has checked that the header is a number.
    if int(request.headers.get("content-length", "0")) > limit:
        raise body_too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise body_too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise client_gone() from error
    return b"".join(chunks)


def _require_plain(request: Request) -> None:
    """Raise ApiError if the body is compressed or otherwise encoded."""
    for header, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        # The HTTP parser guarantees that the end of the body is unambiguous.
        encoding = ", ".join(request.headers.getlist(header)).strip().lower()
        if encoding not in ("", plain):
            raise ApiError(
                415,
                "invalid_request_error",
                f"the body is encoded as {clip(encoding)!r}; send it without an encoding",
            )


def _require_utf8(parameters: Sequence[str]) -> None:
    """Raise ApiError if the content type's parameters, given in lower case, name a charset other
    than UTF-8 or its subset ASCII."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip() == "charset" and charset not in ("utf-8", "utf8", "us-ascii"):
            raise ApiError(
                415,
                "invalid_request_error",
                f"the charset of the body is {clip(charset)!r}; JSON must be sent as UTF-8",
            )


async def _repeated_key(raw: bytes) -> str | None:
    if len(raw) <= UNCOUNTED_BYTES:
        return repeated_key(raw)
    return await asyncio.to_thread(repeated_key, raw)


async def _check_structure(raw: bytes) -> None:
    """Raise ApiError for a body whose parsing would block the event loop for too long."""
    structure = await asyncio.to_thread(count_structure, raw)
    parts = structure.containers + structure.keys
    if structure.values > MAX_VALUES or parts > MAX_PARTS:
        raise bad_request(
            f"the body has up to {structure.values} JSON values ({MAX_VALUES} are allowed) and "
            f"{parts} lists, objects and keys ({MAX_PARTS} are allowed); send several requests",
            code="body_too_large",
        )
