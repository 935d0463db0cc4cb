"""Validation: what is wrong with the fields of a body, a sentence for each.

The same in process and over HTTP.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.operations.body import MAX_IDS, MAX_PROMPTS, RequestBody
from logitd.model.operations.generate import MAX_STOP_TEXTS
from logitd.model.operations.prompts import clip

MAX_REPORTED = 5
"""Field errors named in one message."""
MAX_PROBLEMS = 1000
"""With more, a body's errors are only counted: describing each would block the event loop."""

MAX_GUESSED = 40
"""Characters of an unknown field up to which a known one like it is looked for."""
COMMON_NAMES = {
    "inputs": "prompt",
    "text": "prompt",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}
"""Names that other servers use, to suggest ours."""

SEVERAL_FORMS = {
    "prompt": f"a string, a list of token ids (integers from 0, {MAX_IDS} at most), "
    f"or a list of either ({MAX_PROMPTS} at most)",
    "continuations": f"a list of strings and of lists of token ids (integers from 0, {MAX_IDS} at "
    "most)",
    "stop": f"a string or a list of strings ({MAX_STOP_TEXTS} at most)",
    "positions": f"'last', 'all', a list of integers ({MAX_IDS} at most) or "
    "{'from': first, 'to': first left out}",
    "tokens": f"a list of token ids (integers from 0, {MAX_IDS} at most), or a list of such lists "
    f"({MAX_PROMPTS} at most)",
    "interventions.positions": "'all', 'prompt', 'generated', 'last', a list of integers or "
    "{'from': first, 'to': first left out}",
    "interventions.values": "a list of numbers, or a list of such lists, up to three deep",
    **dict.fromkeys(
        ("interventions.from.prompt", "interventions.minus.prompt"), "a string or a list of ids"
    ),
    **dict.fromkeys(
        ("interventions.from.positions", "interventions.minus.positions"),
        "'last', 'all', a list of integers or {'from': first, 'to': first left out}",
    ),
}
"""Fields that take values of several forms, in words."""


Body = TypeVar("Body", bound=RequestBody)
PYTHON_VALUES = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
)


def parse(body: type[Body], fields: Mapping[str, Any]) -> Body:
    """A body from Python values, which may be NumPy arrays, sequences and `Intervention`s. Raises
    InvalidRequest for fields that do not fit."""
    members = (orjson.dumps(name) + b":" + _json(name, value) for name, value in fields.items())
    try:
        return body.model_validate_json(b"{" + b",".join(members) + b"}")
    except ValidationError as error:
        raise describe_errors(error, body.model_fields) from error


def _json(name: str, value: Any) -> bytes:
    """The value of a field as JSON."""
    with suppress(TypeError):
        text = orjson.dumps(value, default=_plain, option=PYTHON_VALUES)
        if b"null" not in text:  # which it also writes for NaN and infinities
            return text
    subject = "the prompt" if name == "prompt" else name
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{subject} is not UTF-8 text", name) from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{subject} cannot be sent as JSON: {error}", name) from error


def _plain(value: Any) -> Any:
    """A Python value in terms of JSON."""
    match value:
        case frozenset() | set():
            return sorted(value)
        case Intervention():
            given = {
                "stage": value.stage,
                "operation": value.operation,
                "positions": value.positions,
                "heads": value.heads,
                "values": value.values,
            }
            takes_factor = value.operation in ("scale", "add")
            return {**given, "factor": value.factor} if takes_factor else given
        case _ if hasattr(value, "tolist"):  # an array that orjson does not take
            return value.tolist()
        case Mapping():
            return dict(value)
        case Sequence() if not isinstance(value, (bytes, bytearray, memoryview)):
            return list(value)
    raise TypeError(f"{type(value).__name__} has no place in a request")


def describe_errors(error: ValidationError, fields: Collection[str] = ()) -> InvalidRequest:
    """The refusal of a body that does not fit its model, whose fields are `fields`."""
    if (count := error.error_count()) > MAX_PROBLEMS:
        return InvalidRequest(f"the body is wrong in {count} places; /docs describes its fields")
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A field that may be several things fails once for each of them: one sentence says it.
    distinct: dict[str, None] = {}
    for problem in problems:  # to look for a suggestion takes time, so only where it is shown
        known = fields if len(distinct) < MAX_REPORTED else ()
        distinct[_sentence(problem, known)] = None
    sentences = list(distinct)
    if len(sentences) > MAX_REPORTED:
        sentences[MAX_REPORTED:] = [f"and {len(sentences) - MAX_REPORTED} more"]
    location = problems[0]["loc"]
    return InvalidRequest("; ".join(sentences), clip(str(location[0])) if location else None)


def _sentence(problem: Mapping[str, Any], fields: Collection[str]) -> str:
    location = problem["loc"]
    field = clip(".".join(str(part) for part in location))
    for length in range(1, len(location)):  # what follows names a form that it does not have
        if (form := SEVERAL_FORMS.get(_field_name(location[:length]))) is not None:
            return f"{_place(location[:length])} must be {form}"
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown field {field!r}{_suggestion(location, fields)}"
        case "missing":
            return f"{field} is required"
        case "json_invalid":
            return f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}"
        case "model_type":
            return "the body must be a JSON object"
        case "value_error":  # a sentence of our own
            item = f"{_place(location)}: " if len(location) > 1 else ""
            return item + str(problem["msg"]).removeprefix("Value error, ")
        case _:
            return f"{field}: {problem['msg'][:300]}" if field else str(problem["msg"])[:300]


def _field_name(location: tuple[int | str, ...]) -> str:
    """A field's name with those that it is within: interventions.from.prompt."""
    return ".".join(part for part in location if isinstance(part, str))


def _place(location: tuple[int | str, ...]) -> str:
    """A field as one would write it: interventions[1].values."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return clip("".join(parts).removeprefix("."))


def _suggestion(location: tuple[int | str, ...], fields: Collection[str]) -> str:
    """The field that was probably meant; unknown fields of nested objects have none."""
    name = str(location[0])
    if len(location) > 1 or len(name) > MAX_GUESSED:
        return ""
    if (known := COMMON_NAMES.get(name)) is None or known not in fields:
        known = next(iter(get_close_matches(name, fields, n=1, cutoff=0.75)), None)
    return "" if known is None else f"; did you mean {known!r}?"
