"""Bodies of TGI's endpoints, as pydantic models.

null means the default, as everywhere that other servers' clients come from. What is not supported
is accepted when it asks for nothing, and otherwise refused by name.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from logitd.service.schemas.base import Examples, ModelName, ReplyBody, RequestBody, Text
from logitd.service.schemas.generate import MinP, Pattern, TopP
from logitd.service.schemas.openai import native, only, unsupported

NEW_TOKENS = 100
"""`max_new_tokens` where it is not given."""
MAX_TOP_TOKENS = 20


class TextGrammar(RequestBody):
    """What a text has to match: a JSON schema, or a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | Pattern


class TextGenerationParameters(RequestBody):
    """How a text is sampled, and what the reply says of it."""

    max_new_tokens: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description=f"Tokens to generate at most. Absent: {NEW_TOKENS}, or what fits.",
    )
    do_sample: bool | None = Field(
        None,
        description="Whether to sample; also so with temperature, top_k or top_p. Otherwise the "
        "likeliest token is taken.",
    )
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="Divides the logits."
    )
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Sample from the k likeliest."
    )
    top_p: TopP | None = Field(None, description="Sample from the likeliest that make up p.")
    min_p: MinP | None = Field(
        None, description="Sample from those at least p times as likely as the likeliest."
    )
    repetition_penalty: float | None = native("repetition_penalty")
    frequency_penalty: float | None = native("frequency_penalty")
    seed: int | None = native("seed")
    stop: list[Text] | None = Field(
        None, description="Texts that end the generation; not part of it."
    )
    return_full_text: bool | None = Field(
        None, description="Begin `generated_text` with the inputs."
    )
    details: bool | None = Field(None, description="Tokens, their logprobs, why it ended.")
    top_n_tokens: int | None = Field(
        None, ge=0, le=MAX_TOP_TOKENS, description="With details: the n likeliest tokens, too."
    )
    truncate: int | None = Field(None, ge=1, lt=2**31, description="Keep the last tokens alone.")
    grammar: TextGrammar | None = Field(None, description="What the text has to match.")

    adapter_id: Annotated[Any, only()] = unsupported()
    best_of: Annotated[Any, only(1)] = unsupported()
    decoder_input_details: Annotated[Any, only(False)] = unsupported()
    typical_p: Annotated[Any, only(1.0)] = unsupported()
    watermark: Annotated[Any, only(False)] = unsupported()


class TextGenerationRequest(RequestBody):
    """Continue a text, as text-generation-inference does."""

    examples: ClassVar[Examples] = {
        "Greedy": {"inputs": "import os", "parameters": {"max_new_tokens": 20}},
        "Sampled, with its tokens": {
            "inputs": "def main():",
            "parameters": {
                "max_new_tokens": 20,
                "temperature": 0.8,
                "seed": 1,
                "details": True,
                "top_n_tokens": 2,
            },
        },
    }

    inputs: Text = Field(description="The text to continue.")
    parameters: TextGenerationParameters | None = Field(
        None, description="How it is sampled, and what the reply says."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    model: ModelName = None


class TgiTopToken(ReplyBody):
    id: int
    text: str
    logprob: float
    special: bool


class TgiToken(ReplyBody):
    id: int
    text: str = Field(description="What of the text it completes; together they are all of it.")
    logprob: float
    special: bool


class TgiDetails(ReplyBody):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int
    prefill: list[None] = Field(max_length=0)
    tokens: list[TgiToken]
    top_tokens: list[list[TgiTopToken]] | None = None


class TextGenerationReply(ReplyBody):
    generated_text: str
    details: TgiDetails | None = None
