"""Operation: something that a client can ask of a model, and the kinds of plan that answer it.

An operation's `plan` is a generator. If other work has to be done before the engine requests are
known, it yields that work (`Compute`, `Compile`) and receives the results. It returns one of the
four kinds of plan below. It performs no input or output itself, so it can run on an event loop as
well as in a plain thread.
"""

import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.constraints.compiler import Source
from logitd.model.inference.engine.requests import GenerationRequest, OutputsRequest, Request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.operations.body import DType, RequestBody
from logitd.model.operations.computed import Computed
from logitd.model.owner_code.config import CodeConfig
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import ModelConfig

LISTED_ELEMENTS = 64
"""A listed token counts as this many elements, because in memory it is an object with an id, a text
and bytes."""


def new_id(kind: str) -> str:
    """An unguessable id for a reply or an engine request."""
    return f"{kind}-{uuid.uuid4().hex}"


def checkpoint_name(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The members of `CheckpointName`."""
    config = checkpoint.shape
    return {
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "val_loss": checkpoint.training.val_loss,
        "weights_sha256": checkpoint.weights_sha256,
        **({"code": config.code} if isinstance(config, CodeConfig) else {}),
    }


def envelope(kind: str, model: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The first members of every reply: its id and time, the model's name, and its checkpoint."""
    return {
        "id": new_id(kind),
        "created": int(time.time()),
        "model": model,
        "checkpoint": checkpoint_name(checkpoint),
    }


@dataclass(frozen=True, slots=True)
class Subject:
    """The model for which an operation is planned, and the limits of its reply (None: no limit).

    max_elements    maximum number of elements of the arrays in the reply, counted as float32
    max_text_bytes  maximum size of a text that is decoded from ids, in bytes
    tokenizer       the checkpoint's, with one time limit for all texts of the operation
    """

    checkpoint: CheckpointInfo
    max_elements: int | None = None
    max_text_bytes: int | None = None
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", self.checkpoint.tokenizer.for_one_request())

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.shape

    @property
    def context_length(self) -> int:
        return self.config.context_length

    def check_array(self, elements: int) -> None:
        """Raise InvalidRequest if arrays of this many elements are too large for a reply."""
        if self.max_elements is not None and elements > self.max_elements:
            raise InvalidRequest(
                f"the reply would have {elements} elements, but the limit is {self.max_elements}. "
                "Request fewer layers, heads or positions, request float16 (two of its elements "
                "count as one), or raise --max-reply-elements"
            )

    def check_listed(self, count: int, what: str, param: str) -> None:
        """Raise InvalidRequest if this many items, such as tokens, are too many to list in a reply.
        `what` is the noun for the items in the message; `param` is the field that requests them."""
        limit = self.max_elements
        if limit is not None and count * LISTED_ELEMENTS > limit:
            raise InvalidRequest(
                f"the reply could list {count} {what}, but the limit is "
                f"{limit // LISTED_ELEMENTS} ({LISTED_ELEMENTS} elements each, all prompts and "
                "completions together). Request fewer, or raise --max-reply-elements",
                param,
            )


# Steps that a plan yields


@dataclass(frozen=True, slots=True)
class Compute:
    """Run engine requests. The plan receives a `Computed`, or an InvalidRequest is thrown into
    it."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile a constraint. The plan receives a `Constraint`."""

    source: Source


# The four kinds of plan


@dataclass(frozen=True, slots=True)
class Record:
    """The reply is a JSON object, made from the results of all requests.

    reply  makes the members of the reply, without the envelope; may take seconds
    held   number of array elements that stay in memory until the reply is made
    """

    requests: Sequence[Request]
    reply: Callable[[Computed], dict[str, Any]]
    held: int = 0


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array that the reply has for each prompt.

    name           its name in JSON and in safetensors
    shapes         its shape for each prompt
    position_axis  the axis of positions; the other axes are in the engine's order
    dtype          None: the dtype of the reply
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    position_axis: int = 0
    dtype: Literal["int64"] | None = None

    def row_shape(self, index: int) -> tuple[int, ...]:
        """The shape of the array at one position of a prompt."""
        shape = self.shapes[index]
        return shape[: self.position_axis] + shape[self.position_axis + 1 :]

    def row_elements(self, index: int) -> int:
        return prod(self.row_shape(index))


@dataclass(frozen=True, slots=True)
class Listing:
    """Rows that are written as lists of JSON objects instead of arrays.

    member      the member of each prompt that lists the rows
    items       makes the objects of a row, one by one
    wrapped_in  name of a member: each row is an object with the row's position and this member,
                which holds the list; None: each row is the list itself
    """

    member: str
    items: Callable[[Any], Iterator[dict[str, Any]]]
    wrapped_in: str | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The reply has rows at positions of the prompts. They are written while they are computed.

    arrays      the arrays of each prompt; if empty, the reply can only be JSON
    split       makes the rows of the arrays from the engine's rows; None: the engine's rows contain
                the arrays one after the other
    listing     the form of the rows in JSON, if they are not written as arrays
    members     further members of the reply, and of a file's metadata
    facts       further members of each prompt in JSON
    wrapped_in  the member of a prompt that contains the arrays; None: the prompt itself
    not_npy     why the reply cannot be an .npy file, and the field to change
    """

    requests: Sequence[OutputsRequest]
    arrays: Sequence[NamedArray] = ()
    dtype: DType = "float32"
    split: Callable[[Any], Sequence[Any]] | None = None
    listing: Listing | None = None
    members: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    wrapped_in: str | None = None
    not_npy: tuple[str, str] | None = None

    def parts(self, index: int, rows: Any) -> list[Any]:
        """The rows (count, ...) of each array of a prompt, made from the engine's rows."""
        if self.split is None:
            ends = np.cumsum([array.row_elements(index) for array in self.arrays])
            parts: Sequence[Any] = np.split(rows.reshape(len(rows), -1), ends[:-1], axis=1)
        else:
            parts = self.split(rows)
        return [
            part.reshape(len(rows), *array.row_shape(index))
            for part, array in zip(parts, self.arrays, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Completions:
    """The reply is sampled text, which grows token by token. `completion.py` makes the choices from
    the engine's events.

    n, stop, echo              as in the body
    logprobs, prompt_logprobs  number of likeliest tokens to list; None: no logprobs
    """

    requests: Sequence[GenerationRequest]
    n: int
    stop: Sequence[str]
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Series:
    """The reply has a part for each of many requests (jobs), of which a few run at a time.

    head      members of the reply that are known before the jobs run
    jobs      the requests, created lazily
    part      takes the results of the next job, and returns a part of the reply, or None if the
              part needs further jobs
    event     name of a part in a stream
    members   makes the other members of the reply from all parts
    held      number of elements of the values that the jobs share
    tokens    cost of all jobs together, in tokens (`model/inference/engine/cost.py`)
    """

    head: Mapping[str, Any]
    jobs: Iterator[OutputsRequest]
    part: Callable[[Computed], dict[str, Any] | None]
    event: str
    members: Callable[[list[dict[str, Any]]], dict[str, Any]]
    held: int
    tokens: int


Plan = Record | Outputs | Completions | Series
Planning = Generator[Compute | Compile, Any, Plan]

Form = Literal["record", "outputs", "listing", "completions", "series", "vocabulary"]
"""The form of an endpoint's replies. `listing` is like `outputs`, but the reply is always JSON.
`vocabulary` is like `record`, but the reply is made without the engine."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation. Its endpoint, its documentation and its Python method are derived from it.

    name          name of the endpoint and of the method
    body, reply   pydantic models; `reply` may be a union
    plan          makes the plan of a valid body; raises InvalidRequest if the model cannot run it
    form          the form of the replies
    summary       the title in /docs
    description   the text in /docs, in Markdown
    tag           the section in /docs
    id_prefix     the beginning of the ids of replies; None: the name
    """

    name: str
    body: type[RequestBody]
    reply: Any
    plan: Callable[[Any, Subject], Planning]
    form: Form
    summary: str
    description: str
    tag: str = "outputs"
    id_prefix: str | None = None

    @property
    def path(self) -> str:
        return f"/{self.name}"

    @property
    def reply_id(self) -> str:
        return self.id_prefix or self.name
