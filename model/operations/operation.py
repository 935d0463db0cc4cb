"""Operation: one thing that can be asked of a model, and the four kinds of plan that answer it.

A plan is a generator. It yields the work that must be done before the engine requests are known
(`Compute`, `Compile`), receives the results, and returns one of the four kinds of plan below. It
performs no input or output, so the same plan runs on an event loop and in a plain thread.
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
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig

LISTED_ELEMENTS = 64
"""Elements of an output that one listed token counts as: in memory it is an object with an id, a
text and bytes."""


def new_id(kind: str) -> str:
    """An unguessable id of a reply or an engine request."""
    return f"{kind}-{uuid.uuid4().hex}"


def checkpoint_name(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The CheckpointName."""
    return {
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "val_loss": checkpoint.training.val_loss,
        "weights_sha256": checkpoint.weights_sha256,
    }


def envelope(kind: str, model: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The first members of every reply: its id, the name of the model and its weights."""
    return {
        "id": new_id(kind),
        "created": int(time.time()),
        "model": model,
        "checkpoint": checkpoint_name(checkpoint),
    }


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that an operation is planned for, and limits of a reply (None: no limit).

    max_elements    elements of outputs, as float32
    max_text_bytes  bytes of a text that is decoded from ids
    """

    checkpoint: CheckpointInfo
    max_elements: int | None = None
    max_text_bytes: int | None = None

    @property
    def config(self) -> GPTConfig:
        return self.checkpoint.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer

    @property
    def context_length(self) -> int:
        return self.config.context_length

    def check_array(self, elements: int) -> None:
        """Raise InvalidRequest for arrays that are larger than a reply may be."""
        if self.max_elements is not None and elements > self.max_elements:
            raise InvalidRequest(
                f"the reply would have {elements} elements; {self.max_elements} are allowed. Ask "
                "for fewer layers, heads or positions, for float16 (which counts half), or raise "
                "--max-reply-elements"
            )

    def check_listed(self, count: int, what: str, param: str) -> None:
        """Raise InvalidRequest for more listed tokens than a reply may have; `what` names them,
        `param` is the field that asks for them."""
        limit = self.max_elements
        if limit is not None and count * LISTED_ELEMENTS > limit:
            raise InvalidRequest(
                f"the reply could list {count} {what}; {limit // LISTED_ELEMENTS} are allowed "
                f"({LISTED_ELEMENTS} elements each, all prompts and completions together). Ask for "
                "fewer, or raise --max-reply-elements",
                param,
            )


# Steps that a plan yields


@dataclass(frozen=True, slots=True)
class Compute:
    """Run engine requests; the answer is a `Computed`, or an InvalidRequest is thrown."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile a constraint for a number of sequences; the answer is a `Constraint`."""

    source: Source
    sequences: int


# The four kinds of plan


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object, made of the results of all requests.

    reply  from the results to the members of the reply after the envelope; may take seconds
    """

    requests: Sequence[Request]
    reply: Callable[[Computed], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array of each prompt.

    name           in JSON and in safetensors
    shapes         its shape for each prompt
    position_axis  the axis of positions; the other axes are in the engine's order
    dtype          None: the reply's
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
    """Rows as lists of JSON objects instead of arrays.

    member      of each prompt, which lists the rows
    items       from a row to the objects of its list, which are made one by one
    wrapped_in  the member of a row that holds its list, after its position; None: the list itself
    """

    member: str
    items: Callable[[Any], Iterator[dict[str, Any]]]
    wrapped_in: str | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Rows at positions of prompts, written while they are computed.

    arrays      the arrays of each prompt; empty: the reply is JSON alone
    split       from the engine's rows to those of the arrays; None: the arrays are columns of the
                engine's rows, one after the other
    listing     the JSON form, if it is not the arrays
    members     of the reply, and of a file's metadata
    facts       members of each prompt's JSON
    wrapped_in  the member of a prompt that holds the arrays; None: the prompt itself
    not_npy     the reason why an .npy file cannot hold the reply, and the field to change
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
        """The rows of each array of a prompt, from the engine's rows: (count, ...), positions
        first."""
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
    """Sampled text that grows token by token; `completion.py` turns events into choices.

    n, stop, echo              as in the body
    logprobs, prompt_logprobs  how many of the likeliest tokens are listed; None: no logprobs
    """

    requests: Sequence[GenerationRequest]
    n: int
    stop: Sequence[str]
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Series:
    """Many requests, a few of them at a time, and a part of the reply for each.

    head      members of the reply that are known before the jobs run
    jobs      requests, made lazily
    part      from a job's results to its part of the reply; called in the order of `jobs`
    event     name of a part in a stream
    members   from all parts to the rest of the reply
    held      elements of the values that the jobs share
    tokens    cost of all jobs together (`model/inference/engine/cost.py`)
    """

    head: Mapping[str, Any]
    jobs: Iterator[OutputsRequest]
    part: Callable[[Computed], dict[str, Any]]
    event: str
    members: Callable[[list[dict[str, Any]]], dict[str, Any]]
    held: int
    tokens: int


Plan = Record | Outputs | Completions | Series
Planning = Generator[Compute | Compile, Any, Plan]

Form = Literal["record", "outputs", "listing", "completions", "series", "vocabulary"]
"""Form of an endpoint's replies: `listing` is outputs as JSON alone; `vocabulary` is a record that
needs no engine."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation.

    name          of its endpoint, and of its method in Python
    body, reply   pydantic models; `reply` may be a union
    plan          from a valid body to a plan. Raises InvalidRequest for a body that the model
                  cannot answer
    form          of its replies
    summary       a title
    description   Markdown for /docs
    tag           its section in /docs
    id_prefix     None: the name
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
