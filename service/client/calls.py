"""Calls: what is sent to an endpoint and how its answer is read. Nothing is sent from here.

Both clients take a `Call`, get an `Answer` in their own way and return `call.result` of it. Prompts
and fields may hold NumPy arrays and numbers, such as those of earlier results.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import numpy as np

from logitd.service.client import errors
from logitd.service.client.arrays import Activations, Logits, TopLogits
from logitd.service.client.errors import MalformedReplyError
from logitd.service.client.fields import Intervention, OneOrManyIds, OnePrompt, Prompt
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import (
    Detokenized,
    Generation,
    Health,
    Info,
    Stages,
    Sweep,
    Tokenized,
    TokenizerInfo,
)
from logitd.service.client.tensors import TensorFile

Result = TypeVar("Result")
Results = TypeVar("Results", covariant=True)

JSON = "application/json"
EVENTS = "text/event-stream"
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent. `answers` are the statuses whose reply is an answer and no refusal."""

    method: str
    path: str
    body: bytes | None = None
    accept: str = JSON
    answers: frozenset[int] = frozenset({200})


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply whose status was among the request's `answers`."""

    status: int
    content_type: str
    body: bytearray
    request_id: str

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            message = f"the reply is {self.content_type or 'of no content type'}, and not JSON"
            raise WrongShape(message) from error


@dataclass(frozen=True, slots=True)
class Call(Generic[Results]):
    """One request, and what its answer means. `read` raises WrongShape if it means nothing."""

    request: Request
    read: Callable[[Answer], Results]

    def result(self, answer: Answer) -> Results:
        try:
            return self.read(answer)
        except WrongShape as error:
            message = f"{self.request.path} gave no reply that this client can read: {error}"
            raise MalformedReplyError(message, answer.request_id) from error


@dataclass(frozen=True, slots=True)
class _Version:
    version: str


@dataclass(frozen=True, slots=True)
class _Prompts:
    prompts: tuple[dict[str, Any], ...]


def record(path: str, form: type[Result], body: Mapping[str, object]) -> Call[Result]:
    """An operation that answers with a JSON object."""
    if "stream" in body:
        raise TypeError(f"{path} gives one reply here and takes no `stream`")
    return Call(post(path, body), partial(_object, form))


def arrays(path: str, form: Any, body: Mapping[str, Any]) -> Call[Any]:
    """An operation that answers with one array of each prompt, which has the operation's name: a
    `form`, or a list of them for a list of prompts."""
    name = path.removeprefix("/")

    def read_prompt(file: TensorFile, suffix: str, request_id: str) -> Any:
        return form(file.array(name + suffix), **_facts(file, suffix, request_id))

    return _files(path, body, read_prompt)


def generate(prompt: Prompt, fields: Mapping[str, object]) -> Call[Generation]:
    if "stream" in fields:
        raise TypeError("generate gives one reply and takes no `stream`; call stream instead")
    return Call(post("/generate", {"prompt": prompt, **fields}), _generation)


def stream(prompt: Prompt, fields: Mapping[str, object]) -> Request:
    if "stream" in fields:
        raise TypeError("stream always streams and takes no `stream`")
    return post("/generate", {"prompt": prompt, **fields, "stream": True}, EVENTS)


def logits(prompt: Prompt, top_k: int | None, fields: Mapping[str, object]) -> Call[Any]:
    """Logits, or TopLogits with `top_k`; of many prompts, a list of them."""
    read_prompt = _logits if top_k is None else _top_logits
    chosen = {} if top_k is None else {"top_k": top_k}
    return _files("/logits", {"prompt": prompt, **fields, **chosen}, read_prompt)


def activations(
    prompt: Prompt, stages: str | Sequence[str], fields: Mapping[str, object]
) -> Call[Any]:
    """Activations; of many prompts, a list of them."""
    names = [stages] if isinstance(stages, str) else list(stages)
    return _files("/activations", {"prompt": prompt, "stages": names, **fields}, _activations)


def stages(model: str | None = None) -> Call[Stages]:
    return Call(get("/stages", model), partial(_object, Stages))


def patch(
    prompt: OnePrompt,
    source: OnePrompt,
    stage: str,
    over: Sequence[str],
    fields: Mapping[str, object],
) -> Call[Sweep]:
    vary: Intervention = {"stage": stage, "operation": "set", "from": {"prompt": source}}
    return record("/sweep", Sweep, {"prompt": prompt, "vary": vary, "over": over, **fields})


def tokenize(text: str | Sequence[str], fields: Mapping[str, object]) -> Call[Any]:
    """Tokenized; of many texts, a list of them."""
    many = not isinstance(text, str)
    request = post("/tokenize", {"prompt": text, **fields})
    return Call(request, partial(_one_or_many, Tokenized, many))


