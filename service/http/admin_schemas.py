"""Bodies of what changes the server: POST /admin/reload."""

from typing import ClassVar

from pydantic import Field

from logitd.model.operations.body import (
    CheckpointName,
    Examples,
    ModelName,
    ReplyBody,
    RequestBody,
)


class ReloadRequest(RequestBody):
    """Another checkpoint to serve."""

    examples: ClassVar[Examples] = {
        "What the server was started to serve, as of now": {},
        "A checkpoint by its name": {"checkpoint": "step-000800"},
    }

    model: ModelName = None
    checkpoint: str | None = Field(
        None,
        max_length=256,
        description="Name of a checkpoint in the run or folder that is served from; if not given "
        "what the server was started to serve, as of now: of a run its best.",
    )


class ReloadReply(ReplyBody):
    model: str
    checkpoint: CheckpointName = Field(description="What answers now.")
    swapped: bool = Field(description="False: it is the one that was served already.")
