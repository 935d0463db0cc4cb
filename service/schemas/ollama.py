"""Bodies of Ollama's endpoints, as pydantic models.

null means the default. What is about how Ollama loads a model is accepted where it asks for no more
than there is; everything else that is not supported is refused by name unless it asks for nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from logitd.service.schemas.base import Examples, ModelName, ReplyBody, RequestBody, Text
from logitd.service.schemas.openai import native, only, unsupported

TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
"""Ollama's own, where a request does not say."""
MAX_MESSAGES = 4096


class OllamaOptions(RequestBody):
    """How a text is sampled."""

    num_predict: int | None = Field(
        None,
        ge=-2,
        lt=2**31,
        description="Tokens to generate at most. Absent, -1 or -2: what fits.",
    )
    temperature: float | None = native("temperature")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description=f"Sample from the k likeliest. Absent: {TOP_K}. 0: all."
    )
    top_p: float | None = native("top_p")
    min_p: float | None = native("min_p")
    repeat_penalty: float | None = native("repetition_penalty")
    presence_penalty: float | None = native("presence_penalty")
    frequency_penalty: float | None = native("frequency_penalty")
    seed: int | None = Field(
        None, ge=-1, lt=2**63, description="Same seed, same tokens. Absent or -1: drawn."
    )
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = native("stop")
    num_ctx: int | None = Field(
        None, ge=1, description="The context length that is needed; what is there may be more."
    )

    draft_num_predict: Annotated[Any, only()] = unsupported()
    num_keep: Annotated[Any, only()] = unsupported()
    repeat_last_n: Annotated[Any, only(-1)] = unsupported()
    typical_p: Annotated[Any, only(1.0, 1)] = unsupported()
    num_batch: Annotated[Any, only()] = unsupported()
    num_gpu: Annotated[Any, only()] = unsupported()
    main_gpu: Annotated[Any, only()] = unsupported()
    num_thread: Annotated[Any, only()] = unsupported()
    use_mmap: Annotated[Any, only()] = unsupported()


class OllamaRequest(RequestBody):
    """What both endpoints have."""

    model: ModelName = None
    stream: bool | None = Field(None, description="Answer a line a piece; true if not given.")
    format: dict[str, Any] | Literal["json", ""] | None = Field(
        None, description="`json` for any JSON object, or a JSON schema that the answer fits."
    )
    options: OllamaOptions | None = Field(None, description="How it is sampled.")
    keep_alive: float | Text | None = Field(
        None, description="How long the model stays loaded; here always, so 0 is refused."
    )

    logprobs: Annotated[Any, only(False)] = unsupported()
    think: Annotated[Any, only(False)] = unsupported()
    top_logprobs: Annotated[Any, only(0)] = unsupported()


class OllamaGenerateRequest(OllamaRequest):
    """Continue a text, in Ollama's shape."""

    examples: ClassVar[Examples] = {
        "One reply": {
            "prompt": "import os",
            "stream": False,
            "options": {"num_predict": 20, "seed": 1},
        },
    }

    prompt: Text | None = Field(
        None, description="The text. Absent or empty: only says that the model is loaded."
    )
    system: Text | None = Field(
        None, description="What comes before the prompt, where there is a chat template."
    )
    raw: bool | None = Field(
        None, description="Take the prompt as it is, also where there is a chat template."
    )

    context: Annotated[Any, only([])] = unsupported()
    images: Annotated[Any, only([])] = unsupported()
    suffix: Annotated[Any, only("")] = unsupported()
    template: Annotated[Any, only("")] = unsupported()


class OllamaMessage(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text

    images: Annotated[Any, only([])] = unsupported()
    thinking: Annotated[Any, only("")] = unsupported()
    tool_calls: Annotated[Any, only([])] = unsupported()
    tool_name: Annotated[Any, only("")] = unsupported()


class OllamaChatRequest(OllamaRequest):
    """Answer in a conversation, in Ollama's shape. The checkpoint needs a chat template."""

    examples: ClassVar[Examples] = {
        "One reply": {
            "messages": [{"role": "user", "content": "What does os.path.join do?"}],
            "stream": False,
            "options": {"num_predict": 20, "seed": 1},
        },
    }

    messages: list[OllamaMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="The conversation so far.",
    )

    tools: Annotated[Any, only([])] = unsupported()


class OllamaShowRequest(RequestBody):
    """Which model is asked about."""

    examples: ClassVar[Examples] = {"The one served": {}}

    model: ModelName = None
    verbose: bool | None = Field(None, description="Changes nothing: all there is is told.")


class OllamaReply(ReplyBody):
    """A whole reply, or a piece of one. Times are in nanoseconds and stand in the last piece."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaGenerateReply(OllamaReply):
    response: str


class OllamaAnswer(ReplyBody):
    role: Literal["assistant"]
    content: str


class OllamaChatReply(OllamaReply):
    message: OllamaAnswer


class OllamaDetails(ReplyBody):
    parent_model: Literal[""]
    format: Literal["safetensors"]
    family: Literal["gpt"]
    families: list[Literal["gpt"]]
    parameter_size: str = Field(description="Such as 124M.")
    quantization_level: str = Field(
        description="What the weights are computed in: a dtype, int8 or int4."
    )


class OllamaModel(ReplyBody):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of the checkpoint's files.")
    digest: str = Field(description="SHA-256 of the weights.")
    details: OllamaDetails
    context_length: int


class OllamaModels(ReplyBody):
    models: list[OllamaModel]


class OllamaShowReply(ReplyBody):
    modified_at: str
    template: str = Field(description="Empty: it is logitd's to write conversations.")
    parameters: Literal[""]
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion"]]


class OllamaVersion(ReplyBody):
    version: str = Field(description="logitd's own.")
