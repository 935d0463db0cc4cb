"""Negotiation: chooses the media type of a reply from the request's `Accept` (RFC 9110, 12.5.1).

Event streams are requested with `stream`, not with `Accept`: OpenAI's clients send `Accept:
application/json` even when they request a stream.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from logitd.model.operations.prompts import clip
from logitd.service.errors import ERRORS, ApiError, bad_request
from logitd.service.http import sse

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/vnd.safetensors"
ARRAYS = (JSON, NPY, SAFETENSORS)
"""Media types of a reply with arrays."""

_BINARY = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {NPY: _BINARY, SAFETENSORS: _BINARY}},
}
"""OpenAPI responses of an endpoint that returns arrays."""


def negotiate(request: Request, body: Any, forms: Sequence[str] = (JSON,)) -> str:
    """The media type of the reply: an event stream if the body sets `stream`, otherwise one of
    `forms`. Raises ApiError if `Accept` allows none of them, or if the chosen type cannot represent
    several prompts or the requested dtype."""
    if getattr(body, "stream", False):
        return sse.MEDIA_TYPE
    accept = ",".join(request.headers.getlist("accept")) or "*/*"
    media_type = _accepted(accept, forms)
    if media_type is None:
        streamed = f', or {sse.MEDIA_TYPE} with "stream": true' if hasattr(body, "stream") else ""
        raise ApiError(
            406,
            "invalid_request_error",
            f"Accept is {clip(accept)!r}; this endpoint can send {', '.join(forms)}{streamed}",
        )
    if media_type == NPY and (count := len(body.prompts)) > 1:
        raise bad_request(
            f"npy holds one array, but the request has {count} prompts; accept "
            f"{SAFETENSORS} or JSON",
            "prompt",
        )
    if media_type != SAFETENSORS and getattr(body, "dtype", None) == "bfloat16":
        raise bad_request(
            f"{media_type} cannot hold bfloat16; accept {SAFETENSORS}, or set another dtype",
            "dtype",
        )
    return media_type


def _accepted(accept: str, forms: Sequence[str]) -> str | None:
    """The accepted form with the highest weight. In a tie, the first in `accept` wins, then the
    first in `forms`."""
    ranges: dict[str, tuple[float, int]] = {}
    for place, part in enumerate(accept.split(",")):
        media_range, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        ranges.setdefault(media_range, (_weight(weight), -place))

    def preference(form: str) -> tuple[float, int]:
        """The weight and the negated position of the range in `Accept` that matches `form` most
        specifically."""
        of_type = f"{form.partition('/')[0]}/*"
        return next((ranges[name] for name in (form, of_type, "*/*") if name in ranges), (0.0, 0))

    best = max(forms, key=preference)
    return best if preference(best)[0] > 0 else None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if 0 <= weight <= 1:
        return weight
    raise bad_request(f"Accept has the weight q={clip(text)}; weights range from 0 to 1")
