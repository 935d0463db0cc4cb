"""Every keyword of JSON Schema is enforced, is an annotation, or is refused; none is ignored."""

import datetime
import json
import re
import time
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.json_schema import (
    ANNOTATIONS,
    BOUNDS,
    ENFORCED,
    FORMATS,
    NAMED_CONTROLS,
    check_combinations,
    enforceable,
)
from logitd.model.inference.errors import ConstraintError
from tests.model.factories import byte_tokenizer
from tests.model.inference.constraints.test_compiler import END, takes, walk
from tests.profiles import examples

COMPILER = Compiler(byte_tokenizer())

# For each keyword: a schema, a value that it allows, and one that only this keyword forbids.
KEYWORDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "type": ({"type": "null"}, None, 1),
    "enum": ({"enum": [1, "a"]}, "a", "b"),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "anyOf": ({"anyOf": [{"type": "null"}, {"const": 1}]}, 1, 2),
    "allOf": ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "a", "ab"),
    "oneOf": ({"oneOf": [{"const": "a"}, {"type": "null"}]}, None, "b"),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, None, 1),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "null"}}},
        {"a": None},
        {"a": 1},
    ),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, {}, {"a": 1}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
        {"ab": None},
        {"ab": 1},
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "items": ({"type": "array", "items": {"type": "null"}}, [None], [1]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "null"}]}, [None, 1], [1]),
    "minItems": ({"type": "array", "minItems": 1}, [1], []),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "minLength": ({"type": "string", "minLength": 1}, "é", ""),
    "maxLength": ({"type": "string", "maxLength": 1}, "é", "éa"),
    "pattern": ({"type": "string", "pattern": "b"}, "abc", "ac"),
    "format": ({"type": "string", "format": "date"}, "2024-02-28", "2024-02-31"),
    "minimum": ({"type": "integer", "minimum": 5}, 5, 4),
    "maximum": ({"type": "number", "maximum": 5}, 5, 5.5),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, 6, 5),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 5}, 4.5, 5),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 21, 22),
}


def test_every_keyword_that_is_enforced_is_shown() -> None:
    assert KEYWORDS.keys() == ENFORCED


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keyword_is_enforced(keyword: str) -> None:
    schema, good, bad = KEYWORDS[keyword]
    assert keyword in schema
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)
    constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    assert takes(constraint, json.dumps(good, ensure_ascii=False))
    assert not takes(constraint, json.dumps(bad, ensure_ascii=False))


@pytest.mark.parametrize("keyword", [*sorted(ANNOTATIONS), "x-order"])
def test_annotation_changes_nothing(keyword: str) -> None:
    value: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "http://localhost/a",
        "$defs": {"a": {"type": "null"}},
        "definitions": {"a": {"type": "null"}},
        "examples": [1],
        "discriminator": {"propertyName": "a"},
        "deprecated": True,
        "readOnly": True,
        "writeOnly": True,
    }
    schema = {"type": "integer", "maximum": 5, keyword: value.get(keyword, "text")}
    constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    assert takes(constraint, "5")
    assert not takes(constraint, "6")
    assert not takes(constraint, "null")


@pytest.mark.parametrize(
    "keyword",
    [
        *("tpye", "nullable", "not", "if", "then", "else", "contains", "minContains"),
        *("uniqueItems", "additionalItems", "unevaluatedItems", "unevaluatedProperties"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "contentSchema"),
    ],
)
def test_unknown_keyword_is_refused_at_any_depth(keyword: str) -> None:
    inner = {"type": "null", keyword: {}}
    for schema in (
        inner,
        {"properties": {"a": inner}},
        {"patternProperties": {"a": inner}},
        {"additionalProperties": inner},
        {"items": inner},
        {"prefixItems": [{}, inner]},
        {"anyOf": [{"allOf": [inner]}]},
        {"$defs": {"a": inner}},
        {"definitions": {"a": {"items": inner}}},
    ):
        with pytest.raises(ConstraintError, match=keyword[1:]):
            enforceable(schema)


