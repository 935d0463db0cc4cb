"""Bodies of the OpenAI endpoints, as pydantic models.

Fields that /generate has too are taken from there, with their bounds and descriptions; null means
the default in every optional one, as OpenAI's clients send it. Fields of OpenAI's that are not
supported are accepted when they ask for nothing, and otherwise rejected by name. Replies have the
shape that the official clients read.
"""

from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

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
    ModelName,
    PromptBody,
    ReplyBody,
    RequestBody,
    Text,
    Timeout,
    TokenId,
)
from logitd.model.operations.generate import GenerateRequest, Pattern

MAX_MESSAGES = 4096
MAX_TOOLS = 128
COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where it is not given, as OpenAI has it."""


def native(name: str) -> Any:
    """A field as /generate has it, but for null, which stands for its default."""
    field = GenerateRequest.model_fields[name]
    bounds = {key: value for bound in field.metadata for key, value in asdict(bound).items()}
    return Field(None, description=field.description, **bounds)


def only(*neutral: Any) -> BeforeValidator:
    """Accepts null and `neutral`: what a field says that asks for nothing."""

    def check(value: Any, info: ValidationInfo) -> None:
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise ValueError(f"{info.field_name} is not supported here; leave it out or send null")

    return BeforeValidator(check)


def unsupported() -> Any:
    """A field of OpenAI's that is here because clients send it without asking for anything."""
    return Field(None, description="Not supported: rejected unless it asks for nothing.")


Seed = Annotated[
    int | None,
    Field(
        ge=-(2**63),
        lt=2**63,
        description="Same seed, same tokens: those of /generate with this seed, from 0 up, and "
        "with 2^64 + seed below -1. Absent or -1: drawn for each prompt, and returned.",
    ),
]
User = Annotated[
    str | None,
    Field(max_length=512, description="Your name for whoever asks; it goes into the log, clipped."),
]


class StreamOptions(RequestBody):
    """What a stream gives besides its choices."""

    include_usage: bool | None = Field(
        None, description="A last chunk with the usage; in the others `usage` is null."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk."
    )
    include_obfuscation: Annotated[Any, only(False)] = unsupported()


class JsonSchemaFormat(RequestBody):
    """A JSON schema that a reply has to fit."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """What a reply has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, validate_default=True)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With `json_object`: its schema, as llama.cpp takes it."
    )

    @field_validator("json_schema")
    @classmethod
    def _schema_with_its_type(
        cls, schema: JsonSchemaFormat | None, info: ValidationInfo
    ) -> JsonSchemaFormat | None:
        if (schema is not None) != (info.data.get("type") == "json_schema"):
            raise ValueError(
                "response_format: the type 'json_schema' and the member json_schema go together"
            )
        return schema

    @field_validator("schema_")
    @classmethod
    def _schema_of_an_object(
        cls, schema: dict[str, Any] | None, info: ValidationInfo
    ) -> dict[str, Any] | None:
        if schema is not None and info.data.get("type") != "json_object":
            raise ValueError("response_format: the member schema goes with the type 'json_object'")
        return schema


JsonSchema = Annotated[
    dict[str, Any] | Pattern, Field(description="A JSON schema, or one as a string of JSON.")
]
Choices = Annotated[list[Text], Field(fail_fast=True)]


class StructuredOutputs(RequestBody):
    """What a text has to match, as vLLM names it. One of the first five."""

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


def _optional(name: str, field: FieldInfo) -> Any:
    """A field's type and default, with null for the native default."""
    return field.annotation | None, native(name)  # type: ignore[operator]


_FIELDS: Any = {name: _optional(name, f) for name, f in SamplingFields.model_fields.items()}
Sampling = create_model("Sampling", **_FIELDS)
"""The fields of `SamplingFields`."""


