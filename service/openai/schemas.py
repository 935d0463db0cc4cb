"""Bodies and replies of /v1/completions and /v1/models, and the definitions that they share with
chats.

Fields that /generate also has take their bounds and descriptions from it. Every optional field
accepts null and defaults to it, because OpenAI's clients send null. Unsupported fields are accepted
with a neutral value; other values are refused with a message that names the field. Replies have the
format that OpenAI's clients expect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from logitd.model.inference.sampling.params import SamplingFields
from logitd.model.operations.body import (
    CheckpointName,
    ChosenIds,
    Examples,
    ModelBody,
    PromptBody,
    ReplyBody,
    RequestBody,
    Stage,
    Timeout,
    TokenId,
)
from logitd.model.operations.generate import (
    Choices,
    GenerateRequest,
    Pattern,
    StopString,
    StopStrings,
)

COMPLETION_TOKENS = 16
"""Default of `max_tokens` in /v1/completions, as in OpenAI's API."""


def native(name: str) -> Any:
    """A field with the bounds and the description of /generate's field, and the default null."""
    field = GenerateRequest.model_fields[name]
    bounds = {key: value for bound in field.metadata for key, value in asdict(bound).items()}
    return Field(None, description=field.description, **bounds)


def only(*neutral: Any) -> BeforeValidator:
    """A validator that accepts null and the neutral values of an unsupported field."""

    def check(value: Any, info: ValidationInfo) -> None:
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise ValueError(f"{info.field_name} is not supported; leave it out or send null")

    return BeforeValidator(check)


def unsupported() -> Any:
    """An unsupported field that clients send with a neutral value."""
    return Field(None, description="Not supported: only null and neutral values are accepted.")


def unsupported_fields(neutral: Mapping[str, Sequence[Any]]) -> Any:
    """Definitions of unsupported fields. `neutral` maps each name to the values that are accepted
    besides null."""
    return {
        name: (Annotated[Any, only(*values)], unsupported()) for name, values in neutral.items()
    }


Seed = Annotated[
    int | None,
    Field(
        ge=-(2**63),
        lt=2**63,
        description="The same seed gives the same tokens. A seed of 0 or more gives the tokens "
        "that /generate returns for it, a seed below -1 the tokens for 2^64 + seed. Absent "
        "or -1: a seed is drawn for each prompt, and returned.",
    ),
]
User = Annotated[
    str | None,
    Field(max_length=512, description="Your name for the user. Its beginning is logged."),
]


class StreamOptions(RequestBody):
    """Additional members of a stream's chunks."""

    include_usage: bool | None = Field(
        None, description="Add a last chunk with the usage. In all other chunks, `usage` is null."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Add the usage so far to every chunk."
    )
    include_obfuscation: Annotated[Any, only(False)] = unsupported()


