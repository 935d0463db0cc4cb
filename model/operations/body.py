"""Bodies: fields and base classes that the requests and replies of several operations share.

Requests are validated strictly: unknown fields, NaN and numbers in quotes are refused. The models
of replies are only documentation, and tests compare every reply with them. The replies themselves
are plain dicts, which are several times faster.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_IDS = 2**17
"""Maximum number of ids in one list. Parsing a body of this size blocks the event loop for about 20
ms."""
MAX_PROMPTS = 4096

# Validation stops at the first wrong item of a list (fail_fast): describing every wrong item would
# block the event loop for seconds.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**22)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
ChosenIds = Annotated[TokenIds, Field(min_length=1)]
Prompts = Annotated[list[Text | TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Text | TokenIds | Prompts,
    Field(description="A string, a list of token ids, or a list of strings and lists of ids."),
]
Examples = Mapping[str, Mapping[str, Any]]
"""Valid bodies, each under a title that describes it. /docs offers them as examples."""

Timeout = Annotated[
    float | None,
    Field(gt=0, le=86_400, description="Seconds from arrival until the request is aborted (504)."),
]
ModelName = Annotated[
    str | None,
    Field(max_length=256, description="Name of a served model. Absent: the first one."),
]
Step = Annotated[
    int | None,
    Field(
        ge=0,
        lt=2**63,
        description="Step of the run's history whose weights compute the reply; needs a server "
        "with --history. Absent: the served checkpoint.",
    ),
]

Place = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Places = Annotated[list[Place], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


class RequestBody(BaseModel):
    """A request.

    examples      valid bodies, at least one for each operation
    alternatives  groups of fields; a body may set at most one field of each group
    needs         for a field that has no effect alone: other fields, at least one of which must be
                  set
    """

    examples: ClassVar[Examples] = {}
    alternatives: ClassVar[Sequence[Sequence[str]]] = ()
    needs: ClassVar[Mapping[str, Sequence[str]]] = {}

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True
    )

    @model_validator(mode="after")
    def _one_of_each_group(self) -> Self:
        for names in self.alternatives:
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} are alternatives; give one of them")
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        for name, others in self.needs.items():
            if self._is_set(name) and not any(map(self._is_set, others)):
                raise ValueError(
                    f"{name} has no effect without {' or '.join(others)}; add "
                    f"{' or '.join(others)}, or leave {name} out"
                )
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def queued(self) -> tuple[int, str]:
        """The number of sequences that the request adds to the queue, and the name of the field on
        which this number depends."""
        return 1, "prompt"


class ModelBody(RequestBody):
    model: ModelName = None
    step: Step = None


class PromptBody(ModelBody):
    prompt: Prompt
    timeout: Timeout = None

    @property
    def queued(self) -> tuple[int, str]:
        return len(self.prompts), "prompt"

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if single else prompt


class ReplyBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CheckpointName(ReplyBody):
    name: str = Field(description="Name of its folder or run; the served name may differ.")
    step: int
    val_loss: float | None = Field(description="Nats per token on the validation text.")
    weights_sha256: str
    code: str | None = Field(
        None,
        exclude_if=lambda code: code is None,
        description="The owner's file and class, if this code computes the model; else absent.",
    )


class Reply(ReplyBody):
    """The first members of every reply, which identify the model and its weights."""

    id: str
    created: int
    model: str
    checkpoint: CheckpointName


class PromptReply(ReplyBody):
    """The first members of the part of a reply that belongs to one prompt."""

    index: int
    token_ids: list[int]


# Logits before and after processing

Stage = Literal["raw", "processed"]
HalfOrFull = Literal["float32", "float16"]
DType = Annotated[
    Literal["float32", "float16", "bfloat16"],
    Field(
        description="Dtype of the reply (bfloat16: safetensors only). The server computes in its "
        "own dtype."
    ),
]
LogitBias = Annotated[
    dict[str, float],
    Field(max_length=4096, description="Added to the logits: {token id: bias}."),
]


# Positions of a prompt


class PositionRange(RequestBody):
    """The positions from `from` up to but not including `to`, like a Python slice."""

    model_config = ConfigDict(validate_by_name=False, serialize_by_alias=True)

    start: Place | None = Field(None, alias="from", description="First position. Absent: 0.")
    to: Place | None = Field(
        None, description="Position after the last one. Absent: the end of the prompt."
    )

    @model_validator(mode="after")
    def _some_end(self) -> "PositionRange":
        if self.start is None and self.to is None:
            raise ValueError("positions is an empty object; set 'from' or 'to', or send 'all'")
        return self


PositionChoice = Annotated[
    Literal["last", "all"] | Places | PositionRange,
    Field(
        description="'last', 'all', a list of positions, or {'from': start, 'to': stop}, like a "
        "slice; negative numbers count from the end."
    ),
]
