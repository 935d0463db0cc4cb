"""Schemas of /attributions: which tokens and which parts of the model a logit hangs on."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from logitd.service.schemas.base import (
    Examples,
    ModelName,
    Place,
    PromptBody,
    ReplyBody,
    Text,
    Timeout,
    TokenId,
)
from logitd.service.schemas.tensors import OutputReply

Method = Literal["gradient_times_input", "integrated_gradients", "direct"]


class AttributionsRequest(PromptBody):
    """What the logit of a token hangs on, or the difference of two tokens' logits: by token of the
    prompt, and by head and MLP. Computed in float32 from the weights that are served."""

    examples: ClassVar[Examples] = {
        "Which tokens does the likeliest next one hang on?": {"prompt": "for i in range(10"},
        "One token rather than another, along a path from zero": {
            "prompt": "for i in range(10",
            "token": ")",
            "minus": ",",
            "methods": ["integrated_gradients"],
            "steps": 8,
        },
        "What each head and MLP adds": {
            "prompt": "import os",
            "methods": ["gradient_times_input", "direct"],
        },
    }

    token: Text | None = Field(None, description="Whose logit is attributed, by text.")
    token_id: TokenId | None = Field(
        None, description="The same by id. Without either: the likeliest next token."
    )
    minus: Text | None = Field(None, description="Whose logit is subtracted, by text.")
    minus_id: TokenId | None = Field(None, description="The same by id.")
    position: Place = Field(
        -1, description="Of the prompt, whose logits these are; negative ones count from the end."
    )
    methods: Annotated[list[Method], Field(min_length=1, max_length=3)] = Field(
        ["gradient_times_input"],
        description="gradient_times_input: the gradient with respect to each token's vector, times "
        "that vector; integrated_gradients: the same along a path from a baseline; direct: what "
        "the embedding, each head, each bias and each MLP adds by itself.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Of integrated gradients (absent: 32); each is a forward and a backward pass.",
    )
    baseline: Literal["zero"] | TokenId | None = Field(
        None,
        description="Of integrated gradients: 'zero' vectors (absent: these), or the embedding of "
        "this token id at every position.",
    )
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "AttributionsRequest":
        if self.token is not None and self.token_id is not None:
            raise ValueError("token and token_id both name the token; give one of them")
        if self.minus is not None and self.minus_id is not None:
            raise ValueError("minus and minus_id both name the other token; give one of them")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods names a method twice: {self.methods}")
        for name in ("steps", "baseline"):
            if getattr(self, name) is not None and "integrated_gradients" not in self.methods:
                raise ValueError(
                    f"{name} is given and methods has no 'integrated_gradients'; add it, or leave "
                    f"{name} out"
                )
        return self


class TargetToken(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    logit: float


class AttributedToken(ReplyBody):
    """A token of the prompt, with what each method that was asked for attributes to it. Those
    behind the position have 0."""

    id: int
    text: str
    bytes: list[int]
    gradient_times_input: float | None = None
    integrated_gradients: float | None = None


class PathSummary(ReplyBody):
    """How well the steps of integrated gradients add up."""

    steps: int
    baseline: Literal["zero"] | int
    baseline_value: float = Field(description="The target at the baseline.")
    sum: float = Field(description="Of the tokens' attributions.")
    gap: float = Field(description="sum - (value - baseline_value): 0 with ever more steps.")


class DirectPart(ReplyBody):
    """`stage` is embedding, blocks.N.attention.heads (with `head`), blocks.N.attention.bias,
    blocks.N.mlp.out, final_norm.bias or head.bias; where norms stand behind the sums also
    blocks.N.attention.norm.bias and blocks.N.mlp.norm.bias."""

    stage: str
    head: int | None
    value: float


class DirectContributions(ReplyBody):
    parts: list[DirectPart] = Field(description="In the order of the forward.")
    sum: float = Field(description="Of the parts: the value, but for rounding.")


class PromptAttributions(ReplyBody):
    index: int
    token_ids: list[int]
    position: int
    token: TargetToken
    minus: TargetToken | None
    value: float = Field(description="The target: the logit, less the other's where there is one.")
    tokens: list[AttributedToken]
    integrated_gradients: PathSummary | None = None
    direct: DirectContributions | None = None


class AttributionsReply(OutputReply):
    prompts: list[PromptAttributions]
