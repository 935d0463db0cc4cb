"""Bodies and replies of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from logitd.model.operations.body import Examples, ReplyBody, RequestBody, Text
from logitd.service.openai.schemas import (
    OpenAIReply,
    SamplingBody,
    only,
    unsupported,
    unsupported_fields,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128


class TextPart(ReplyBody):
    type: Literal["text"]
    text: str


def _one_text(content: Any) -> Any:
    """The text of a message's content. Parts are joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"the content has a part of type {str(kind)[:40]!r}; only text parts are supported"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(
                "a text part must have exactly the members type and text, and text must be a string"
            )
    return "\n".join(part["text"] for part in content)


class FunctionCall(RequestBody):
    """A function and its arguments."""

    name: Text
    arguments: Text = Field(description="JSON.")


class ToolCall(RequestBody):
    """A call made by an assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Author of the message; developer means system."
    )
    content: Annotated[
        Text | None, BeforeValidator(_one_text, json_schema_input_type=str | list[TextPart] | None)
    ] = Field(
        None,
        description="A text, or text parts to be joined by line breaks. Required, except in an "
        "assistant's message with `tool_calls`.",
    )
    name: str | None = Field(
        None, max_length=256, description="Name of the speaker, for templates that use it."
    )
    tool_calls: list[ToolCall] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description="Calls made by an assistant; they are shown to the model as JSON.",
    )
    tool_call_id: Text | None = Field(
        None, description="In a tool's message: id of the call that it answers."
    )

    annotations: Annotated[Any, only([])] = unsupported()
    audio: Annotated[Any, only()] = unsupported()
    function_call: Annotated[Any, only()] = unsupported()
    refusal: Annotated[Any, only("")] = unsupported()

    @model_validator(mode="after")
    def _role_and_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"the message has tool_calls and the role {self.role!r}; only the role 'assistant' "
                "makes calls"
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(
                f"the message has a tool_call_id and the role {self.role!r}; only the role 'tool' "
                "answers calls"
            )
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has no content; set it, for example to an empty string")
        return self


class Conversation(RequestBody):
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
        None, description="JSON schema of the arguments. Absent: the function has no arguments."
    )
    strict: bool | None = Field(None, description="No effect: the arguments always fit the schema.")


class Tool(RequestBody):
    """A tool that can be called: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """A function, given by its name."""

    name: str


class NamedTool(RequestBody):
    """The only function that may be called."""

    type: Literal["function"]
    function: FunctionName


UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "audio": [],
    "chat_template": [],
    "chat_template_kwargs": [{}],
    "documents": [[]],
    "echo": [False],
    "function_call": ["none"],
    "functions": [[]],
    "modalities": [["text"]],
    "moderation": [],
    "prediction": [],
    "prompt_cache_options": [],
    "prompt_cache_retention": ["in_memory", "in-memory"],
    "reasoning_effort": ["none"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "verbosity": ["medium"],
    "web_search_options": [],
}
"""Unsupported fields of chats, with their neutral values."""
Unsupported = create_model("Unsupported", **unsupported_fields(UNSUPPORTED))


class ChatRequest(SamplingBody, Conversation, Unsupported):
    """Write the next message of a conversation, in OpenAI's format. The checkpoint needs a chat
    template."""

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
        "A function call": {
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
        None,
        ge=1,
        lt=2**31,
        description="Maximum number of generated tokens. Absent: as many as fit.",
    )
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Older name of max_completion_tokens."
    )
    n: int | None = Field(None, ge=1, le=4096, description="Number of answers.")
    logprobs: bool | None = Field(
        None, description="Return the logprob of each token of the answer."
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="With `logprobs`: also return the logprobs of the k likeliest tokens.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="True: the template begins an answer. Absent: true, unless "
        "`continue_final_message` is true.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the text of the final message instead of writing a new one."
    )
    metadata: dict[str, Text] | None = Field(
        None, description="No effect: it describes stored completions, and none are stored."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="No effect: an answer has at most one call."
    )
    prompt_cache_key: Text | None = Field(
        None, description="No effect: shared prefixes are found without it."
    )
    safety_identifier: Text | None = Field(None, description="No effect: your name for the user.")
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the answer may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        validate_default=True,
        description="`none`: the answer is text. `required`, or a function by its name: the "
        "answer is a call whose arguments fit the function's schema. `auto` is "
        "refused if there are tools, because the model was not trained to choose.",
    )

    @field_validator("tools")
    @classmethod
    def _tool_names_differ(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"two functions in tools have the name {name!r}; give each a different name"
            )
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice_is_possible(
        cls, choice: str | NamedTool | None, info: ValidationInfo
    ) -> str | NamedTool | None:
        if "tools" not in info.data:  # they are refused
            return choice
        names = [tool.function.name for tool in info.data["tools"] or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"tool_choice names the function {choice.function.name[:64]!r}, which `tools` "
                "does not have; add it, or name one of `tools`"
            )
        if choice == "required" and not names:
            raise ValueError(
                "tool_choice is 'required', but there are no tools; add `tools`, or set it to "
                "'none'"
            )
        if names and choice in (None, "auto"):
            raise ValueError(
                "tool_choice is 'auto', the default with tools, but the model was not trained to "
                "choose. Set it to 'required' or to a function for a call, or to 'none' for an "
                "answer in words"
            )
        return choice

    @field_validator("continue_final_message")
    @classmethod
    def _continues_or_begins(cls, continues: bool | None, info: ValidationInfo) -> bool | None:
        if continues and info.data.get("add_generation_prompt"):
            raise ValueError(
                "continue_final_message continues the final message, but add_generation_prompt "
                "begins a new one: set one of the two to false"
            )
        return continues

    @property
    def begins_answer(self) -> bool:
        """True if the template begins an answer at the end of the prompt."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    @property
    def callable_tools(self) -> list[FunctionDefinition]:
        """The functions that the answer may call; empty if it must be text."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [function for function in functions if function.name == name]
        return functions if self.tool_choice == "required" else []


class TopLogprob(ReplyBody):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyBody):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(ReplyBody):
    name: str
    arguments: str = Field(description="JSON that fits the function's schema, unless cut short.")


class ToolCallReply(ReplyBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ReplyBody):
    role: Literal["assistant"]
    content: str | None = Field(description="null if a function is called.")
    refusal: None
    tool_calls: list[ToolCallReply] | None = Field(None, description="At most one call.")


class ChatChoice(ReplyBody):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    seed: int = Field(description="The request's seed, or the one drawn for it.")


class ChatReply(OpenAIReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
