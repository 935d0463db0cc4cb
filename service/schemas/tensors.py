"""Schemas of the endpoints that give outputs of the model: /logits, /probs, /score, /hidden_states,
/attention.

Bodies and replies follow the rules of `generate.py`. `Processing` is what /generate would do to the
logits before it samples, as fields of their own, because `top_k` here also says how much of a reply
is listed.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from logitd.service.schemas.base import (
    ChosenIds,
    Examples,
    ModelName,
    Places,
    PositionChoice,
    PromptBody,
    ReplyBody,
    RequestBody,
    Text,
    Timeout,
    TokenIds,
)
from logitd.service.schemas.generate import (
    CheckpointName,
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    Token,
    TopK,
    TopP,
)
from logitd.service.schemas.interventions import Interventions

MAX_CONTINUATIONS = 4096

Stage = Literal["raw", "processed"]
HalfOrFull = Literal["float32", "float16"]
DType = Annotated[
    Literal["float32", "float16", "bfloat16"],
    Field(
        description="The dtype of the reply (bfloat16: safetensors only); the server computes in "
        "its own."
    ),
]


PROCESSED_NEEDS_STAGE = (
    "processing is given and stage is 'raw'; set stage to 'processed', or leave processing out"
)


class Processing(RequestBody):
    """What happens to the logits before a token is sampled; the definitions are those of
    /generate."""

    temperature: Temperature = Field(1.0, description="0 leaves the logits as they are.")
    top_k: TopK = Field(0, description="Keep the k likeliest. 0: all.")
    top_p: TopP = Field(1.0, description="Keep the likeliest that make up p.")
    min_p: MinP = Field(0.0, description="Keep those at least p times as likely as the likeliest.")
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: ChosenIds | None = Field(None, description="No other token is kept.")
    completion_start: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="The position from which the prompt's tokens count as generated, for the "
        "presence and frequency penalties.",
    )

    @model_validator(mode="after")
    def _something_generated(self) -> "Processing":
        if (self.presence_penalty or self.frequency_penalty) and self.completion_start is None:
            raise ValueError(
                "presence_penalty and frequency_penalty look at generated tokens: say with "
                "completion_start from which position the prompt's tokens count as such"
            )
        return self


# POST /logits


class LogitsRequest(PromptBody):
    """Logits of one or many prompts."""

    examples: ClassVar[Examples] = {
        "The five largest after the last token": {"prompt": "def main():", "top_k": 5},
        "Every row of a prompt given as token ids": {"prompt": [1, 2, 3], "positions": "all"},
        "Three columns of the first and the last row": {
            "prompt": "The answer is",
            "positions": [0, -1],
            "token_ids": [10, 11, 12],
        },
        "What is left to sample from": {
            "prompt": "import",
            "top_k": 8,
            "stage": "processed",
            "processing": {"temperature": 0.7, "top_p": 0.9},
        },
    }

    positions: PositionChoice = "last"
    token_ids: ChosenIds | None = Field(None, description="Columns. Absent: the whole vocabulary.")
    top_k: int | None = Field(
        None, ge=1, lt=2**31, description="Only the k largest of each row; not with npy."
    )
    stage: Stage = Field("raw", description="Before or after `processing`.")
    processing: Processing | None = Field(
        None, description="With stage 'processed'; what it drops is -inf, null in JSON."
    )
    dtype: DType = "float32"
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "LogitsRequest":
        if self.token_ids is not None and self.top_k is not None:
            raise ValueError("token_ids and top_k both choose columns; give one of them")
        if self.processing is not None and self.stage == "raw":
            raise ValueError(PROCESSED_NEEDS_STAGE)
        return self


class TopLogit(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    logit: float


class PromptLogits(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[int] = Field(description="Row i predicts the token after this position.")
    columns: list[int] | None = Field(description="Ids of the columns. null: 0, 1, 2, ...")
    logits: list[list[float | None]] | None = Field(description="null: dropped by processing.")
    top: list[list[TopLogit]] | None = Field(description="With top_k, instead of logits.")


class OutputReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName


class LogitsReply(OutputReply):
    stage: Stage
    dtype: HalfOrFull
    prompts: list[PromptLogits]


# POST /probs


class ProbsRequest(PromptBody):
    """The distribution of the token after each prompt. Nothing is sampled."""

    examples: ClassVar[Examples] = {
        "The three likeliest next tokens": {"prompt": "if __name__ ==", "top_k": 3},
        "Two tokens, after each of two prompts": {
            "prompt": ["for i in", "if not"],
            "tokens": [" ", "("],
        },
        "What /generate would sample from": {
            "prompt": "import",
            "stage": "processed",
            "processing": {"temperature": 0.7, "top_p": 0.9},
        },
    }

    top_k: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="The k likeliest tokens. Absent, without token_ids or tokens: 10.",
    )
    token_ids: ChosenIds | None = Field(None, description="These tokens, whatever their rank.")
    tokens: list[Text] | None = Field(
        None,
        min_length=1,
        max_length=4096,
        fail_fast=True,
        description="These tokens, by text; each must be one token of the vocabulary.",
    )
    stage: Stage = Field("raw", description="Before or after `processing`.")
    processing: Processing | None = Field(None, description="With stage 'processed'.")
    perplexity: bool = Field(False, description="Also the perplexity of each prompt itself.")
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "ProbsRequest":
        named = [
            name for name in ("top_k", "token_ids", "tokens") if getattr(self, name) is not None
        ]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} all choose tokens; give one of them")
        if self.processing is not None and self.stage == "raw":
            raise ValueError(PROCESSED_NEEDS_STAGE)
        return self


class TokenProb(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    prob: float
    logprob: float | None = Field(description="null: dropped by processing, with prob 0.")
    rank: int


class PromptProbs(ReplyBody):
    index: int
    token_ids: list[int]
    tokens: list[TokenProb]
    mass: float = Field(description="Probability of the listed tokens together.")
    entropy: float = Field(description="Of the whole distribution, in nats.")
    perplexity: float | None = Field(
        None, description="Of the prompt, its first token left out; null for a single token."
    )


class ProbsReply(OutputReply):
    stage: Stage
    prompts: list[PromptProbs]


# POST /score


class ScoreRequest(PromptBody):
    """How likely given texts are: each prompt as a whole, or continuations of it."""

    examples: ClassVar[Examples] = {
        "Which of three endings?": {
            "prompt": "import os\n\ndef main(",
            "continuations": ["):", "self):", "os):"],
        },
        "A whole text, token by token": {"prompt": "for i in range(10):", "logprobs": 0},
        "Two texts": {"prompt": ["return None", "return Nobody"]},
    }

    continuations: (
        Annotated[
            list[Text | TokenIds],
            Field(min_length=1, max_length=MAX_CONTINUATIONS, fail_fast=True),
        ]
        | None
    ) = Field(
        None,
        description="Scored after each prompt, which is computed once. Each is tokenized by "
        "itself. Absent: the prompt itself is scored.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="List each token's logprob, and the k likeliest in its place.",
    )
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None


class TextScore(ReplyBody):
    index: int
    token_ids: list[int]
    tokens: list[Token] | None = Field(None, description="With `logprobs`.")
    scored_tokens: int = Field(description="A prompt's first token is predicted by nothing.")
    logprob: float = Field(description="Sum over the scored tokens, in nats.")
    is_greedy: bool = Field(description="Whether temperature 0 would have given these tokens.")
    perplexity: float | None = Field(description="null where no token is scored.")
    bits_per_byte: float | None = Field(description="Over the bytes of the scored tokens.")


class PromptScores(ReplyBody):
    index: int
    token_ids: list[int]
    score: TextScore | None = Field(None, description="Without continuations: the prompt's.")
    continuations: list[TextScore] | None = None


class ScoreUsage(ReplyBody):
    prompt_tokens: int
    scored_tokens: int
    cached_tokens: int


class ScoreReply(OutputReply):
    prompts: list[PromptScores]
    usage: ScoreUsage


# POST /hidden_states, POST /attention


class HiddenStatesRequest(PromptBody):
    """The residual stream at chosen layers and positions."""

    examples: ClassVar[Examples] = {
        "The last position after every block": {"prompt": "def main():"},
        "Every position before the final norm": {
            "prompt": "def main():",
            "layers": [-1],
            "positions": "all",
        },
    }

    layers: Places | None = Field(
        None,
        description="0 is after the embeddings, i after block i, before the final norm; negative "
        "ones count from the end. Absent: all.",
    )
    positions: PositionChoice = "last"
    dtype: DType = "float32"
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None


class PromptHiddenStates(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[int]
    layers: list[int]
    hidden_states: list[list[list[float]]] = Field(description="(layers, positions, d_model)")


class HiddenStatesReply(OutputReply):
    dtype: HalfOrFull
    prompts: list[PromptHiddenStates]


class AttentionRequest(PromptBody):
    """Attention weights: how much each position looks at each before it, by layer and head."""

    examples: ClassVar[Examples] = {
        "All heads of the first block": {
            "prompt": "def main():",
            "layers": [0],
            "positions": "all",
        },
        "Where one head looks from the last token": {
            "prompt": "for i in range(10): print(",
            "layers": [2],
            "heads": [0],
        },
    }

    layers: Places | None = Field(None, description="Blocks, from 0. Absent: all.")
    heads: Places | None = Field(None, description="From 0. Absent: all.")
    positions: PositionChoice = "last"
    dtype: DType = "float32"
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None


class PromptAttention(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[int]
    layers: list[int]
    heads: list[int]
    attention: list[list[list[list[float]]]] = Field(
        description="(layers, heads, positions, tokens); each row sums to 1"
    )


class AttentionReply(OutputReply):
    dtype: HalfOrFull
    prompts: list[PromptAttention]
