"""Supported JSON Schema: a keyword is enforced, treated as an annotation, or refused.

llguidance enforces the keywords below (draft 2020-12), refuses other keywords that it knows, and
ignores unknown keywords. This module refuses unknown keywords too, because they may be misspelled
or belong to another dialect. It also refuses a minProperties that repeated names could satisfy.

Strings have no escapes except NAMED_CONTROLS, `\"` and `\\` (`JSON_LAYOUT` in
`model/inference/constraints/compiler.py`), so other control characters cannot be written.
llguidance 1.9.1 drops them silently; this module refuses texts that need them. In llguidance a
character class with all control characters also matches a bare quote and backslash. So NUL is
removed from negated classes, and other classes that could hold all control characters are refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from logitd.model.inference.errors import ConstraintError

ENFORCED = {
    *("type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref"),
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
ANNOTATIONS = {
    *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions"),
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType"),
}
"""Keywords without an effect on the value. Extensions (`x-...`) have no effect either."""

BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords whose value maps names to schemas."""

NAMED_CONTROLS = "\b\t\n\f\r"

TOKEN = re.compile(
    r"\\(?:[xuU]\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|[pP](?:\{[^}]*\}|.)|.)|\[\^[]-]?|\[:|\[\]?|&&|--|~~|.",
    re.DOTALL,
)
"""One token of a regular expression: an escape, the start of a class, a set operator, or a
character."""
CATEGORY = re.compile(r"\\p(?:[LMNPSZ]|\{[LMNPSZ][a-z]?\})")
"""Unicode categories without control characters."""


def enforceable(schema: Any) -> Any:
    """Convert a schema to one that the compiler enforces completely. Raises ConstraintError for
    parts that the compiler would not enforce. The compiler checks the values of keywords."""
    if isinstance(schema, list):
        return [enforceable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    _check_keywords(schema)
    _check_count(schema)
    return {key: _value(key, value) for key, value in schema.items()}


def _value(key: str, value: Any) -> Any:
    if key in ("const", "enum"):
        _check_text(value)
        return value
    if key in BY_NAME and isinstance(value, Mapping):
        named = {name: enforceable(schema) for name, schema in value.items()}
        if key != "patternProperties":
            return named
        return {_pattern(pattern): schema for pattern, schema in named.items()}
    if key == "pattern" and isinstance(value, str):
        return _pattern(value)
    return value if key in ANNOTATIONS or key.startswith("x-") else enforceable(value)


def _check_keywords(schema: Mapping[str, Any]) -> None:
    if "x-guidance" in schema:
        raise ConstraintError("x-guidance is not supported: the layout of JSON is fixed")
    for key in schema:
        if key not in ENFORCED | ANNOTATIONS and not key.startswith("x-"):
            raise ConstraintError(f"the keyword {key[:40]!r} is not supported")


def _check_count(schema: Mapping[str, Any]) -> None:
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    count = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, count):
        raise ConstraintError(
            f"minProperties is {least}, but required lists {count}: names of other properties may "
            "repeat, so minProperties cannot be enforced"
        )


def _check_text(value: Any) -> None:
    """Refuse a value if any of its strings contains a character that cannot be written."""
    if isinstance(value, list):
        for item in value:
            _check_text(item)
    elif isinstance(value, Mapping):
        _check_text(list(value.values()))
    elif isinstance(value, str):
        for character in value:
            _check_character(ord(character))


def _check_character(code: int) -> None:
    if code == 0x7F or (code < 0x20 and chr(code) not in NAMED_CONTROLS):
        raise ConstraintError(f"the character U+{code:04X} cannot be written in a string")


def _pattern(pattern: str) -> str:
    """Remove NUL from the negated classes of a pattern. Refuse a pattern that names control
    characters without a short escape, or that could match all control characters."""
    parts, in_class = [], False
    for token in TOKEN.findall(pattern):
        _check_token(token, in_class=in_class)
        in_class = token[0] == "[" or (in_class and token != "]")
        if token.startswith("[^"):  # the first character may be a bracket or a hyphen
            token = r"[^\x00" + "".join("\\" + character for character in token[2:])
        parts.append(token)
    return "".join(parts)


def _check_token(token: str, *, in_class: bool) -> None:
    if len(token) == 1:
        _check_character(ord(token))
    elif token[:2] in (r"\x", r"\u", r"\U"):
        _check_character(int(token[2:].strip("{}") or "0", 16))
    elif (
        token in (r"\a", r"\v", "[:")
        or (token[:2] in (r"\p", r"\P") and not CATEGORY.fullmatch(token))
        or (in_class and token in ("&&", "--", "~~", "[", "[]", "[^", "[^]", "[^-"))
    ):
        raise ConstraintError(f"{token[:40]} in a pattern is not supported")
