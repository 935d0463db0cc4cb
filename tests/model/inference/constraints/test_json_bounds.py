"""Bounds of open schemas: texts end and fit the schema, and the schema's own bounds take
precedence."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.json_bounds import (
    DECIMALS,
    DEPTH,
    LARGEST,
    MAX_ITEMS,
    MAX_NAME,
    MAX_STRING,
    bounded,
)
from tests.model.factories import byte_tokenizer
from tests.model.inference.constraints.test_compiler import takes
from tests.profiles import examples

COMPILER = Compiler(byte_tokenizer())
CHOICE = {"type": "object", "properties": {"a": {"type": "null"}}}


def written(schema: Any, preferred: str, limit: int = 8_000) -> str:
    """The text in which each byte is the first byte of `preferred` that is allowed there. If none
    of them is allowed, the lowest allowed byte is taken."""
    matcher = COMPILER.compile(Source("json_schema", json.dumps(schema))).matcher()
    order = [*preferred.encode(), *range(256)]
    text = bytearray()
    while (allowed := matcher.allowed()).any() and not matcher.complete:
        assert len(text) < limit, f"it runs on: {text[-80:]!r}"
        text.append(next(byte for byte in order if allowed[byte]))
        matcher.advance(text[-1])
    return text.decode(errors="replace")


@pytest.mark.parametrize(
    ("schema", "preferred", "text"),
    [
        ({"type": "integer"}, "9", "9" * 15),
        ({"type": "integer"}, "-9", "-" + "9" * 15),
        ({"type": "integer", "maximum": 5}, "-9", "-" + "9" * 15),
        ({"type": "integer", "minimum": -20}, "9", "9" * 15),
        ({"type": "number"}, "9.", "9" * 15 + "." + "9" * DECIMALS),
        ({"type": "number"}, "-.3", "-3." + "3" * DECIMALS),
        ({"type": "number", "exclusiveMaximum": 10**8}, "9.", "9" * 8 + "." + "9" * 8),
        ({"type": "number", "exclusiveMaximum": 10**15}, "9.", "9" * 15 + ".9"),
        ({"type": "number", "exclusiveMinimum": 1 - 2**53}, "-90.1", None),
        ({"type": "string"}, "a", f'"{"a" * MAX_STRING}"'),
        ({"type": ["string", "null"]}, 'a"', f'"{"a" * MAX_STRING}"'),
        ({"type": "array", "items": {"type": "null"}}, "n,",
         f"[{', '.join(['null'] * MAX_ITEMS)}]"),
        ({"type": "array", "items": {"type": "integer"}}, "7,",
         f"[{', '.join(['7' * 15] * MAX_ITEMS)}]"),
        ({"type": "array"}, "[n]", "[" * DEPTH + "null" + "]" * DEPTH),
        ({}, "[t]", "[" * DEPTH + "true" + "]" * DEPTH),
        ({"type": "object", "maxProperties": 1}, 'nk":', f'{{"{"n" * MAX_NAME}": null}}'),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "n", '{"a": null}'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '1"k', None),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}}, "a", f'"{"a" * MAX_STRING}"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, "9", "9" * 15),
    ],
)  # fmt: skip
def test_bounded_schema_ends_every_text(schema: Any, preferred: str, text: str | None) -> None:
    result = written(schema, preferred)
    if text is not None:
        assert result == text
    jsonschema.validate(json.loads(result), schema)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "maxLength": 400}, "a" * 400),
        ({"type": "string", "minLength": 300}, "a" * 300),
        ({"type": "string", "pattern": "^a+$"}, "a" * 400),
        ({"const": "a" * 400}, "a" * 400),
        ({"enum": ["a" * 400, 10**17]}, 10**17),
        ({"type": "integer", "maximum": 10**17}, 10**17),
        ({"type": "integer", "exclusiveMinimum": 10**15}, 10**17),
        ({"type": "integer", "maximum": -(10**16)}, -(10**17)),
        ({"type": "number", "multipleOf": 1e-10}, 1e-10),
        ({"type": "number", "minimum": 1e-12, "maximum": 1e-11}, 5e-12),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 70}, [None] * 70),
        ({"type": "array", "items": {"type": "null"}, "minItems": 70}, [None] * 70),
        ({"type": "array", "prefixItems": [{"type": "null"}] * 70}, [None] * 70),
        ({"type": "object", "maxProperties": 70}, {f"a{i}": None for i in range(70)}),
        ({"type": "object", "required": ["k" * 70]}, {"k" * 70: None}),
        ({**CHOICE, "additionalProperties": {"type": "null"}}, {"a": None, "b": None}),
        ({**CHOICE, "required": ["a", "b"]}, {"a": None, "b": None}),
        ({**CHOICE, "patternProperties": {"^b": {"type": "null"}}}, {"a": None, "b": None}),
    ],
)  # fmt: skip
def test_schemas_own_bounds_win(schema: Any, value: Any) -> None:
    jsonschema.validate(value, schema)
    text = json.dumps(value)
    if isinstance(value, float):
        text = f"{value:.12f}".rstrip("0")
    assert takes(COMPILER.compile(Source("json_schema", json.dumps(schema))), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string"}, {"maxLength": 500}]},
        {"$ref": "#/$defs/a", "maxLength": 500, "$defs": {"a": {"type": "string"}}},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 500},
        {"properties": {"a": {"allOf": [{"type": "string"}]}}, "type": "object"},
        {"items": {"$id": "http://localhost/a", "type": "string"}},
        {"type": "boolean"},
        {"$defs": "no definitions", "type": "string"},
        False,
    ],
)  # fmt: skip
def test_schema_of_parts_that_interact_stays_unbounded(schema: Any) -> None:
    assert bounded(schema) == schema


def test_names_of_definitions_are_kept() -> None:
    schema = {"$defs": {"anything1": {"type": "null"}}, "items": {"$ref": "#/$defs/anything1"},
              "type": "array", "prefixItems": [{}]}  # fmt: skip
    assert bounded(schema)["$defs"]["anything1"] == {"type": "null"}
    constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    assert takes(constraint, '["b", null]')
    assert not takes(constraint, '["b", "c"]')


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "number", "minimum": 0.25},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "string", "minLength": 2},
        {"type": ["string", "integer"]},
        {"type": "string", "format": "date"},
        {"enum": ["x", 5]},
        {"type": ["string", "boolean"], "maxLength": 3},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(
            lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["b"]},
            inner,
            inner,
        ),
        st.builds(lambda a: {"anyOf": [a, {"type": "null"}]}, inner),
        st.builds(
            lambda a: {"type": "object", "additionalProperties": a, "maxProperties": 2}, inner
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=examples(60, fast=10))
@given(schema=SCHEMAS, preferred=st.permutations('"a7.-,:[]{}tn'))
def test_bounded_text_fits_the_schema_as_sent(schema: Any, preferred: list[str]) -> None:
    assert LARGEST < 2**53
    text = written(schema, "".join(preferred))
    jsonschema.validate(json.loads(text), schema)
