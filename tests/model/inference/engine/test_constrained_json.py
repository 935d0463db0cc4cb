"""JSON under schemas: finished texts fit the schema, and cut ones begin a text that does.

The oracle is `jsonschema`, over schemas of all keywords that are enforced.
"""

import json
from decimal import Decimal
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.constraints.compiler import Source
from logitd.model.inference.constraints.json_schema import NAMED_CONTROLS
from tests.model.inference.engine.constrained import COMPILER, check, written
from tests.profiles import examples

NAMES = ("a", "b", "ab", "name", "é", "a b", 'q"', "\\", "\n", "\x7f", "")
PATTERNS = ("^[a-c]{1,4}$", "^(ab|c)+$", "[0-9]{2}", r'^[^"\\a-z]{2}$', "^é?€?$", r"^\d{1,3}$")
WRITABLE = st.characters(
    exclude_categories=["Cs"],
    exclude_characters={"\x7f", *map(chr, range(32))} - set(NAMED_CONTROLS),
)


def texts() -> st.SearchStrategy[Any]:
    sizes = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda sizes: {"minLength": sizes[0], "maxLength": sum(sizes)}
    )
    patterns = st.sampled_from(PATTERNS).map(lambda pattern: {"pattern": pattern, "maxLength": 9})
    formats = st.sampled_from(["date", "time", "date-time", "ipv4", "uuid"]).map(
        lambda name: {"format": name}
    )
    return (sizes | patterns | formats).map(lambda rest: {"type": "string", **rest})


@st.composite
def figures(draw: st.DrawFn) -> Any:
    """A number type with bounds on both sides, so that texts end soon."""
    whole = draw(st.booleans())
    low = draw(st.integers(-1000, 1000))
    high = low + draw(st.integers(3, 500))
    half = 0 if whole else draw(st.sampled_from([0, 0.5]))
    schema: dict[str, Any] = {"type": "integer" if whole else "number"}
    schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low - half
    schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high + half
    if whole and draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from([2, 3, 5]))
        schema["maximum" if "maximum" in schema else "exclusiveMaximum"] = high + 10
    return schema


values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.sampled_from([0.5, -2.25, 1e10])
    | st.text(WRITABLE, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    ),
    max_leaves=4,
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    schema: dict[str, Any] = {"type": "array", "items": draw(inner)}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    low = draw(st.integers(0, 2))
    return schema | {"minItems": low, "maxItems": low + draw(st.integers(0, 2))}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    schema = {"type": "object", "properties": properties, "required": required}
    if draw(st.booleans()):
        return schema | {"additionalProperties": draw(st.just(False) | inner)}
    by_pattern = {"patternProperties": {"^x[a-c]{0,2}$": draw(inner)}}
    return schema | by_pattern | {"additionalProperties": False}


def all_of_texts(sizes: tuple[int, int]) -> Any:
    low, more = sizes
    parts = [{"type": "string"}, {"minLength": low}, {"maxLength": low + more}]
    return {"allOf": parts}


def schemas() -> st.SearchStrategy[Any]:
    """Schemas of all enforced keywords, small enough that most texts end."""
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["boolean", "null"]}]),
        texts(),
        figures(),
        values.map(lambda value: {"const": value}),
        st.lists(values, min_size=1, max_size=3).map(lambda several: {"enum": several}),
        st.tuples(st.integers(0, 2), st.integers(0, 2)).map(all_of_texts),
        st.just({"$ref": "#/$defs/digit"}),
    )
    nested = st.recursive(
        leaves,
        lambda inner: (
            arrays(inner)
            | objects(inner)
            | st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several})
            | inner.map(lambda one: {"oneOf": [{"const": 0.125}, {"type": "array", "items": one}]})
        ),
        max_leaves=5,
    )
    digit = {"type": "string", "pattern": "^[0-9]$"}
    return nested.map(lambda schema: {**schema, "$defs": {"digit": digit}})


def check_json(schema: Any, seed: int) -> int:
    """Check that finished texts fit the schema and are on one line. Returns their number, of
    three."""
    source = Source("json_schema", json.dumps(schema))
    formats = jsonschema.FormatChecker(["ipv4", "uuid"])  # Python's dates know no year 0
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    finished = 0
    for outcome in written(COMPILER.compile(source), seed):
        text = check(source, outcome)
        if text is not None:
            # Exactly: 1.00000000000000001 is more than 1, and as a float it is not.
            validator.validate(json.loads(text, parse_float=Decimal))
            assert "\n" not in text
            finished += 1
    return finished


EXAMPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "tags": {"type": "array", "items": {"enum": ["x", "é", None]}, "maxItems": 3},
        "size": {"type": "number", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def test_every_text_of_a_bounded_schema_is_finished() -> None:
    """Otherwise the test below might see only cut texts."""
    assert sum(check_json(EXAMPLE, seed) for seed in range(10)) >= 25


@settings(max_examples=examples(400, fast=6))
@given(schemas(), st.integers(0, 2**32))
def test_json_fits_its_schema(schema: Any, seed: int) -> None:
    check_json(schema, seed)
