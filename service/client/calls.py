"""Calls: a call is a request to an endpoint, with the function that reads its reply.

`endpoints.py` builds the calls, `wire.py` sends them. Prompts and fields may contain NumPy arrays
and numbers, such as arrays in earlier results.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, Generic, TypeVar, get_args
from urllib.parse import urlencode

import numpy as np

from logitd.service.client.errors import MalformedReplyError
from logitd.service.client.fields import Prompt
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.tensors import TensorFile

Result = TypeVar("Result")
Results = TypeVar("Results", covariant=True)

JSON = "application/json"
EVENTS = "text/event-stream"
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an endpoint.

    fields   body of a POST, or query of a GET; None if the endpoint has no fields, not even `model`
    answers  statuses of replies that contain results
    """

    method: str
    path: str
    fields: Mapping[str, object] | None = None
    accept: str = JSON
    answers: frozenset[int] = frozenset({200})

    def to_model(self, model: str | None) -> "Request":
        """The same request, addressed to `model` unless its fields already name a model."""
        if self.fields is None or model is None or self.fields.get("model") is not None:
            return self
        return replace(self, fields={**self.fields, "model": model})

    @property
    def target(self) -> str:
        """The path, followed by the query if this is a GET."""
        query = urlencode(self.fields or {}) if self.method == "GET" else ""
        return f"{self.path}?{query}" if query else self.path

    @property
    def body(self) -> bytes | None:
        """The JSON body of a POST. Raises ValueError or TypeError if a field cannot be sent as
        JSON."""
        if self.method == "GET":
            return None
        members = (f"{json.dumps(n)}: {_json(n, v)}" for n, v in (self.fields or {}).items())
        return f"{{{', '.join(members)}}}".encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete reply whose status is one of the request's `answers`."""

    status: int
    headers: Mapping[str, str]
    body: bytearray
    request_id: str

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            content_type = self.headers.get("content-type", "").partition(";")[0]
            kind = f"is {content_type}" if content_type else "has no content type"
            raise WrongShape(f"the reply {kind} and is not JSON") from error

    def read(self, form: type[Result]) -> Result:
        """The reply as a result, with the request's id."""
        result: Result = read(form, with_request_id(self.json(), self.request_id))
        return result


@dataclass(frozen=True, slots=True)
class Call(Generic[Results]):
    """A request, and the function that reads its answer. The function raises WrongShape if it
    cannot read the answer."""

    request: Request
    read: Callable[[Answer], Results]

    def result(self, answer: Answer) -> Results:
        try:
            return self.read(answer)
        except WrongShape as error:
            message = f"this client cannot read the reply of {self.request.path}: {error}"
            raise MalformedReplyError(message, answer.request_id) from error


def record(path: str, form: type[Result], fields: Mapping[str, object]) -> Call[Result]:
    """A call to an operation that replies with a JSON object."""
    return Call(post(path, fields), lambda answer: answer.read(form))


def array(path: str, form: Any, fields: Mapping[str, Any]) -> Call[Any]:
    """A call to an operation whose reply has one array per prompt, named after the operation.

    The result is an instance of `form`; for a list of prompts, it is a list with one instance for
    each.
    """
    name = path.removeprefix("/")

    def read_prompt(file: TensorFile, suffix: str, **facts: Any) -> Any:
        return form(**{name: file.array(name + suffix)}, **facts)

    return tensors(path, fields, read_prompt)


def tensors(path: str, fields: Mapping[str, Any], read_prompt: Callable[..., Any]) -> Call[Any]:
    """A call with a safetensors reply.

    `read_prompt` returns the result of one prompt. Its arguments are the file, the suffix of the
    names of the prompt's tensors, and the members of `ArrayResult`.
    """
    prompt = fields["prompt"]
    many = is_many(prompt)
    count = len(prompt) if many else 1
    suffixes = [""] if count == 1 else [f".{i}" for i in range(count)]

    def results(answer: Answer) -> Any:
        file = TensorFile(answer.body)
        values = [
            read_prompt(
                file,
                suffix,
                positions=file.array(f"positions{suffix}"),
                token_ids=file.array(f"token_ids{suffix}"),
                checkpoint=file.checkpoint,
                request_id=answer.request_id,
            )
            for suffix in suffixes
        ]
        return values if many else values[0]

    return Call(post(path, fields, SAFETENSORS), results)


def post(path: str, fields: Mapping[str, object], accept: str = JSON, **decided: object) -> Request:
    """A POST request with the caller's fields, and with the fields in `decided`, which the client
    sets itself. Raises TypeError if the caller sets `stream`."""
    if "stream" in fields:
        raise TypeError(
            f"stream is {fields['stream']!r}, but calls to {path} do not stream. Remove `stream`; "
            "to receive a generation piece by piece, use the method `stream`"
        )
    return Request("POST", path, {**fields, **decided}, accept)


def is_many(prompt: Prompt, name: str = "prompt") -> bool:
    """True for a list of prompts, False for a text or a list of token ids. For anything else,
    raises a TypeError that names the field (`name`)."""
    if not isinstance(prompt, (Sequence, np.ndarray)):
        raise TypeError(
            f"{name} is {repr(prompt)[:80]}; it must be a text, a list of token ids, or a list of "
            "either"
        )
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 1
    return len(prompt) == 0 or not isinstance(prompt[0], (int, np.integer))


def with_request_id(value: Any, request_id: str) -> Any:
    return {**value, "request_id": request_id} if isinstance(value, dict) else value


def documented_by(build: Callable[..., object], method: Callable[..., object]) -> None:
    """Give a method the name, docstring and signature of the function that builds its call."""
    update_wrapper(method, build, ("__name__", "__qualname__", "__doc__"), ())
    del method.__wrapped__  # type: ignore[attr-defined]  # it has no `self`
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    own = inspect.signature(build)
    (result,) = get_args(own.return_annotation)
    signature = own.replace(parameters=[itself, *own.parameters.values()], return_annotation=result)
    method.__signature__ = signature  # type: ignore[attr-defined]


def _json(name: str, value: object) -> str:
    """A field's value as JSON. Raises a TypeError or ValueError that names the field."""
    try:
        return json.dumps(_with_text_keys(value), default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} cannot be sent as JSON: {error}") from error


def _with_text_keys(value: Any) -> Any:
    """Convert keys to strings, as JSON requires: `logit_bias` may have token ids as keys."""
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(item) for name, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """Convert a NumPy array or number, or a sequence, to a type that `json` can write. Raises
    TypeError for other values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise TypeError(f"a request cannot contain a {type(value).__name__}")
