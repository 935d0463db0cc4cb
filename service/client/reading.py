"""Reading: from parsed JSON to frozen dataclasses, by their annotations.

A member that is missing or of another kind is named with its place (`choices.0.text`); one that is
not known is passed over, for a newer server may say more. Annotations are scalars, `bytes` (a list
of integers in JSON), unions, `tuple[X, ...]`, `dict[str, X]`, `Any` and dataclasses of these.
"""

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin


class WrongShape(ValueError):
    """JSON that is not what was to be read. The message says where."""


def read(form: Any, value: Any, where: str = "") -> Any:
    """`value`, which was JSON, as a `form`; `where` is its place in the reply."""
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
    """The first form that fits; with one besides None, its own complaint."""
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
    try:
        if form is Any or type(value) is form:
            return value
        if form is float and type(value) is int:
            return float(value)
        if form is bytes and type(value) is list:
            return bytes(value)
    except (TypeError, ValueError, OverflowError):  # no bytes, or an integer beyond any float
        pass
    raise _wrong(form, value, where)


def _wrong(form: Any, value: Any, where: str) -> WrongShape:
    wanted = {str: "a text", int: "an integer", float: "a number", bool: "true or false",
              bytes: "a list of bytes"}  # fmt: skip
    kind = "a list" if get_origin(form) is tuple else wanted.get(form, "an object")
    return WrongShape(f"{where or 'the reply'} is {_described(value)}; it should be {kind}")


def _described(value: Any) -> str:
    """A JSON value in a few words, of which none is the value's own."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a text",
             list: "a list", dict: "an object"}  # fmt: skip
    return kinds[type(value)]
