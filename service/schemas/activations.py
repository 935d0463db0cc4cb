"""Schemas of /activations and /stages: every stage of a forward by its name."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from logitd.service.schemas.base import (
    Examples,
    ModelName,
    Places,
    PositionChoice,
    PromptBody,
    ReplyBody,
    Timeout,
)
from logitd.service.schemas.interventions import Interventions, StageName
from logitd.service.schemas.tensors import DType, HalfOrFull, OutputReply

MAX_PATTERNS = 1024


class ActivationsRequest(PromptBody):
    """Values of named stages at chosen positions."""

    examples: ClassVar[Examples] = {
        "The queries of every layer at the last position": {
            "prompt": "def main():",
            "stages": ["blocks.*.attention.q"],
        },
        "Where one head looks, with the stream before and after its block": {
            "prompt": "for i in range(10): print(",
            "stages": ["embedding", "blocks.0.attention.probs", "blocks.0.output"],
            "heads": [0],
            "positions": "all",
        },
        "The logits without the first block's MLP": {
            "prompt": "def main():",
            "stages": ["logits"],
            "interventions": [{"stage": "blocks.0.mlp.out", "operation": "zero"}],
        },
    }

    stages: Annotated[list[StageName], Field(min_length=1, max_length=MAX_PATTERNS)] = Field(
        description="Names of GET /stages; * is any layer: blocks.*.attention.q."
    )
    positions: PositionChoice = "last"
    heads: Places | None = Field(
        None, description="Of the stages that have heads, from 0. Absent: all."
    )
    interventions: Interventions = Field(default_factory=list)
    dtype: DType = "float32"
    timeout: Timeout = None
    model: ModelName = None


class PromptActivations(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[int]
    stages: dict[str, list[Any]] = Field(
        description="Nested lists by stage, positions first; null: not finite, as the scores of "
        "keys that a position does not see."
    )


class ActivationsReply(OutputReply):
    dtype: HalfOrFull
    prompts: list[PromptActivations]


class StageInfo(ReplyBody):
    """A stage of the model, in each of its layers."""

    name: str = Field(description="With N for the layer.")
    names: list[str] = Field(description="Layer by layer.")
    axes: list[Literal["positions", "n_head", "n_kv_head", "head_dim", "T", "d_model", "d_ff",
                       "vocab_size"]]  # fmt: skip
    shape: list[int | None] = Field(description="null: positions, and T, the prompt's tokens.")
    meaning: str
    changeable: bool = Field(description="Whether an intervention may change it.")
    transformer_lens: str | None = Field(description="What TransformerLens calls it.")


class StagesReply(ReplyBody):
    model: str
    stages: list[StageInfo]
