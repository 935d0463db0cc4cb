"""Supported JSON Schema: a keyword is enforced, treated as an annotation, or refused.

llguidance enforces the keywords below (draft 2020-12), refuses other keywords that it knows, and
ignores unknown keywords. This module refuses unknown keywords too, because they may be misspelled
or belong to another dialect. It also refuses a minProperties that repeated names could satisfy.

llguidance 1.9.1 reads numbers as 64-bit floats, not always the nearest ones, and computes multiples
with 32 bits. This module refuses the numbers that it would change. In a range whose bounds are not
multiples, it misses some multiples; so this module moves the bounds to multiples.

llguidance's dates and times include 29 February of every year, the year 0 and the second 60, which
readers refuse; FORMATS replaces them.

Strings have no escapes except NAMED_CONTROLS, `\"` and `\\` (`JSON_LAYOUT` in
`model/inference/constraints/compiler.py`), so other control characters cannot be written.
llguidance 1.9.1 drops them silently; this module refuses texts that need them. In llguidance a
character class with all control characters also matches a bare quote and backslash. So NUL is
removed from negated classes, and other classes that could hold all control characters are refused.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any, TypeGuard

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

TYPES = ("string", "number", "object", "array", "boolean", "null")
GIVEN = {"enum", "const", "anyOf", "allOf", "oneOf", "$ref"}
"""Keywords that list values, or refer to other schemas."""
CHOOSES = ("$ref", "anyOf", "oneOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

LARGEST_NUMBER = 2**63 - 1
LARGEST_EXCLUSIVE = 2**53 - 1
"""A 64-bit float represents every integer up to this number, and its successor."""
MULTIPLES = 2**16
"""Two numbers below this one have a product of 32 bits."""

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    rf"|(?:0[13578]|1[02])-31)|{_LEAP}-02-29)"
)
_HOURS = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOURS})"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Patterns of the formats that llguidance enforces only in part. A second has up to 9 decimals."""

NAMED_CONTROLS = "\b\t\n\f\r"

TOKEN = re.compile(
    r"\\(?:[xuU]\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|[pP](?:\{[^}]*\}|.)|.)|\(\?[a-zA-Z]*x|\[\^[]-]?|\[:|\[\]?|&&|--|~~|.",
    re.DOTALL,
)
"""One token of a regular expression: an escape, the flag for verbose mode, the start of a class, a
set operator, or a character."""
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
    return _on_multiples(_formatted({key: _value(key, value) for key, value in schema.items()}))


