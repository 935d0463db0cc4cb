"""Streaming a reply of tensors: the status once the first rows are there, then the parts as they
are written. In which form they are written is the writer's business (`logits.py`, `arrays.py`)."""

from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from logitd.service.api.requests.body import unless_gone
from logitd.service.api.responses import sse
from logitd.service.api.responses.text import checkpoint_headers
from logitd.service.core.models import Served


class TensorWriter(Protocol):
    """Writes the reply of requests that it has submitted."""

    async def start(self) -> None:
        """Wait for the first rows; whatever ends this call before ends the requests."""

    def pieces(self, media_type: str) -> AsyncIterator[bytes]:
        """The reply's body."""
        ...

    def end(self) -> None:
        """Nobody reads any more."""


async def stream_tensors(
    writer: TensorWriter, media_type: str, served: Served, request: Request
) -> Response:
    """The response whose body a writer gives; a client that leaves ends the requests."""
    await unless_gone(request, writer.start())
    return sse.StreamedResponse(
        writer.pieces(media_type),
        on_end=writer.end,
        write_timeout=served.settings.slow_reader_timeout,
        media_type=media_type,
        headers=checkpoint_headers(served.checkpoint),
    )
