"""Negotiation: the form of a reply of tensors, by the request's `Accept`."""

from typing import Any

from fastapi import Request

from logitd.service.core.errors import ERRORS, ApiError, bad_request, clip

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"

_BINARY = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {NPY: _BINARY, SAFETENSORS: _BINARY}},
    406: ERRORS[400] | {"description": "`Accept` does not name a format of this endpoint"},
}
"""What such an endpoint can answer, for its OpenAPI description."""


def negotiate(request: Request, prompts: int, dtype: str, *, top_k: int | None = None) -> str:
    """The media type to answer in, unless it cannot hold so many prompts, the dtype or `top_k`."""
    media_type = _accepted(request.headers.get("accept", "*/*"))
    if media_type == NPY and prompts > 1:
        raise bad_request(
            f"npy holds one array; the request has {prompts} prompts. Take {SAFETENSORS} or JSON",
            "prompt",
        )
    if dtype == "bfloat16" and media_type != SAFETENSORS:
        raise bad_request(
            f"{media_type} cannot hold bfloat16; take {SAFETENSORS}, or another dtype", "dtype"
        )
    if media_type == NPY and top_k is not None:
        raise bad_request(
            f"npy cannot hold top_k; take JSON or {SAFETENSORS}, or choose token_ids", "top_k"
        )
    return media_type


def check_one_array(arrays: int) -> None:
    """Reject (400) a reply as npy that has several arrays."""
    if arrays > 1:
        raise bad_request(
            f"npy holds one array, and these stages are {arrays}. Take {SAFETENSORS} or JSON",
            "stages",
        )


def _accepted(accept: str) -> str:
    """The first format that is known; JSON where anything is accepted."""
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in (NPY, SAFETENSORS):
            return media_type
        if media_type in (JSON, "application/*", "*/*", ""):
            return JSON
    raise ApiError(
        406,
        "invalid_request_error",
        f"Accept is {clip(accept)!r}; this endpoint gives {JSON}, {NPY} and {SAFETENSORS}",
    )
