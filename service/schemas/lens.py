"""Schemas of /lens: what the model would say if it stopped after each layer."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from logitd.service.schemas.base import (
    ChosenIds,
    Examples,
    ModelName,
    Places,
    PositionChoice,
    PromptBody,
    ReplyBody,
    Text,
    Timeout,
)
from logitd.service.schemas.interventions import Interventions
from logitd.service.schemas.tensors import OutputReply, TokenProb

MAX_NAMED = 1024


class LensRequest(PromptBody):
    """The final norm and the head on the stream after each layer (the logit lens)."""

    examples: ClassVar[Examples] = {
        "When does it know?": {"prompt": "for i in range(10", "top_k": 3},
        "Two tokens, layer by layer, at every position": {
            "prompt": "import os\nimport",
            "token_ids": [10, 32],
            "positions": "all",
            "top_k": 1,
        },
    }

    layers: Places | None = Field(
        None,
        description="0 is after the embeddings, i after block i; negative ones count from the end. "
        "Absent: all.",
    )
    positions: PositionChoice = "last"
    top_k: int = Field(5, ge=1, le=1024, description="Of each layer, the likeliest next tokens.")
    token_ids: Annotated[ChosenIds, Field(max_length=MAX_NAMED)] | None = Field(
        None, description="Also these tokens, by id, whatever their rank."
    )
    tokens: Annotated[list[Text], Field(min_length=1, max_length=MAX_NAMED)] | None = Field(
        None, description="Also these tokens, by text."
    )
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "LensRequest":
        if self.token_ids is not None and self.tokens is not None:
            raise ValueError("token_ids and tokens both name tokens; give one of them")
        return self


class LensLayer(ReplyBody):
    """What the model would say after a layer."""

    layer: int
    top: list[TokenProb]
    tokens: list[TokenProb] = Field(description="Those that the request names.")
    entropy: float = Field(description="In nats.")
    divergence: float = Field(
        description="Kullback-Leibler divergence of the model's own answer from this one, in nats; "
        "0 at the last layer."
    )


class LensPosition(ReplyBody):
    position: int
    layers: list[LensLayer]


class PromptLens(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[LensPosition]


class LensReply(OutputReply):
    prompts: list[PromptLens]