def test_names_and_values_are_no_keywords() -> None:
    enforceable(
        {
            "properties": {"not": {"const": {"if": 1}}, "minProperties": {"enum": [{"then": 1}]}},
            "$defs": {"else": {"default": {"contains": 1}, "examples": [{"not": 1}]}},
            "x-anything": {"not": 1},
            "type": "object",
        }
    )


@pytest.mark.parametrize(
    ("schema", "promised"),
    [
        ({"minProperties": 1}, True),
        ({"minProperties": 2}, False),
        ({"minProperties": 2.0}, False),
        ({"minProperties": 2, "required": ["a"]}, False),
        ({"minProperties": 2, "required": ["a", "b"]}, True),
        ({"items": {"minProperties": 3, "required": ["a", "b"]}}, False),
    ],
)
def test_unrequired_minimum_of_properties_is_refused(schema: Any, promised: bool) -> None:
    if promised:
        enforceable(schema)
    else:
        with pytest.raises(ConstraintError, match="minProperties"):
            enforceable(schema)


PATTERNS = (
    *("^[^a]$", r"^[^\\]$", '^[^"]$', r'^[^"\\]$', "^[^-a]$", "^[^]a]$", "^[^]-a]$", "^[^a-c]$"),
    *("^.$", r"^\S$", r"^[^\s]$", r"^[^\n]$", r'^[\n"]$', r"^[a\\]$", "^[]a]$", "^[a^]$", "^[-a]$"),
    *("a--b", r"^\[\^a$", r'^(?:[^"]|b)$', r"^[\t-~]$", r"^\x41$", r"^[\u0041-\u0043]$"),
)
"""Patterns, most of them with a character class that may match a quote, a backslash or a control
character."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_covers_every_character(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    writable = [*NAMED_CONTROLS, *map(chr, range(0x20, 0x7F)), "é", "€", "a--b", "[^a"]
    for text in writable:
        matches = re.search(pattern, text) is not None
        assert takes(constraint, json.dumps(text, ensure_ascii=False)) == matches, text
    for code in range(0x20):
        if chr(code) not in NAMED_CONTROLS:
            assert not takes(constraint, f'"\\u{code:04x}"')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": "a\x1fb"}, "U+001F"),
        ({"enum": [1, {"a": ["\0"]}]}, "U+0000"),
        ({"items": {"const": "\x7f"}}, "U+007F"),
        *(
            ({"type": "string", "pattern": pattern}, named)
            for pattern, named in (
                ("a\x1f", "U+001F"), (r"[\x00-\x1f]", "U+0000"), (r"\u001f", "U+001F"),
                (r"\x{1F}", "U+001F"), (r"\v", r"\v"), (r"\P{L}", r"\P{L}"),
                (r"\p{Cc}", r"\p{Cc}"), ("[[:cntrl:]]", "[:"), (r"[\W--a]", "--"),
                ("[a[^b]]", "[^"), ("(?x)a # b\nc", "(?x"), ("(?ix: a)", "(?ix"),
            )
        ),
        ({"items": {"patternProperties": {r"\v": {}}}}, r"\v"),
    ],
)  # fmt: skip
def test_schema_refuses_control_characters_without_an_escape(schema: Any, named: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(named)):
        enforceable(schema)


BIG = 2**53
NUMBERS = (
    st.integers(-20, 20)
    | st.integers(-BIG - 3, 3 - BIG)
    | st.integers(BIG - 3, BIG + 3)
    | st.integers(-(2**65), 2**65)
    | st.builds(lambda digits, scale: digits / 10**scale, st.integers(-(10**6), 10**6),
                st.integers(0, 9))
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
NUMERIC = st.sampled_from(["integer", "number"])
RESTRICTED = (
    st.fixed_dictionaries({"const": NUMBERS | st.lists(NUMBERS, max_size=2)})
    | st.fixed_dictionaries({"enum": st.lists(NUMBERS, min_size=1, max_size=2)})
    | st.fixed_dictionaries(
        {"type": NUMERIC},
        optional=dict.fromkeys((*BOUNDS, "multipleOf"), NUMBERS),
    )
    | st.builds(
        lambda of, low, width, high: {"type": of, low: width[0], high: sum(width)},
        NUMERIC,
        st.sampled_from(["minimum", "exclusiveMinimum"]),
        st.tuples(NUMBERS, st.integers(0, 4)),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    )
)
SCHEMAS = RESTRICTED | st.builds(lambda *parts: {"allOf": parts}, RESTRICTED, RESTRICTED)


def decimal_of(number: str) -> Decimal:
    """Return ``number``, with an exponent beyond ±1,000 as ±1,000.

    Decimal refuses longer exponents; no bound of ``NUMBERS`` lies beyond 1e±400.
    """
    mantissa, mark, exponent = number.lower().partition("e")
    if not mark:
        return Decimal(number)
    return Decimal(f"{mantissa}e{max(-1000, min(int(exponent), 1000))}")


@settings(max_examples=examples(2000, fast=100))
@given(schema=SCHEMAS, seed=st.integers(0, 9))
@example(schema={"allOf": [{"type": "number"}, {"type": "number"}]}, seed=0)
def test_text_fits_the_numbers_of_its_schema_exactly(schema: Any, seed: int) -> None:
    """The schema and the text are compared as decimals."""
    source = json.dumps(schema)
    try:
        constraint = COMPILER.compile(Source("json_schema", source))
        text = bytes(id for id in walk(constraint, seed, 100) if id < END).decode()
    except ConstraintError:
        return
    if not takes(constraint, text):
        return  # a number without bounds may be longer
    validator = jsonschema.Draft202012Validator(json.loads(source, parse_float=decimal_of))
    with localcontext(prec=3000):
        assert validator.is_valid(json.loads(text, parse_float=decimal_of)), text


@settings(max_examples=examples(1000, fast=100))
@given(
    low=st.sampled_from([-10, -2, -1.5, -1, -0.5, 0, 0.25, 1, 1.75, 9]),
    width=st.sampled_from([0.25, 0.5, 0.75, 1, 1.25, 10]),
    names=st.tuples(
        st.sampled_from(["minimum", "exclusiveMinimum"]),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    ),
    combined=st.booleans(),
)
def test_bounds_of_a_range_belong_to_it_unless_exclusive(
    low: float, width: float, names: tuple[str, str], combined: bool
) -> None:
    """llguidance 1.9.1 allows the exclusive bound 0 of a range to 0.5."""
    bounds = dict(zip(names, (low, low + width), strict=True))
    parts = [{"type": "number"}, *({name: bound} for name, bound in bounds.items())]
    schema = {"allOf": parts} if combined else {"type": "number", **bounds}
    try:
        constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    except ConstraintError:
        assert width < 1
        return
    for name, bound in bounds.items():
        text = json.dumps(bound).removesuffix(".0")
        assert takes(constraint, text) is not name.startswith("exclusive")


@settings(max_examples=examples(1000, fast=60))
@given(
    step=st.sampled_from(["0.1", "0.01", "0.5", "0.25", "0.125", "0.15", "0.3", "1.5", "2", "7"]),
    low=st.decimals(-20, 20, places=2) | st.decimals(-2, 0, places=2),
    width=st.decimals(0, 2, places=2),
    names=st.tuples(
        st.sampled_from(["minimum", "exclusiveMinimum"]),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    ),
    of=NUMERIC,
)
@example(step="0.1", low=Decimal("0.01"), width=Decimal("0.56"), names=BOUNDS[:2], of="number")
@example(step="0.1", low=Decimal("1.1"), width=Decimal("0.1"), names=BOUNDS[:2], of="number")
@example(step="0.25", low=Decimal("27.7"), width=Decimal(5), names=BOUNDS[:2], of="number")
@example(step="0.25", low=Decimal(-1), width=Decimal(2), names=BOUNDS[:2], of="number")
@example(step="0.5", low=Decimal(0), width=Decimal("0.5"), names=BOUNDS[2:], of="integer")
def test_multiples_of_a_range_are_exactly_those_between_its_bounds(
    step: str, low: Decimal, width: Decimal, names: tuple[str, str], of: str
) -> None:
    """llguidance 1.9.1 misses 0.5 among the multiples of 0.1 up to 0.57, and -0.5 among those of
    0.25 from -1 to 1."""
    high, multiple = low + width, Decimal(step)
    schema = {names[0]: float(low), names[1]: float(high), "multipleOf": float(step)}
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))
    factors = range(int(low / multiple) - 1, int(high / multiple) + 2)
    near = [multiple * factor for factor in factors]
    whole = [number for number in near if of == "number" or number % 1 == 0]
    valid = [number for number in whole if validator.is_valid(number)]
    try:
        constraint = COMPILER.compile(Source("json_schema", json.dumps({"type": of, **schema})))
    except ConstraintError:
        assert not valid
        return
    for number in near:
        spellings = {f"{number:.{places}f}" for places in range(4)}
        taken = any(takes(constraint, one) for one in spellings if Decimal(one) == number)
        assert taken == (number in valid)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 0.25},
        {"type": ["number", "null"], "multipleOf": 0.25, "minimum": -3},
        {"allOf": [{"type": "number", "minimum": -3}, {"multipleOf": 0.25}]},
        {"type": "array", "items": {"$ref": "#/$defs/x"},
         "$defs": {"x": {"title": "x", "type": "number", "multipleOf": 0.25}}},
    ],
)  # fmt: skip
def test_multiples_on_both_sides_of_zero_are_taken(schema: dict[str, Any]) -> None:
    constraint = COMPILER.compile(Source("json_schema", json.dumps(schema)))
    form = "[{}]" if schema.get("type") == "array" else "{}"
    for number in ("-2.00", "-0.75", "-0.50", "-0.25", "0.00", "0.50", "2.00"):
        assert takes(constraint, form.format(number))
    assert not takes(constraint, form.format("-0.30"))
    if schema.get("type") in (None, ["number", "null"]) and "allOf" not in schema:
        assert takes(constraint, "null")


def test_range_of_one_number_has_that_number() -> None:
    schema = {"type": "number", "minimum": 0.5, "maximum": 0.5}
    assert takes(COMPILER.compile(Source("json_schema", json.dumps(schema))), "0.5")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(1000, fast=100))
@given(
    date=st.tuples(
        st.sampled_from([0, 1, 4, 100, 400, 1900, 2000, 2023, 2024]) | st.integers(0, 9999),
        st.integers(0, 13),
        st.integers(0, 32),
    ),
    time=st.tuples(st.integers(0, 24), st.integers(0, 60), st.integers(0, 61)),
    ending=st.sampled_from(["Z", "+23:59", "-00:00", ".5Z", ".123456Z", "+24:00", "+01:60", ".Z"]),
)
@example(date=(1900, 2, 29), time=(10, 0, 60), ending="Z")
def test_dates_and_times_are_those_that_python_reads(
    name: str, date: tuple[int, int, int], time: tuple[int, int, int], ending: str
) -> None:
    parts = {"date": "{:04}-{:02}-{:02}".format(*date),
             "time": "{:02}:{:02}:{:02}".format(*time) + ending}  # fmt: skip
    text = "T".join(parts[part] for part in name.split("-"))
    adapter: TypeAdapter[Any] = TypeAdapter(
        {"date": datetime.date, "time": datetime.time, "date-time": datetime.datetime}[name]
    )
    try:
        adapter.validate_json(json.dumps(text), strict=True)
        valid = True
    except ValidationError:
        valid = False
    constraint = COMPILER.compile(
        Source("json_schema", json.dumps({"type": "string", "format": name}))
    )
    assert takes(constraint, json.dumps(text)) == valid


def test_pattern_next_to_a_format_with_a_pattern_is_refused() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024"}
    with pytest.raises(ConstraintError, match="pattern next to the format 'date'"):
        enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (
            {"allOf": [{"type": "number", "maximum": 0.57}, {"multipleOf": 0.1}]},
            "maximum is 0.57 and multipleOf is 0.1",
        ),
        ({"const": BIG + 1}, f"const is {BIG + 1}"),
        ({"const": 2**63}, f"const is {2**63}"),
        ({"const": {"a": [1234567890123456789]}}, "const is 1234567890123456789"),
        ({"enum": [1, -BIG - 1]}, f"enum is {-BIG - 1}"),
        ({"const": 123456789.12345679}, "const is 123456789.12345679"),
        ({"const": 1e-30}, "const is 1e-30"),
        ({"const": float("inf")}, "const is inf"),
        ({"type": "integer", "minimum": BIG + 1}, f"minimum is {BIG + 1}"),
        ({"const": 4.399927743932283e16}, "const is 4.399927743932283e+16"),
        ({"type": "number", "minimum": 2**60}, f"minimum is {2**60}"),
        ({"type": "integer", "maximum": 2**63 - 1}, f"maximum is {2**63 - 1}"),
        ({"type": "integer", "exclusiveMinimum": -BIG}, f"exclusiveMinimum is {-BIG}"),
        ({"type": "integer", "exclusiveMaximum": BIG}, f"exclusiveMaximum is {BIG}"),
        ({"type": "number", "multipleOf": 0.07}, "multipleOf is 0.07"),
        ({"type": "number", "multipleOf": 0.12499999999999999}, "multipleOf is 0.1249999"),
        ({"type": "integer", "multipleOf": 2**32}, f"multipleOf is {2**32}"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf is 0"),
        (
            {"allOf": [{"type": "integer", "multipleOf": step} for step in (2**16, 3 * 65537)]},
            "multipleOf is 65536, 196611",
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            "exclusiveMinimum is 0 and maximum is 0.5, but the compiler would allow 0: use minimum",
        ),
        (
            {"allOf": [{"minimum": -1.5}, {"type": "number", "exclusiveMaximum": -1}]},
            "exclusiveMaximum is -1 and minimum is -1.5, but the compiler would allow -1: use max",
        ),
    ],
)
def test_number_that_the_compiler_would_change_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(named)):
        COMPILER.compile(Source("json_schema", json.dumps(schema)))


def test_many_combined_parts_are_checked_in_linear_time() -> None:
    """Each part was compared with each other one, for minutes of pure Python."""
    parts = [{"minimum": n + 0.5, "exclusiveMaximum": n + 7} for n in range(5000)]
    schema = {"allOf": [{"type": "integer"}], "$defs": {"x": {"anyOf": [*parts, *[{}] * 5000]}}}
    began = time.process_time()
    check_combinations(enforceable(schema))
    assert time.process_time() - began < 5  # 0.3 s; 10 minutes if pairs are compared


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": BIG}, str(BIG)),
        ({"type": "number", "maximum": 1e18}, str(10**18)),
        ({"const": [0.1 + 0.2, 5.0, -1e-7]}, "[0.30000000000000004, 5, -0.0000001]"),
        ({"enum": [2.718281828459045]}, "2.718281828459045"),
        ({"type": "integer", "minimum": 1 - BIG, "exclusiveMaximum": 2 - BIG}, str(1 - BIG)),
        ({"type": "number", "multipleOf": 0.29, "minimum": 1}, "1.16"),
        ({"allOf": [{"type": "number", "multipleOf": step} for step in (0.2, 0.3)]}, "0.6"),
        ({"default": BIG + 1, "examples": [1e-30], "type": "null"}, "null"),
    ],
)
def test_number_that_stays_is_accepted(schema: Any, text: str) -> None:
    assert takes(COMPILER.compile(Source("json_schema", json.dumps(schema))), text)


def test_enforceable_schema_stays_as_it_is() -> None:
    schema = {
        "properties": {"\x01": {"pattern": r"^\p{L}\d[a-z\]]+$"}, "b": {"const": "\n\t"}},
        "description": "\x01",
    }
    assert enforceable(schema) == schema


def test_layout_is_not_the_clients() -> None:
    with pytest.raises(ConstraintError, match="x-guidance"):
        enforceable({"type": "object", "x-guidance": {"lenient": True}})
