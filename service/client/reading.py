"""Reading: converts parsed JSON to frozen dataclasses, guided by the dataclasses' annotations.

Errors state the path of a missing or invalid member (`choices.0.text`). Unknown members are
ignored, because a newer server may send more. Annotations may be scalars, `bytes` (in JSON a list
of integers), unions, `tuple[X, ...]`, `dict[str, X]`, `Any`, and dataclasses of these.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

KINDS: Mapping[Any, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    bytes: "a list of bytes",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}
"""Names of types in error messages."""


class WrongShape(ValueError):
    """Raised if JSON does not have the expected form. The message states the member's path."""


def read(form: Any, value: Any, where: str = "") -> Any:
    """Convert the parsed JSON `value` to an instance of `form`. `where` is the path of the value in
    the reply."""
    if is_dataclass(form):
        return _object(form, value, where)
    match get_origin(form):
        case None:
            return _scalar(form, value, where)
        case origin if origin is UnionType:
            return _one_of(get_args(form), value, where)
        case origin if origin is tuple and isinstance(value, list):
            item = get_args(form)[0]
            return tuple(read(item, element, f"{where}.{i}") for i, element in enumerate(value))
        case origin if origin is dict and isinstance(value, dict):
            item = get_args(form)[1]
            return {name: read(item, element, f"{where}.{name}") for name, element in value.items()}
    raise _wrong(form, value, where)


def _object(form: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(form, value, where)
    members = {}
    for field in fields(form):
        place = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            members[field.name] = read(field.type, value[field.name], place)
        elif field.default is MISSING:
            raise WrongShape(f"{place} is missing")
    return form(**members)


def _one_of(forms: tuple[Any, ...], value: Any, where: str) -> Any:
    """The value, read as the first form that fits. If none fits, raises the error of the last
    form."""
    if value is None and NoneType in forms:
        return None
    *firsts, last = (form for form in forms if form is not NoneType)
    for form in firsts:
        try:
            return read(form, value, where)
        except WrongShape:
            continue
    return read(last, value, where)


def _scalar(form: Any, value: Any, where: str) -> Any:
    if form is Any or type(value) is form:
        return value
    # The integers may not be bytes, or an integer may be too large for a float.
    with suppress(TypeError, ValueError, OverflowError):
        if form is float and type(value) is int:
            return float(value)
        if form is bytes and type(value) is list:
            return bytes(value)
    raise _wrong(form, value, where)


def _wrong(form: Any, value: Any, where: str) -> WrongShape:
    """The error for a value of the wrong type. It names the type but does not quote the value."""
    wanted = KINDS.get(get_origin(form) or form, "an object")
    found = "null" if value is None else KINDS[type(value)]
    return WrongShape(f"{where or 'the reply'} is {found}; it should be {wanted}")
