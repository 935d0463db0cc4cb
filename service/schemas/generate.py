"""Schemas of /generate and of what says how the server is: its health, its model.

Bodies and replies follow the rules of `base.py`.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from logitd.service.schemas.base import (
    ChosenIds,
    Examples,
    ModelName,
    PromptBody,
    ReplyBody,
    Text,
    Timeout,
    TokenId,
)
from logitd.service.schemas.interventions import Interventions

MAX_STOP_TEXTS = 64

MAX_CHOICES = 1024
MAX_CONSTRAINT = 2**15
"""Characters of a regex, of a grammar, of a schema as JSON, and of all choices together."""

Pattern = Annotated[str, Field(max_length=MAX_CONSTRAINT)]
# What happens to the logits before a token is sampled. Where no description stands here, each
# endpoint says in its own words what the value does there.
Temperature = Annotated[float, Field(ge=0, le=1e6)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[
    float,
    Field(ge=0.01, le=100, description="Divides the logits of tokens seen so far. 1: off."),
]
PresencePenalty = Annotated[
    float, Field(ge=-100, le=100, description="Taken once from tokens generated so far.")
]
FrequencyPenalty = Annotated[
    float,
    Field(
        ge=-100,
        le=100,
        description="Taken from generated tokens as often as they occurred.",
    ),
]
LogitBias = Annotated[
    dict[str, float],
    Field(max_length=4096, description="Added to the logits: {token id: bias}."),
]


# POST /generate


class GenerateRequest(PromptBody):
    """Generate text after one or many prompts."""

    examples: ClassVar[Examples] = {
        "The same text each time": {
            "prompt": "def main():",
            "max_tokens": 40,
            "temperature": 0.8,
            "seed": 1,
        },
        "Greedy, with what else was likely": {
            "prompt": "import os",
            "max_tokens": 20,
            "temperature": 0,
            "logprobs": 3,
        },
        "Two streams for each of two prompts": {
            "prompt": ["The", "class"],
            "n": 2,
            "max_tokens": 8,
            "stream": True,
        },
        "Until the line ends": {"prompt": "    return ", "max_tokens": 60, "stop": "\n"},
        "Text that matches a regular expression": {
            "prompt": "__version__ = ",
            "regex": '"[0-9]\\.[0-9]{1,2}\\.[0-9]{1,2}"',
            "max_tokens": 24,
        },
        "JSON by a schema": {
            "prompt": "# The settings as JSON:\n",
            "json_schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
                    "debug": {"type": "boolean"},
                },
                "required": ["name", "debug"],
                "additionalProperties": False,
            },
            "max_tokens": 60,
        },
        "One of several answers": {
            "prompt": "import os.path as ",
            "choice": ["path", "osp", "p"],
            "max_tokens": 8,
        },
        "A sentence of a grammar": {
            "prompt": "total = ",
            "grammar": 'start: TERM (" + " TERM){0,3}\nTERM: /[a-z]{1,8}/',
            "max_tokens": 40,
        },
    }

    max_tokens: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Tokens to generate at most. Absent: what fits.",
    )
    temperature: Temperature = Field(1.0, description="0 is greedy.")
    top_k: TopK = Field(0, description="Sample from the k likeliest. 0: all.")
    top_p: TopP = Field(1.0, description="Sample from the likeliest that make up p.")
    min_p: MinP = Field(
        0.0, description="Sample from those at least p times as likely as the likeliest."
    )
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: ChosenIds | None = Field(None, description="No other token can be sampled.")
    regex: Pattern | None = Field(
        None, description="The whole text matches this expression, in the syntax of Rust's regex."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="The text is one JSON value by this schema, on one line."
    )
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(
        None, description="The text is one of these."
    )
    grammar: Pattern | None = Field(
        None, description="The text is a sentence of this grammar, in llguidance's dialect of Lark."
    )
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] = Field(
        default_factory=list, description="Texts that end the completion; not part of it."
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=4096,
        fail_fast=True,
        description="Tokens that end the completion.",
    )
    ignore_eos: bool = Field(False, description="Go on after the end-of-text token.")
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="Before as many tokens, none that ends the text is sampled."
    )
    seed: int | None = Field(
        None, ge=0, lt=2**64, description="Same seed, same tokens. Absent: drawn, and returned."
    )
    n: int = Field(1, ge=1, le=4096, description="Completions per prompt.")
    logprobs: int | None = Field(
        None, ge=0, lt=2**31, description="Logprob of each token, and of the k likeliest."
    )
    logprobs_stage: Literal["raw", "processed"] = Field(
        "raw", description="Logprobs before or after bias, penalties, temperature and filters."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Raw logprob of each token of the prompt, and of the k likeliest in its place.",
    )
    echo: bool = Field(False, description="Begin text, token_ids and tokens with the prompt.")
    priority: int = Field(
        0, ge=-100, le=100, description="Lower is admitted earlier; equals as they arrive."
    )
    prefix_reuse: bool = Field(
        True, description="Whether the prompt may copy a prefix that was computed before."
    )
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None
    stream: bool = Field(False, description="Answer with server-sent events.")

    @model_validator(mode="after")
    def _prompt_is_not_processed(self) -> "GenerateRequest":
        if self.echo and self.logprobs is not None and self.logprobs_stage == "processed":
            raise ValueError(
                "echo gives the prompt's logprobs too, and those are raw: set logprobs_stage to "
                "'raw', or leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> "GenerateRequest":
        fields = ("regex", "json_schema", "choice", "grammar")
        given = [name for name in fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say what the text is; give one of them")
        if given and self.ignore_eos:
            raise ValueError(
                f"{given[0]} says where the text ends, ignore_eos that it does not end: give one"
            )
        return self

    @field_validator("json_schema")
    @classmethod
    def _schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and (length := len(json.dumps(schema))) > MAX_CONSTRAINT:
            raise ValueError(f"json_schema has {length} characters; {MAX_CONSTRAINT} are allowed")
        return schema

    @field_validator("choice")
    @classmethod
    def _choices(cls, choice: list[str] | None) -> list[str] | None:
        if choice is None:
            return None
        if not all(choice) or not choice:
            raise ValueError("choice must have at least one text, and none that is empty")
        if len(set(choice)) < len(choice):
            raise ValueError("choice has a text twice")
        length = sum(map(len, choice))
        if len(choice) > MAX_CHOICES or length > MAX_CONSTRAINT:
            raise ValueError(
                f"choice has {len(choice)} texts of {length} characters together; {MAX_CHOICES} "
                f"and {MAX_CONSTRAINT} are allowed"
            )
        return choice

    @field_validator("stop")
    @classmethod
    def _stop_texts(cls, stop: str | list[str]) -> str | list[str]:
        texts = [stop] if isinstance(stop, str) else stop
        if len(texts) > MAX_STOP_TEXTS:
            raise ValueError(f"stop has {len(texts)} texts; {MAX_STOP_TEXTS} are allowed")
        if any(not text for text in texts):
            raise ValueError("stop has an empty text, which would end every completion at once")
        if any(len(text) > 1024 for text in texts):
            raise ValueError("stop has a text of more than 1024 characters")
        return stop

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class CheckpointName(ReplyBody):
    name: str
    step: int
    val_loss: float | None = Field(description="Nats per token on the validation text.")
    weights_sha256: str


class TopToken(ReplyBody):
    id: int
    text: str = Field(description="For people; bytes that are not UTF-8 show as U+FFFD.")
    bytes: list[int]
    logprob: float
    rank: int = Field(description="1 is the likeliest.")


class Token(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    logprob: float | None = Field(description="null for the first of a prompt: nothing predicts it")
    rank: int | None
    top: list[TopToken]


class ScoredPrompt(ReplyBody):
    index: int
    tokens: list[Token]


class Choice(ReplyBody):
    index: int
    prompt_index: int
    text: str
    token_ids: list[int]
    tokens: list[Token] | None = Field(None, description="When logprobs were asked for.")
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = Field(description="The stop text or token id that ended it.")


class Usage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = Field(description="Prompt tokens copied instead of computed.")


class Timings(ReplyBody):
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float = Field(description="Arrival to the first token.")
    tokens_per_second: float = Field(description="Generated tokens over the decoding time.")


class GenerateReply(ReplyBody):
    id: str
    created: int
    model: str
    checkpoint: CheckpointName
    choices: list[Choice]
    prompts: list[ScoredPrompt] | None = Field(None, description="With prompt_logprobs.")
    usage: Usage
    seed: int
    timings: Timings


# Errors and GET replies


class ModelStatus(ReplyBody):
    """Whether one of several models answers."""

    model: str
    status: Literal["ok", "stalled", "failed"]
    reason: str | None = Field(description="Why it does not, where that is known.")


class Health(ReplyBody):
    status: Literal["ok", "loading", "draining", "stalled", "failed"]
    reason: str | None = None
    models: list[ModelStatus] | None = Field(
        None, description="Each of several. One that could not be loaded takes no other along."
    )


class QuantizationInfo(ReplyBody):
    """What quantizing weights, or keys and values, costs, measured when they were loaded; the
    figures are null where no text was found to measure on."""

    kind: str = Field(description="Of the weights: `int8`, `int4` or `none`.")
    kv_cache_dtype: str = Field(description="Of keys and values: `int8`, or `auto` for `dtype`.")
    relative_loss: float | None = Field(
        description="Bits per byte that quantization adds, as a share of those without it."
    )
    bits_per_byte: float | None
    exact_bits_per_byte: float | None = Field(description="The same without quantization.")
    tokens: int | None
    text: str = Field(description="What it was measured on, or why it was not.")


class Info(ReplyBody):
    version: str
    model: str
    models: list[ModelStatus] = Field(
        description="All that were to be served, also what could not be loaded; the first answers "
        "requests that name none."
    )
    checkpoint: CheckpointName
    config: dict[str, Any] = Field(description="The model's shape: config.json's `model`.")
    vocabulary: str = Field(
        description="Its tokenizer's kind, as in /tokenizer_info; of `none` prompts are token ids."
    )
    training: dict[str, Any] = Field(description="Where the weights come from.")
    parameters: int
    device: str
    decoding: str = Field(description="How decode steps are computed.")
    kernels: str | None = Field(
        description="Which native kernels were loaded: their target, and whether they were "
        "compiled now or before, or prebuilt; null without any."
    )
    speculate: str = Field(
        description="Where drafts come from, tokens that a decode step verifies: `ngram`, from the "
        "text itself, or `none`. Answers do not depend on it."
    )
    dtype: str = Field(description="The dtype of the computation.")
    quantization: QuantizationInfo | None = Field(description="null where nothing is quantized.")
    threads: int
    slots: int
    kv_cache_bytes: int
    prefill_chunk: int = Field(description="Prompt positions that a step computes at most.")
    target_gap: str = Field(
        description="How long a step should take at most that computes prompts while others "
        "decode: `4x` is four times a step that only decodes, `0.15s` a time; `none`: "
        "`prefill_chunk` alone bounds it."
    )
    api_keys: bool = Field(description="Whether requests need an API key.")
    limits: dict[str, int]


class CurvePoint(ReplyBody):
    step: int
    loss: float = Field(description="Nats per token; of the training smoothed.")
    bits_per_byte: float | None = Field(description="Where it was measured.")


class TrainingCurve(ReplyBody):
    training: list[CurvePoint]
    validation: list[CurvePoint]


class CardReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    card: str | None = Field(description="Markdown; null where the checkpoint has none.")
    curve: TrainingCurve


class Version(ReplyBody):
    version: str