def detokenize(tokens: OneOrManyIds, fields: Mapping[str, object]) -> Call[Any]:
    """Detokenized; of many lists of ids, a list of them. An empty list is one of no ids."""
    many = len(tokens) > 0 and is_many(tokens)
    request = post("/detokenize", {"tokens": tokens, **fields})
    return Call(request, partial(_one_or_many, Detokenized, many))


def tokenizer_info(model: str | None = None) -> Call[TokenizerInfo]:
    return Call(get("/tokenizer_info", model), partial(_object, TokenizerInfo))


def info(model: str | None = None) -> Call[Info]:
    return Call(get("/info", model), partial(_object, Info))


def version() -> Call[str]:
    return Call(Request("GET", "/version"), _version)


def health() -> Call[Health]:
    return Call(Request("GET", "/health", answers=frozenset({200, 503})), _health)


def get(path: str, model: str | None) -> Request:
    """A request without a body, to one of the server's models or to the first."""
    return Request("GET", path if model is None else f"{path}?{urlencode({'model': model})}")


def is_many(prompt: Prompt) -> bool:
    """Whether this is a list of prompts, and no text and no token ids."""
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 1
    return len(prompt) == 0 or not isinstance(prompt[0], (int, np.integer))


def post(path: str, body: Mapping[str, object], accept: str = JSON) -> Request:
    """A request with a JSON body. ValueError or TypeError if JSON cannot say it."""
    content = json.dumps(_with_text_keys(body), default=_plain, allow_nan=False)
    return Request("POST", path, content.encode(), accept)


def _with_text_keys(value: Any) -> Any:
    """JSON's keys are texts; token ids may be keys of a bias, and NumPy's integers ids."""
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(item) for name, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers, and sequences of other kinds, as what JSON knows."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no place in a request")


def _object(form: type[Result], answer: Answer) -> Result:
    """A JSON reply as a result with its request's id."""
    result: Result = read(form, with_request_id(answer.json(), answer.request_id))
    return result


def _one_or_many(form: type[Result], many: bool, answer: Answer) -> Result | list[Result]:
    """The results of a reply that has one around its head, or several in `prompts`."""
    if not many:
        return _object(form, answer)
    head = with_request_id(answer.json(), answer.request_id)
    prompts = read(_Prompts, head).prompts
    return [read(form, head | prompt, f"prompts.{i}") for i, prompt in enumerate(prompts)]


def with_request_id(value: Any, request_id: str) -> Any:
    return {**value, "request_id": request_id} if isinstance(value, dict) else value


def _generation(answer: Answer) -> Generation:
    generation = _object(Generation, answer)
    if not generation.choices:
        raise WrongShape("choices is empty")
    return generation


def _version(answer: Answer) -> str:
    version: str = read(_Version, answer.json()).version
    return version


def _health(answer: Answer) -> Health:
    """Whatever its status says; but a 503 that says nothing about health is a refusal."""
    try:
        return _object(Health, answer)
    except WrongShape:
        if answer.status == 200:
            raise
        raise errors.from_reply(answer.status, {}, answer.body, answer.request_id) from None


def _files(
    path: str, body: Mapping[str, Any], read_prompt: Callable[[TensorFile, str, str], Any]
) -> Call[Any]:
    """A call with a safetensors answer. `read_prompt` gives one prompt's result, from the file, the
    suffix of its tensors' names and the request's id."""
    prompt = body["prompt"]
    many = is_many(prompt)
    count = len(prompt) if many else 1
    suffixes = [""] if count == 1 else [f".{i}" for i in range(count)]

    def results(answer: Answer) -> Any:
        file = TensorFile(answer.body)
        values = [read_prompt(file, suffix, answer.request_id) for suffix in suffixes]
        return values if many else values[0]

    return Call(post(path, body, SAFETENSORS), results)


def _facts(file: TensorFile, suffix: str, request_id: str) -> dict[str, Any]:
    """Members that all results of arrays have."""
    return {
        "positions": file.array(f"positions{suffix}"),
        "token_ids": file.array(f"token_ids{suffix}"),
        "checkpoint": file.checkpoint,
        "request_id": request_id,
    }


def _logits(file: TensorFile, suffix: str, request_id: str) -> Logits:
    rows = file.array(f"logits{suffix}")
    return Logits(rows, stage=file.stage, **_facts(file, suffix, request_id))


def _top_logits(file: TensorFile, suffix: str, request_id: str) -> TopLogits:
    ids, values = file.array(f"top_ids{suffix}"), file.array(f"top_logits{suffix}")
    return TopLogits(ids, values, stage=file.stage, **_facts(file, suffix, request_id))


def _activations(file: TensorFile, suffix: str, request_id: str) -> Activations:
    names = [name.removesuffix(suffix) for name in file.names if name.endswith(suffix)]
    stages = {n: file.array(n + suffix) for n in names if n not in ("token_ids", "positions")}
    return Activations(stages, **_facts(file, suffix, request_id))
