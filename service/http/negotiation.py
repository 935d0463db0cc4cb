"""Negotiation: the media type of a reply of arrays, by the request's `Accept`."""

from typing import Any

from fastapi import Request

from logitd.model.operations.prompts import clip
from logitd.service.errors import ERRORS, ApiError, bad_request

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"

_BINARY = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {NPY: _BINARY, SAFETENSORS: _BINARY}},
    406: ERRORS[400] | {"description": "`Accept` does not name a format of this endpoint"},
}
"""Responses of an endpoint of arrays, for its OpenAPI description."""


def negotiate(request: Request, body: Any) -> str:
    """The media type of the reply. Raises ApiError if it cannot hold several prompts or the
    dtype."""
    media_type = _accepted(request.headers.get("accept", "*/*"))
    if media_type == NPY and (count := len(body.prompts)) > 1:
        raise bad_request(
            f"npy holds one array; prompt has {count} prompts. Accept {SAFETENSORS} or JSON",
            "prompt",
        )
    if body.dtype == "bfloat16" and media_type != SAFETENSORS:
        raise bad_request(
            f"{media_type} cannot hold bfloat16; accept {SAFETENSORS}, or set another dtype",
            "dtype",
        )
    return media_type


def _accepted(accept: str) -> str:
    """The first known media type; JSON if anything is accepted."""
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in (NPY, SAFETENSORS):
            return media_type
        if media_type in (JSON, "application/*", "*/*", ""):
            return JSON
    raise ApiError(
        406,
        "invalid_request_error",
        f"Accept is {clip(accept)!r}; this endpoint can send {JSON}, {NPY} and {SAFETENSORS}",
    )
