"""Validation: messages for wrong fields of a body, the same in process and over HTTP.

There is one sentence for each wrong field. It names the field, its value and what the value must
be. It repeats at most the beginning of a value; for an unknown field it repeats only the name.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.operations.body import MAX_IDS, MAX_PROMPTS, RequestBody
from logitd.model.operations.generate import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from logitd.model.operations.prompts import clip

MAX_REPORTED = 5
"""Maximum number of wrong fields that a message names."""
MAX_PROBLEMS = 1000
"""Maximum number of errors of a body that are described. For a body with more errors, the message
only gives their number, because describing so many would block the event loop."""

MAX_REPEATED = 40
"""Maximum number of characters of a wrong value, or digits of a wrong number, that a message
repeats."""
MAX_GUESSED = 40
"""A message suggests a similar field only if the name of the unknown field has at most this many
characters."""
COMMON_NAMES = {
    "inputs": "prompt",
    "text": "prompt",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
}
"""Names that other servers use for fields, and the names used here."""

IDS = f"token ids (integers from 0, {MAX_IDS} at most)"
PLACES = f"a list of integers (1 to {MAX_IDS} of them) or {{'from': start, 'to': stop}}"
DIRECTION = (
    "a list of numbers, a list of such lists (one for each head), or {'from': ..., 'minus': ...}"
)
SCHEMA = "a JSON schema, as an object or as a string of JSON"
SEVERAL_FORMS = {
    "prompt": f"a string, a list of {IDS}, or a list of either ({MAX_PROMPTS} at most)",
    "continuations": f"a list of strings and of lists of {IDS}",
    "stop": f"a string of 1 to {MAX_STOP_LENGTH} characters or a list of such strings "
    f"({MAX_STOP_STRINGS} at most)",
    "positions": f"'last', 'all', {PLACES}",
    "tokens": f"a list of {IDS}, or a list of such lists ({MAX_PROMPTS} at most)",
    "baseline": "'zero' or a token id",
    **dict.fromkeys(("token", "minus"), "a string, or a list with one for each prompt"),
    **dict.fromkeys(("token_id", "minus_id"), "a token id, or a list with one for each prompt"),
    "tool_choice": "'none', 'auto', 'required' or a function's name in an object",
    "guided_json": SCHEMA,
    "structured_outputs.json": SCHEMA,
    "interventions.positions": f"'all', 'prompt', 'generated', 'last', {PLACES}",
    "interventions.values": "a list of numbers, or a list of such lists, up to three deep",
    "interventions.along": DIRECTION,
    "interventions.proportional_to": DIRECTION,
    "interventions.from.prompt": "a string or a list of ids",
    "interventions.minus.prompt": "a string or a list of ids",
    "interventions.from.positions": f"'last', 'all', {PLACES}",
    "interventions.minus.positions": f"'last', 'all', {PLACES}",
}
"""The fields whose value may have several forms, each with a description of the forms."""

Body = TypeVar("Body", bound=RequestBody)


def parse(body: type[Body], fields: Mapping[str, Any]) -> Body:
    """Make a body from Python values, which may include NumPy arrays, sequences and
    `Intervention`s. Raises InvalidRequest for invalid fields."""
    members = (f"{json.dumps(name)}:{_json(name, value)}" for name, value in fields.items())
    try:
        return body.model_validate_json(f"{{{','.join(members)}}}".encode())
    except ValidationError as error:
        raise describe_errors(error, body.model_fields) from error


def _json(name: str, value: Any) -> str:
    """The value of a field as JSON."""
    subject = "the prompt" if name == "prompt" else name
    try:
        text = json.dumps(value, default=_plain, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{subject} is not UTF-8 text", name) from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{subject} cannot be sent as JSON: {error}", name) from error
    return text


def _plain(value: Any) -> Any:
    """A Python value that JSON can represent."""
    match value:
        case frozenset() | set():
            return sorted(value)
        case Intervention():
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            del fields["field"]
            if value.operation not in ("scale", "add"):
                del fields["factor"]
            return fields
        case _ if hasattr(value, "tolist"):
            return value.tolist()
        case Mapping():
            return dict(value)
        case Sequence() if not isinstance(value, (bytes, bytearray, memoryview)):
            return list(value)
    raise TypeError(f"a request cannot contain a {type(value).__name__}")


def describe_errors(error: ValidationError, fields: Collection[str] = ()) -> InvalidRequest:
    """The InvalidRequest for a body that its pydantic model rejects. `fields` are the fields of
    this model."""
    if (count := error.error_count()) > MAX_PROBLEMS:
        return InvalidRequest(f"the body is wrong in {count} places; /docs describes its fields")
    problems = error.errors(include_url=False)
    # A field with several forms fails once for each form; one sentence covers them.
    distinct: dict[str, None] = {}
    for problem in problems:  # suggestions are slow: make them only for sentences that are shown
        known = fields if len(distinct) < MAX_REPORTED else ()
        distinct[describe_problem(problem, known)] = None
    sentences = list(distinct)
    if len(sentences) > MAX_REPORTED:
        sentences[MAX_REPORTED:] = [f"and {len(sentences) - MAX_REPORTED} more"]
    location = problems[0]["loc"]
    if location:
        return InvalidRequest("; ".join(sentences), clip(str(location[0])))
    # The sentence of a rule about several fields begins with one of them.
    first = sentences[0].partition(" ")[0].partition(".")[0]
    return InvalidRequest("; ".join(sentences), first if first in fields else None)


def describe_problem(problem: Mapping[str, Any], fields: Collection[str] = ()) -> str:
    """A sentence for one of pydantic's errors. A suggestion for an unknown field is one of
    `fields`."""
    location, kind, message = problem["loc"], problem["type"], str(problem["msg"])
    for length in range(1, len(location)):  # a longer location is about one of several forms
        name = ".".join(part for part in location[:length] if isinstance(part, str))
        if name in SEVERAL_FORMS:
            return f"{_place(location[:length])} must be {SEVERAL_FORMS[name]}"
    place = _place(location)
    match kind:
        case "extra_forbidden":
            return f"unknown field {place!r}{_suggestion(location, fields)}"
        case "missing":
            return f"{place} is required"
        case "json_invalid":
            return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
        case "model_type" if not location:
            return "the body must be a JSON object"
        case "value_error":  # a sentence of our own, which begins with its field
            sentence = message.removeprefix("Value error, ")
            if len(location) < 2:
                return sentence
            subject, _, rest = sentence.partition(" ")
            return f"{place} {rest}" if subject == location[-1] else f"{place}: {sentence}"
    _, _, limit = message[:300].partition(" should ")
    limit = limit.partition(" after validation")[0]
    return f"{place} must {limit or 'have another value'}, not {_repeated(problem['input'], kind)}"


def _repeated(value: Any, kind: str) -> str:
    """The beginning of a wrong value, or its size if the size is wrong."""
    if kind.endswith(("too_long", "too_short")):
        return str(len(value))
    match value:
        case list():
            return "a list"
        case dict():
            return "an object"
        case int() if abs(value) >= 10**MAX_REPEATED:
            return f"a number of more than {MAX_REPEATED} digits"
        case str():
            return repr(clip(value, MAX_REPEATED))
        case _:
            return json.dumps(value, default=str)


def _place(location: tuple[int | str, ...]) -> str:
    """A location in the usual notation: interventions[1].values."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return clip("".join(parts).removeprefix("."))


def _suggestion(location: tuple[int | str, ...], fields: Collection[str]) -> str:
    """A clause with the field that was probably meant. Empty for fields of nested objects."""
    name = str(location[0])
    if len(location) > 1 or len(name) > MAX_GUESSED:
        return ""
    if (known := COMMON_NAMES.get(name)) is None or known not in fields:
        known = next(iter(get_close_matches(name, fields, n=1, cutoff=0.75)), None)
    return "" if known is None else f"; did you mean {known!r}?"
