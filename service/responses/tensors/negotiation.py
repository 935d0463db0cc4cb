"""Negotiation: the form of a reply that carries numbers, by the request's `Accept`."""

from typing import Any

from service.core.errors import ERRORS, ApiError, bad_request, clip

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"

_BINARY = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {NPY: _BINARY, SAFETENSORS: _BINARY}},
    406: ERRORS[400] | {"description": "`Accept` names no format of this endpoint"},
}
"""What such an endpoint can answer, for its OpenAPI description."""


def negotiate(accept: str) -> str:
    """The format to answer in: the first that is known, JSON when anything is welcome."""
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


def check_form(media_type: str, dtype: str, prompts: int) -> None:
    """Refuse what a form cannot hold."""
    if media_type == NPY and prompts > 1:
        raise bad_request(
            f"npy holds one array; the request has {prompts} prompts. Take {SAFETENSORS} or JSON",
            "prompt",
        )
    if dtype == "bfloat16" and media_type != SAFETENSORS:
        raise bad_request(
            f"bfloat16 has no place in {media_type}; take {SAFETENSORS}, or another dtype", "dtype"
        )