class SamplingBody(Sampling, RequestBody):
    """The fields that both endpoints have: OpenAI's, then ours."""

    model: ModelName = None
    stream: bool | None = native("stream")
    stream_options: StreamOptions | None = Field(
        None, description="What a stream says; without `stream` it changes nothing."
    )
    logit_bias: dict[str, float] | None = native("logit_bias")
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = native("stop")
    seed: Seed = None
    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object, or JSON that fits a schema."
    )
    user: User = None

    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the text has to match, as vLLM's clients say it."
    )
    guided_json: JsonSchema | None = Field(
        None, description="An older name of `structured_outputs.json`."
    )
    guided_regex: Pattern | None = Field(
        None, description="An older name of `structured_outputs.regex`."
    )
    guided_choice: Choices | None = Field(
        None, description="An older name of `structured_outputs.choice`."
    )
    guided_grammar: Pattern | None = Field(
        None, description="An older name of `structured_outputs.grammar`."
    )
    guided_decoding_backend: Annotated[Any, only("auto", "guidance")] = unsupported()
    guided_whitespace_pattern: Annotated[Any, only()] = unsupported()

    allowed_token_ids: ChosenIds | None = native("allowed_token_ids")
    stop_token_ids: list[TokenId] | None = native("stop_token_ids")
    ignore_eos: bool | None = native("ignore_eos")
    min_tokens: int | None = native("min_tokens")
    logprobs_stage: Literal["raw", "processed"] | None = native("logprobs_stage")
    priority: int | None = native("priority")
    timeout: Timeout = None

    # Of vLLM, SGLang and llama.cpp, whose clients send the values that change nothing here.
    add_special_tokens: Annotated[Any, only(False)] = unsupported()
    bad_words: Annotated[Any, only([])] = unsupported()
    cache_prompt: Annotated[Any, only(True)] = unsupported()
    include_stop_str_in_output: Annotated[Any, only(False)] = unsupported()
    length_penalty: Annotated[Any, only(1, 1.0)] = unsupported()
    no_stop_trim: Annotated[Any, only(False)] = unsupported()
    return_token_ids: Annotated[Any, only(False)] = unsupported()
    return_tokens_as_token_ids: Annotated[Any, only(False)] = unsupported()
    skip_special_tokens: Annotated[Any, only(False)] = unsupported()
    truncate_prompt_tokens: Annotated[Any, only()] = unsupported()
    use_beam_search: Annotated[Any, only(False)] = unsupported()


# POST /v1/completions


