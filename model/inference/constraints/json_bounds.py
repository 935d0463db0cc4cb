"""Default bounds for a JSON schema, so that every generated text ends.

A small model often appends digits, letters or items until its tokens run out. So this module adds
the bounds that README.md lists to a schema that lacks them.

Every text that the bounded schema allows is allowed by the original. A schema with `allOf`, with an
inner `$id`, or with `$ref`, `anyOf` or `oneOf` alongside other keywords is left unchanged, because
its parts may depend on each other. Unknown keywords are ignored here; `json_schema.py` checks the
schema.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from logitd.model.inference.constraints.json_schema import ANNOTATIONS, BY_NAME, CHOOSES

MAX_STRING = 256
MAX_NAME = 64
MAX_ITEMS = 64
LARGEST = 10**15
"""A 64-bit float represents every integer up to this number."""
DECIMALS = 9
DEPTH = 3

GIVEN = ("enum", "const")
WITH_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
"""Keywords that hold a schema or a list of schemas."""
NAME = f"^.{{0,{MAX_NAME}}}$"
SCALARS = ("string", "number", "boolean", "null")

Schema = Mapping[str, Any]


def bounded(schema: Any) -> Any:
    """Add the default bounds to a schema. A schema whose parts depend on each other is returned
    unchanged."""
    if not isinstance(schema, Mapping | bool) or not _by_parts(schema, root=True):
        return schema
    whole = {} if isinstance(schema, bool) else schema
    named = whole.get("$defs", {})
    if schema is False or not isinstance(named, Mapping):
        return schema
    prefix = "anything"
    while any(str(name).startswith(prefix) for name in named):
        prefix += "_"
    result = _bounded(schema, prefix)
    if f"#/$defs/{prefix}" in str(result):
        levels = {f"{prefix}{level}": _anything(level, prefix) for level in range(DEPTH + 1)}
        result["$defs"] = {**result.get("$defs", {}), **levels}
    return result


def _by_parts(schema: Any, *, root: bool = False) -> bool:
    """True if each part of a schema can be bounded independently."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return all(map(_by_parts, schema))
    if not isinstance(schema, Mapping):
        return True
    enforced = [key for key in schema if key not in ANNOTATIONS and not str(key).startswith("x-")]
    if "allOf" in schema or ("$id" in schema and not root):
        return False
    if len(enforced) > 1 and any(key in schema for key in CHOOSES):
        return False
    return all(map(_by_parts, _parts(schema)))


def _parts(schema: Schema) -> list[Any]:
    parts: list[Any] = []
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            parts += value.values()
        elif key in WITH_SCHEMAS:
            parts.append(value)
    return parts


def _bounded(schema: Any, prefix: str) -> Any:
    """A schema, or a list of schemas, with bounds. An unrestricted value becomes a reference to a
    definition whose name consists of `prefix` and a level."""
    if schema is True or schema == {}:
        return {"$ref": f"#/$defs/{prefix}{DEPTH}"}
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_bounded(item, prefix) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _bounded_value(key, value, prefix) for key, value in schema.items()}
    if any(key in schema for key in (*CHOOSES, *GIVEN)):
        return result
    return {**result, **_bounds(result, {"$ref": f"#/$defs/{prefix}{DEPTH - 1}"})}


def _bounded_value(key: str, value: Any, prefix: str) -> Any:
    if key in BY_NAME and isinstance(value, Mapping):
        return {name: _bounded(schema, prefix) for name, schema in value.items()}
    return _bounded(value, prefix) if key in WITH_SCHEMAS else value


def _anything(level: int, prefix: str) -> dict[str, Any]:
    """The schema of any value with at most `level` levels of lists and objects."""
    if not level:
        return {"type": list(SCALARS), **_bounds({"type": SCALARS}, {})}
    types = (*SCALARS, "array", "object")
    inner = {"$ref": f"#/$defs/{prefix}{level - 1}"}
    return {"type": list(types), **_bounds({"type": types}, inner)}


def _bounds(schema: Schema, inner: Schema) -> dict[str, Any]:
    """The keywords that bound a schema. `inner` is the schema of unrestricted values in its lists
    and objects."""
    types = schema.get("type", ("string", "number", "array", "object"))
    types = (types,) if isinstance(types, str) else types
    bounds: dict[str, Any] = {}
    if "string" in types:
        bounds |= _string_bounds(schema)
    if "number" in types or "integer" in types:
        bounds |= _number_bounds(schema, integers="number" not in types)
    if "array" in types:
        bounds |= _array_bounds(schema, inner)
    if "object" in types:
        bounds |= _object_bounds(schema, inner)
    return bounds


def _string_bounds(schema: Schema) -> dict[str, Any]:
    if "maxLength" in schema or "pattern" in schema:
        return {}
    return {"maxLength": _at_least(MAX_STRING, schema.get("minLength"))}


def _number_bounds(schema: Schema, *, integers: bool) -> dict[str, Any]:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    if not all(map(_is_number, lows + highs)):
        return {}
    bounds: dict[str, Any] = {}
    if not lows and all(high > -LARGEST for high in highs):
        bounds["minimum"] = -LARGEST
    if not highs and all(low < LARGEST for low in lows):
        bounds["maximum"] = LARGEST
    decimals = _decimals(schema)
    step = 10.0**-decimals
    coarse = all(float(f"{bound:.{decimals}f}") == bound for bound in lows + highs)
    wide = not lows or not highs or min(highs) - max(lows) > 2 * step
    if not integers and "multipleOf" not in schema and coarse and wide:
        bounds["multipleOf"] = step
    return bounds


def _decimals(schema: Schema) -> int:
    """Number of decimals with which no number, as a float, rounds to an exclusive bound."""
    bounds = [schema[key] for key in ("exclusiveMinimum", "exclusiveMaximum") if key in schema]
    for decimals in range(DECIMALS, 0, -1):
        step = 10.0**-decimals
        if all(bound - step < bound < bound + step for bound in bounds):
            return decimals
    return 0


def _array_bounds(schema: Schema, inner: Schema) -> dict[str, Any]:
    bounds: dict[str, Any] = {} if "items" in schema else {"items": inner}
    if "maxItems" in schema:
        return bounds
    first = schema.get("prefixItems", [])
    least = max(schema.get("minItems", 0), len(first)) if isinstance(first, list) else 0
    return {**bounds, "maxItems": _at_least(MAX_ITEMS, least)}


def _object_bounds(schema: Schema, inner: Schema) -> dict[str, Any]:
    named, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", inner)
    if others is False or "patternProperties" in schema or not isinstance(named, Mapping):
        return {}
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return {}
    if named:  # the compiler counts properties only if all named ones are required
        is_open = "additionalProperties" in schema or not set(required) <= set(named)
        return {} if is_open else {"additionalProperties": False}
    bounds: dict[str, Any] = {"maxProperties": _at_least(MAX_ITEMS, len(required))}
    if "maxProperties" in schema:
        bounds = {}
    if all(re.fullmatch(NAME, name) for name in required):
        return {**bounds, "patternProperties": {NAME: others}, "additionalProperties": False}
    return {**bounds, "additionalProperties": others}


def _at_least(bound: int, least: Any) -> int:
    return max(bound, int(least)) if _is_number(least) else bound


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
