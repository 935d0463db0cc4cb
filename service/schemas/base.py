"""Base: what the bodies of several endpoints are made of.

Requests are validated strictly: no unknown field, no NaN, no number in quotes. For replies the
models are the documentation that /docs shows, and the tests hold every reply to them; the replies
themselves are written as plain dicts, which is several times faster.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_IDS = 2**17
"""Ids in one list; parsing a body of so many takes some 20 ms, in which nobody else is answered."""
MAX_PROMPTS = 4096

# Lists stop at their first wrong item: a description of each would take the event loop seconds.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**22)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
ChosenIds = Annotated[TokenIds, Field(min_length=1)]
Prompts = Annotated[list[Text | TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Text | TokenIds | Prompts,
    Field(description="A text, a list of token ids, or a list of texts and lists of ids."),
]
Examples = Mapping[str, Mapping[str, Any]]
"""Bodies that can be sent as they are, by what each one shows; /docs offers them."""

Timeout = Annotated[
    float | None,
    Field(gt=0, le=86_400, description="Seconds from arrival until the request is ended (504)."),
]
ModelName = Annotated[
    str | None,
    Field(max_length=256, description="If given, a name that is served here; else the first."),
]

Place = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Places = Annotated[list[Place], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


class RequestBody(BaseModel):
    examples: ClassVar[Examples]

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True
    )


class PromptBody(RequestBody):
    """A request for one or many prompts."""

    prompt: Prompt

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts, also where the body gives one without a list around it."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            prompt = [prompt]
        prompts: Sequence[str | Sequence[int]] = prompt
        return prompts


class ReplyBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ReplyBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyBody):
    error: ErrorDetail


# Positions of a prompt


class PositionRange(RequestBody):
    """Positions from one to before another, like a Python slice."""

    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    start: Place | None = Field(None, alias="from", description="The first; absent: 0.")
    to: Place | None = Field(None, description="The first that is left out; absent: to the end.")

    @model_validator(mode="after")
    def _some_end(self) -> "PositionRange":
        if self.start is None and self.to is None:
            raise ValueError("positions is an empty object; give from, to or both, or 'all'")
        return self


PositionChoice = Annotated[
    Literal["last", "all"] | Places | PositionRange,
    Field(
        description="Rows: the last position, all, a list, or {'from': first, 'to': first left "
        "out}; negative ones count from the end."
    ),
]