def _formatted(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a format in FORMATS with its pattern."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        return schema
    if "pattern" in schema:
        raise ConstraintError(f"pattern next to the format {name!r} is not supported: use only one")
    return {key: value for key, value in schema.items() if key != "format"} | {
        "pattern": FORMATS[name]
    }


def _on_multiples(schema: dict[str, Any]) -> dict[str, Any]:
    """Move the bounds of a schema with multipleOf to the outermost multiples between them, or
    slightly beyond. A range with one multiple needs no multipleOf."""
    step, bounds = schema.get("multipleOf"), {key: schema[key] for key in BOUNDS if key in schema}
    if not _is_number(step) or not step > 0 or not all(map(_is_number, bounds.values())):
        return schema  # the compiler's error
    multiple = Fraction(_exact(step))
    if schema.get("type") == "integer":
        multiple = Fraction(multiple.numerator)  # the integers among the multiples
    lows, highs = [], []
    for key, bound in bounds.items():
        factor = Fraction(_exact(bound)) / multiple
        if "inimum" in key:
            lows.append(math.floor(factor) + 1 if "exclusive" in key else math.ceil(factor))
        else:
            highs.append(math.ceil(factor) - 1 if "exclusive" in key else math.floor(factor))
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        return schema  # the compiler's error
    result = {key: value for key, value in schema.items() if key not in BOUNDS}
    result["multipleOf"] = step if multiple == Fraction(_exact(step)) else int(multiple)
    if low is not None and low == high:
        del result["multipleOf"]
        result["minimum"] = result["maximum"] = _number(low * multiple)
    else:
        if low is not None:
            result["minimum"] = -_above(-low, multiple)
        if high is not None:
            result["maximum"] = _above(high, multiple)
    for key in ("minimum", "maximum"):
        _check_number(key, result.get(key, 0))
    around_zero = (low is None or low < 0) and (high is None or high > 0)
    return _split_at_zero(result, multiple) if around_zero else result


def _split_at_zero(schema: dict[str, Any], step: Fraction) -> dict[str, Any]:
    """Divide the numbers of a schema into those below 0 and the others if the step has two decimals
    or more. In a range around 0, the compiler misses negative multiples with fewer decimals: -0.5
    among the multiples of 0.25."""
    types = schema.get("type", TYPES)
    types = (types,) if isinstance(types, str) else types
    decimals = -_exponent(_decimal(step))
    finer = decimals > 1 and step * 10**decimals > 1
    if not finer or "number" not in types or not GIVEN.isdisjoint(schema):
        return schema
    numbers = {key: schema[key] for key in (*BOUNDS, "multipleOf") if key in schema}
    outside = {key: value for key, value in schema.items() if key in ANNOTATIONS}
    others = {key: value for key, value in schema.items() if key not in numbers | outside}
    numbers["type"] = "number"
    parts = [{**numbers, "maximum": _above(-1, step)}, {**numbers, "minimum": 0}]
    if rest := [name for name in types if name not in ("number", "integer")]:
        parts.append({**others, "type": rest})
    return {**outside, "anyOf": parts}


def _above(factor: int, step: Fraction) -> float:
    """A bound for which the compiler finds this multiple of a step, and not the next one.

    It requires all decimals of the step in a text, but of an upper bound it takes only the digits
    that count: 2.5, not 2.50. It also divides a lower bound by the step, and rounds."""
    decimals = max(0, -_exponent(_decimal(step)))
    unit = Fraction(1, 10**decimals)
    if not decimals or not factor:
        beyond = Fraction(0)
    elif factor < 0:
        beyond = unit / 2
    else:
        beyond = unit if unit < step else Fraction(0)
    return _number(factor * step + beyond)


def _number(exact: Fraction) -> float:
    return exact.numerator if exact.denominator == 1 else float(exact)


def _decimal(exact: Fraction) -> Decimal:
    return (Decimal(exact.numerator) / Decimal(exact.denominator)).normalize()


def _value(key: str, value: Any) -> Any:
    if key in ("const", "enum"):
        _check_value(key, value)
        return value
    if key == "multipleOf":
        _check_multiple(value)
    elif key in BOUNDS:
        _check_number(key, value)
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


def check_combinations(schema: Any) -> None:
    """Refuse multiples and bounds that the compiler cannot combine. If several schemas may apply to
    one value, all of them are combined, because it is not known here which apply together."""
    every = list(_mappings(schema))
    combined = any(map(_combines, every))
    for group in [every] if combined else [[one] for one in every]:
        _check_bounds(group)
    if combined:
        _check_bounds_of_multiples(every, _check_multiples(every))


def _check_bounds(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an exclusive bound that is an integer, if the other bound lies between it and the next
    one. In llguidance 1.9.1 such a range contains the integer."""
    bounds = [(key, one[key]) for one in schemas for key in BOUNDS if _is_number(one.get(key))]
    between = {
        ("aximum" in key, math.floor(abs(value))): (key, value)
        for key, value in bounds
        if value % 1
    }
    for name, near in bounds:
        rising = name == "exclusiveMinimum" and near >= 0
        falling = name == "exclusiveMaximum" and near <= 0
        other = between.get((rising, int(abs(near))))
        if (rising or falling) and not near % 1 and other is not None:
            inclusive = "minimum" if rising else "maximum"
            raise ConstraintError(
                f"{name} is {near} and {other[0]} is {other[1]}, but the compiler would allow "
                f"{near}: use {inclusive} with a number next to {near}"
            )


def _check_multiples(every: Sequence[Mapping[str, Any]]) -> list[Decimal]:
    """The distinct multiples. Refuse them if their least common multiple is too large: the compiler
    computes it from the product, in 32 bits."""
    multiples = [one["multipleOf"] for one in every if _is_number(one.get("multipleOf"))]
    steps = sorted({abs(_exact(multiple)).normalize() for multiple in multiples})
    decimals = max((0, *(-_exponent(step) for step in steps)))
    least = math.lcm(*(int(step.scaleb(decimals)) for step in steps))
    if least >= MULTIPLES:
        given = ", ".join(f"{step:f}" for step in steps)[:40]
        raise ConstraintError(
            f"multipleOf is {given} in a schema with allOf, patternProperties, or $ref, anyOf or "
            "oneOf next to other keywords: the least common multiple, without its point, must be "
            f"below {MULTIPLES}"
        )
    return steps


def _check_bounds_of_multiples(
    every: Sequence[Mapping[str, Any]], steps: Sequence[Decimal]
) -> None:
    """Refuse a bound that is no integer if another schema has a multipleOf with decimals: between
    such bounds the compiler misses some multiples. Bounds next to their own multipleOf fit it."""
    fractional = [step for step in steps if step % 1]
    found: dict[
        Decimal | None, tuple[str, float]
    ] = {}  # a bound that is no integer, by its own multipleOf
    for one in every if fractional else ():
        own = one.get("multipleOf")
        bounds = [key for key in BOUNDS if _is_number(one.get(key)) and one[key] % 1]
        if bounds:
            found[_exact(own) if _is_number(own) else None] = (bounds[0], one[bounds[0]])
    for (own, (key, bound)), step in product(found.items(), fractional):
        if own is None or own % step:
            raise ConstraintError(
                f"{key} is {bound} and multipleOf is {step:f} in a schema with allOf, "
                "patternProperties, or $ref, anyOf or oneOf next to other keywords: use integers "
                "as bounds, or put them next to multipleOf"
            )


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _mappings(item)


def _combines(schema: Mapping[str, Any]) -> bool:
    """True if several parts of a schema may apply to one value."""
    return (
        "allOf" in schema
        or {"properties", "patternProperties"} <= schema.keys()
        or (any(key in schema for key in CHOOSES) and len(ENFORCED & schema.keys()) > 1)
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exact(number: float) -> Decimal:
    return Decimal(json.dumps(number))


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # finite
    return exponent


def _check_number(key: str, value: Any) -> None:
    """Refuse a number that the compiler would read or write as another one: it takes the digits as
    a float, and scales them by a power of ten. It adds 1 to an exclusive bound of an integer."""
    if not _is_number(value):
        return  # the compiler's error
    largest = LARGEST_EXCLUSIVE if key.startswith("exclusive") else LARGEST_NUMBER
    if abs(value) <= largest:
        number = _exact(value)
        exponent = _exponent(number)
        digits, scale = int(number.scaleb(-exponent)), float(f"1e{abs(exponent)}")
        read = digits * scale if exponent > 0 else digits / scale
        large = abs(value) > LARGEST_EXCLUSIVE  # its shortest decimal may be another integer
        if _exact(read) == number and (not large or Decimal(read) == number):
            return
    raise ConstraintError(
        f"{key} is {str(value)[:40]}, which the compiler would round: use a number with at most 15 "
        f"digits and 22 decimals, from {-largest} to {largest}"
    )


def _check_multiple(value: Any) -> None:
    """Refuse a multipleOf that the compiler would change. It multiplies by ten until the float is
    an integer, which must fit into 32 bits."""
    if not _is_number(value):
        return
    scaled, decimals = float(min(abs(value), 2**32)), 0
    while scaled % 1 and scaled < 2**32:
        scaled, decimals = scaled * 10, decimals + 1
    if not 0 < scaled < 2**32 or abs(_exact(value)) != Decimal(scaled).scaleb(-decimals):
        raise ConstraintError(
            f"multipleOf is {str(value)[:40]}, which the compiler would round: use an integer from "
            f"1 to {2**32 - 1}, or another decimal, such as 0.1, 0.01 or 0.001"
        )


def _check_value(key: str, value: Any) -> None:
    """Refuse a value of `const` or `enum` that contains a character that cannot be written, or a
    number that would change."""
    if isinstance(value, list):
        for item in value:
            _check_value(key, item)
    elif isinstance(value, Mapping):
        _check_value(key, list(value.values()))
    elif isinstance(value, str):
        for character in value:
            _check_character(ord(character))
    else:
        _check_number(key, value)


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
        or (not in_class and token.startswith("(?"))
        or (token[:2] in (r"\p", r"\P") and not CATEGORY.fullmatch(token))
        or (in_class and token in ("&&", "--", "~~", "[", "[]", "[^", "[^]", "[^-"))
    ):
        raise ConstraintError(f"{token[:40]} in a pattern is not supported")
