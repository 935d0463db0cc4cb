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
    """A content of several text parts, joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"the content has a part of type {str(kind)[:40]!r}; only text parts are supported"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError("a text part has other members than type and text")
    return "\n".join(part["text"] for part in content)


class FunctionCall(RequestBody):
    """A function and its arguments."""

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
        description="Author of the message; developer means system."
    )
    content: Annotated[
        Text | None, BeforeValidator(_one_text, json_schema_input_type=str | list[TextPart] | None)
    ] = Field(
        None,
        description="A text, or text parts, which are joined by line breaks. Required, except in "
        "an assistant's message with `tool_calls`.",
    )
    name: Text | None = Field(None, description="Name of the speaker, for templates that use it.")
    tool_calls: list[ToolCall] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description="Calls that an assistant made; they are shown to the model as JSON.",
    )
    tool_call_id: Text | None = Field(
        None, description="In a tool's message: the call that it answers."
    )

    annotations: Annotated[Any, only([])] = unsupported()
    audio: Annotated[Any, only()] = unsupported()
    function_call: Annotated[Any, only()] = unsupported()
    refusal: Annotated[Any, only("")] = unsupported()

    @model_validator(mode="after")
    def _role_and_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls of the role {self.role!r}; only assistants make calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id of the role {self.role!r}; only tools answer calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has no content")
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
        None, description="JSON schema of its arguments. Absent: it has none."
    )
    strict: bool | None = Field(None, description="Arguments always fit the schema.")


class Tool(RequestBody):
    """A tool that can be called: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """A function by its name."""

    name: str


class NamedTool(RequestBody):
    """The one function to call."""

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
        None,
        ge=1,
        lt=2**31,
        description="Largest number of generated tokens. Absent: all that fit.",
    )
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="The older name of max_completion_tokens."
    )
    n: int | None = Field(None, ge=1, le=4096, description="Answers.")
    logprobs: bool | None = Field(None, description="Logprob of each token of the answer.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="With `logprobs`: also of the k likeliest."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="True: the template begins an answer. Absent: true, unless the final message "
        "is continued.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the text of the final message instead of a new one."
    )
    metadata: dict[str, Text] | None = Field(
        None, description="For stored completions; none is stored, so it changes nothing."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="An answer has one call at most, so it changes nothing."
    )
    prompt_cache_key: Text | None = Field(
        None, description="Prefixes are found without it, so it changes nothing."
    )
    safety_identifier: Text | None = Field(
        None, description="Your name for the user; it changes nothing."
    )
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that can be called."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        validate_default=True,
        description="`none`: answer in words. `required`, or a function by its name: the answer is "
        "a call whose arguments fit its schema. `auto` is refused if there are tools: the model "
        "was not trained to choose.",
    )

    @field_validator("tools")
    @classmethod
    def _names_of_tools(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools has a name twice; give each function its own")
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
                "tool_choice is 'auto', the default with tools, but the model was not trained to "
                "choose. Set it to 'required' or to a function, to force a call, or to 'none'"
            )
        return choice

    @field_validator("continue_final_message")
    @classmethod
    def _one_way_to_go_on(cls, continues: bool | None, info: ValidationInfo) -> bool | None:
        if continues and info.data.get("add_generation_prompt"):
            raise ValueError(
                "continue_final_message continues the final message and add_generation_prompt "
                "begins another: set one of them to false"
            )
        return continues

    @property
    def begins_answer(self) -> bool:
        """True if the prompt ends with the template's beginning of an answer."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    @property
    def callable_tools(self) -> list[FunctionDefinition]:
        """The functions of which the answer calls one; empty: the answer is in words."""
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
    arguments: str = Field(description="JSON by the function's schema, unless it was cut short.")


class ToolCallReply(ReplyBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ReplyBody):
    role: Literal["assistant"]
    content: str | None = Field(description="null if a function is called.")
    refusal: None
    tool_calls: list[ToolCallReply] | None = Field(None, description="One call at most.")


class ChatChoice(ReplyBody):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    seed: int = Field(description="From the request, or drawn.")


class ChatReply(OpenAIReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