class JsonSchemaFormat(RequestBody):
    """A JSON schema that the text must match."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, validate_default=True)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With `json_object`: its schema, as in llama.cpp."
    )

    @field_validator("json_schema")
    @classmethod
    def _schema_with_its_type(
        cls, schema: JsonSchemaFormat | None, info: ValidationInfo
    ) -> JsonSchemaFormat | None:
        if (schema is not None) != (info.data.get("type") == "json_schema"):
            raise ValueError(
                "json_schema must be set if type is 'json_schema', and only then: set both or "
                "neither"
            )
        return schema

    @field_validator("schema_")
    @classmethod
    def _schema_of_an_object(
        cls, schema: dict[str, Any] | None, info: ValidationInfo
    ) -> dict[str, Any] | None:
        if schema is not None and info.data.get("type") != "json_object":
            raise ValueError(
                "schema requires the type 'json_object': set type to it, or leave schema out"
            )
        return schema


JsonSchema = Annotated[
    dict[str, Any] | Pattern,
    Field(description="A JSON schema, as an object or as a string of JSON."),
]


class StructuredOutputs(RequestBody):
    """A constraint on the text, with vLLM's names. Set exactly one of the first five fields."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None

    disable_additional_properties: Annotated[Any, only(False)] = unsupported()
    disable_any_whitespace: Annotated[Any, only(False)] = unsupported()
    disable_fallback: Annotated[Any, only(False)] = unsupported()
    structural_tag: Annotated[Any, only()] = unsupported()
    whitespace_pattern: Annotated[Any, only()] = unsupported()

    @model_validator(mode="after")
    def _has_a_constraint(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if given == (None,) * len(given):
            raise ValueError(
                "structured_outputs has no constraint; give one of json, regex, choice, grammar "
                "and json_object, or leave it out"
            )
        return self


def _optional(name: str, field: FieldInfo) -> Any:
    """The type and default of a field of /generate, except that it also accepts null, which means
    the native default."""
    return field.annotation | None, native(name)  # type: ignore[operator]


_FIELDS: Any = {name: _optional(name, f) for name, f in SamplingFields.model_fields.items()}
Sampling = create_model("Sampling", **_FIELDS)
"""The fields of `SamplingFields`, with null as their default."""


OTHER_SERVERS: Mapping[str, Sequence[Any]] = {
    "add_special_tokens": [False],
    "bad_words": [[]],
    "cache_prompt": [True],
    "guided_decoding_backend": ["auto", "guidance"],
    "guided_whitespace_pattern": [],
    "include_stop_str_in_output": [False],
    "length_penalty": [1, 1.0],
    "no_stop_trim": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [],
    "use_beam_search": [False],
}
"""Unsupported fields sent by clients of vLLM, SGLang and llama.cpp, with their neutral values."""
OtherServers = create_model("OtherServers", **unsupported_fields(OTHER_SERVERS))


class SamplingBody(Sampling, OtherServers, ModelBody):
    stream: bool | None = native("stream")
    stream_options: StreamOptions | None = Field(
        None, description="Additional members of a stream's chunks; no effect without `stream`."
    )
    logit_bias: dict[str, float] | None = native("logit_bias")
    stop: StopString | StopStrings | None = native("stop")
    seed: Seed = None
    response_format: ResponseFormat | None = Field(
        None, description="The answer is any text, any JSON object, or JSON that fits a schema."
    )
    user: User = None

    structured_outputs: StructuredOutputs | None = Field(
        None, description="A constraint on the text, in the form of vLLM's clients."
    )
    guided_json: JsonSchema | None = Field(
        None, description="Older name of `structured_outputs.json`."
    )
    guided_regex: Pattern | None = Field(
        None, description="Older name of `structured_outputs.regex`."
    )
    guided_choice: Choices | None = Field(
        None, description="Older name of `structured_outputs.choice`."
    )
    guided_grammar: Pattern | None = Field(
        None, description="Older name of `structured_outputs.grammar`."
    )

    allowed_token_ids: ChosenIds | None = native("allowed_token_ids")
    stop_token_ids: list[TokenId] | None = native("stop_token_ids")
    ignore_eos: bool | None = native("ignore_eos")
    min_tokens: int | None = native("min_tokens")
    logprobs_stage: Stage | None = native("logprobs_stage")
    priority: int | None = native("priority")
    timeout: Timeout = None


# POST /v1/completions


class CompletionRequest(SamplingBody, PromptBody):
    """Continue one or several prompts, in OpenAI's format."""

    examples: ClassVar[Examples] = {
        "The same text each time": {
            "prompt": "def main():",
            "max_tokens": 40,
            "temperature": 0.8,
            "seed": 1,
        },
        "Only the logprobs of a given text": {
            "prompt": "import os",
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        },
        "A stream with its usage": {
            "prompt": "class",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    }

    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description=f"Maximum number of generated tokens. Absent: {COMPLETION_TOKENS}. 0 with "
        "`echo` returns only the prompt and its logprobs.",
    )
    n: int | None = native("n")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Return the logprob of each token, and the logprobs of the k likeliest tokens "
        "at its place; with `echo` also for the prompt's tokens, except the first.",
    )
    best_of: int | None = Field(
        None, ge=1, description="Not supported: only null and the value of `n` are accepted."
    )
    suffix: Annotated[Any, only("")] = unsupported()

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if best_of is not None and best_of != n:
            raise ValueError(
                f"best_of is {best_of} and n is {n}, but the server returns all completions that "
                "it generates. Leave best_of out, set n to the number of completions, and choose "
                "by their logprobs"
            )
        return best_of


class CompletionLogprobs(ReplyBody):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of a prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(
        description="Number of characters of `text` that are complete before the token."
    )


class CompletionChoice(ReplyBody):
    index: int = Field(
        description="Index of the prompt times n, plus the index among the prompt's n choices."
    )
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    seed: int = Field(description="The request's seed, or the one drawn for the prompt.")


class PromptTokensDetails(ReplyBody):
    cached_tokens: int = Field(description="Prompt tokens copied instead of computed.")


class CompletionUsage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class OpenAIReply(ReplyBody):
    id: str
    created: int
    model: str
    system_fingerprint: str = Field(description="The checkpoint's step and weights.")
    usage: CompletionUsage


class CompletionReply(OpenAIReply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# GET /v1/models


class Model(ReplyBody):
    id: str
    object: Literal["model"]
    created: int = Field(description="Time at which the checkpoint was saved; 0 if unknown.")
    owned_by: Literal["logitd"]
    max_model_len: int = Field(description="The context length, in tokens.")
    checkpoint: CheckpointName


class ModelList(ReplyBody):
    object: Literal["list"]
    data: list[Model]