class CompletionRequest(SamplingBody, PromptBody):
    """Continue one or many prompts, in OpenAI's shape."""

    examples: ClassVar[Examples] = {
        "The same text each time": {
            "prompt": "def main():",
            "max_tokens": 40,
            "temperature": 0.8,
            "seed": 1,
        },
        "The logprobs of a given text, nothing generated": {
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
        description=f"Tokens to generate at most. Absent: {COMPLETION_TOKENS}. 0 with `echo` "
        "gives the prompt and its logprobs alone.",
    )
    n: int | None = native("n")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Logprob of each token, and of the k likeliest; with `echo` of the prompt's "
        "tokens too, where the first has none.",
    )
    best_of: int | None = Field(None, ge=1, description="Not supported: `n` or null only.")
    suffix: Annotated[Any, only("")] = unsupported()

    @field_validator("best_of")
    @classmethod
    def _no_choice_of_the_best(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if best_of is not None and best_of != n:
            raise ValueError(
                f"best_of is {best_of} and n is {n}: all completions are returned here, none is "
                "chosen. Leave best_of out, and choose by logprobs"
            )
        return best_of


class CompletionLogprobs(ReplyBody):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first of a prompt.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(
        description="Characters of `text` that were whole before the token."
    )


class CompletionChoice(ReplyBody):
    index: int = Field(description="Of the prompt times n, plus which of its n.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    seed: int = Field(description="Of the prompt: as given, or drawn.")


class PromptTokensDetails(ReplyBody):
    cached_tokens: int = Field(description="Prompt tokens copied instead of computed.")


class CompletionUsage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionReply(ReplyBody):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str = Field(description="The checkpoint's step and weights.")
    choices: list[CompletionChoice]
    usage: CompletionUsage


# POST /v1/chat/completions


class TextPart(ReplyBody):
    type: Literal["text"]
    text: str


def _one_text(content: Any) -> Any:
    """A content of several text parts, joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"messages hold a part of type {str(kind)[:40]!r}; text parts are supported alone"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError("messages hold a text part that has more, or less, than type and text")
    return "\n".join(part["text"] for part in content)


class FunctionCall(RequestBody):
    """A function and what it is called with."""

    name: Text
    arguments: Text = Field(description="JSON.")


class ToolCall(RequestBody):
    """A call that an assistant made."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who says it; developer is another word for system."
    )
    content: Annotated[
        Text | None, BeforeValidator(_one_text, json_schema_input_type=str | list[TextPart] | None)
    ] = Field(
        None,
        description="A text, or text parts, which are joined by line breaks. Only an assistant's "
        "message with `tool_calls` may do without.",
    )
    name: Text | None = Field(None, description="For a template that tells speakers apart.")
    tool_calls: list[ToolCall] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description="Calls that an assistant made; they are shown to the model as JSON.",
    )
    tool_call_id: Text | None = Field(
        None, description="Of a tool's message: the call that it answers."
    )

    annotations: Annotated[Any, only([])] = unsupported()
    audio: Annotated[Any, only()] = unsupported()
    function_call: Annotated[Any, only()] = unsupported()
    refusal: Annotated[Any, only("")] = unsupported()

    @model_validator(mode="after")
    def _role_and_content(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"messages hold tool_calls of the role {self.role!r}; assistants call")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("messages hold a tool_call_id whose role is not 'tool'")
        if self.content is None and not self.tool_calls:
            raise ValueError("messages hold a message without content")
        return self


class Conversation(RequestBody):
    """What is to be answered."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="The conversation so far.",
    )


class FunctionDefinition(RequestBody):
    """A function that can be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="The JSON schema of its arguments. Absent: it has none."
    )
    strict: bool | None = Field(None, description="Arguments always fit the schema.")


class Tool(RequestBody):
    """Something that can be called: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """Which function."""

    name: str


class NamedTool(RequestBody):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingBody, Conversation):
    """Answer in a conversation, in OpenAI's shape. The checkpoint needs a chat template."""

    examples: ClassVar[Examples] = {
        "One question": {
            "messages": [{"role": "user", "content": "What does os.path.join do?"}],
            "max_tokens": 30,
            "seed": 1,
        },
        "A conversation, streamed": {
            "messages": [
                {"role": "system", "content": "Answer in one line."},
                {"role": "user", "content": "What is a list?"},
                {"role": "assistant", "content": "A sequence that can change."},
                {"role": "user", "content": "And a tuple?"},
            ],
            "max_tokens": 30,
            "stream": True,
        },
        "A call of a function": {
            "messages": [{"role": "user", "content": "List the files in src."}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "list_files",
                        "parameters": {
                            "type": "object",
                            "properties": {"folder": {"type": "string", "maxLength": 20}},
                            "required": ["folder"],
                        },
                    },
                }
            ],
            "tool_choice": "required",
            "max_tokens": 60,
        },
    }

    max_completion_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Tokens to generate at most. Absent: what fits."
    )
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="The older name of max_completion_tokens."
    )
    n: int | None = Field(None, ge=1, le=4096, description="Answers.")
    logprobs: bool | None = Field(None, description="Logprob of each token of the answer.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="With `logprobs`: of the k likeliest, too."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the template begins an answer. Absent: unless the final message is "
        "continued.",
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the text of the final message, instead of a new one."
    )
    audio: Annotated[Any, only()] = unsupported()
    chat_template: Annotated[Any, only()] = unsupported()
    chat_template_kwargs: Annotated[Any, only({})] = unsupported()
    documents: Annotated[Any, only([])] = unsupported()
    echo: Annotated[Any, only(False)] = unsupported()
    function_call: Annotated[Any, only("none")] = unsupported()
    functions: Annotated[Any, only([])] = unsupported()
    metadata: dict[str, Text] | None = Field(
        None, description="For what is stored; as nothing is, it changes nothing."
    )
    modalities: Annotated[Any, only(["text"])] = unsupported()
    moderation: Annotated[Any, only()] = unsupported()
    parallel_tool_calls: bool | None = Field(
        None, description="Whether several calls are allowed; an answer has one."
    )
    prediction: Annotated[Any, only()] = unsupported()
    prompt_cache_key: Text | None = Field(
        None, description="Prefixes are found without it; it changes nothing."
    )
    prompt_cache_options: Annotated[Any, only()] = unsupported()
    prompt_cache_retention: Annotated[Any, only("in_memory", "in-memory")] = unsupported()
    reasoning_effort: Annotated[Any, only("none")] = unsupported()
    safety_identifier: Text | None = Field(
        None, description="Your name for whoever asks; it changes nothing."
    )
    service_tier: Annotated[Any, only("auto", "default")] = unsupported()
    store: Annotated[Any, only(False)] = unsupported()
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that can be called."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        validate_default=True,
        description="`none`: answer in words. `required`, or one by its name: the answer is a call "
        "whose arguments fit its schema. `auto` is refused where there are tools: whether to call "
        "one is not for a model to choose that was not trained to.",
    )
    verbosity: Annotated[Any, only("medium")] = unsupported()
    web_search_options: Annotated[Any, only()] = unsupported()

    @field_validator("tools")
    @classmethod
    def _names_of_tools(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools have a name twice")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _choice_of_a_tool(
        cls, choice: str | NamedTool | None, info: ValidationInfo
    ) -> str | NamedTool | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools"
            )
        if choice == "required" and not names:
            raise ValueError("tool_choice is 'required', and there are no tools")
        if names and choice in (None, "auto"):
            raise ValueError(
                "tool_choice is 'auto', its default where there are tools: whether to call one is "
                "not for a model to choose that was not trained to. Set it to 'required' or to a "
                "function, which make the answer a call, or to 'none'"
            )
        return choice

    @field_validator("continue_final_message")
    @classmethod
    def _one_way_to_go_on(cls, continues: bool | None, info: ValidationInfo) -> bool | None:
        if continues and info.data.get("add_generation_prompt"):
            raise ValueError(
                "continue_final_message goes on with the final message and add_generation_prompt "
                "begins another: set one of them to false"
            )
        return continues

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an answer, as templates write it."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    @property
    def callable_tools(self) -> list[FunctionDefinition]:
        """The functions one of which has to be called; none: the answer is in words."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [function for function in functions if function.name == name]
        return functions if self.tool_choice == "required" else []


class TopLogprob(ReplyBody):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ReplyBody):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyBody):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(ReplyBody):
    name: str
    arguments: str = Field(description="JSON by the function's schema, unless it was cut short.")


class ToolCallReply(ReplyBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ReplyBody):
    role: Literal["assistant"]
    content: str | None = Field(description="null where a function is called.")
    refusal: None
    tool_calls: list[ToolCallReply] | None = Field(None, description="One, where there is one.")


class ChatChoice(ReplyBody):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    seed: int = Field(description="As given, or drawn.")


class ChatReply(ReplyBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str = Field(description="The checkpoint's step and weights.")
    choices: list[ChatChoice]
    usage: CompletionUsage


# GET /v1/models


class Model(ReplyBody):
    id: str
    object: Literal["model"]
    created: int = Field(description="When the checkpoint was saved; 0 where it does not say.")
    owned_by: Literal["logitd"]
    max_model_len: int = Field(description="The context length, in tokens.")
    checkpoint: CheckpointName


class ModelList(ReplyBody):
    object: Literal["list"]
    data: list[Model]
