"""The structure of JSON, counted without a parser and compared with a parser's tree."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitd.service.http import structure
from logitd.service.http.structure import Structure, count_structure, repeated_key
from tests.profiles import examples

TEXTS = st.text(st.sampled_from('ab"\\,:[]{}\n é'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> Structure:
    """The structure of a value, counted by visiting all of its parts."""
    match value:
        case list():
            inner, keys = [counted(item) for item in value], 0
        case dict():
            inner, keys = [counted(item) for item in value.values()], len(value)
        case _:
            return Structure(0, 0, 0)
    return Structure(
        commas=max(0, len(inner) - 1) + sum(part.commas for part in inner),
        containers=1 + sum(part.containers for part in inner),
        keys=keys + sum(part.keys for part in inner),
    )


@given(VALUES, st.booleans(), st.integers(1, 9))
@example(["\\"], True, 2)  # a block ends between a backslash and the escaped character
@example(["\\\\", '\\"', "["], True, 3)
def test_structure_is_that_of_the_parsed_value(value: Any, ascii_only: bool, block: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "BLOCK", block)
        assert count_structure(text) == counted(value)
    assert count_structure(text) == counted(value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "b": {"a": [{"a": 1}, {"a": 2}]}}', None),
        ('{"a": "a", "b": ["a", "b", "{\\"c\\": 1, \\"c\\": 2}"]}', None),
        ('{"a": {"b": 1, "c": [0], "b" : 2}}', "b"),
        ('{"x": {"a": 1}, "\\u0078": 2}', "x"),
        ('{"\\\\": 1, "\\"": 2, "\\\\" : 3}', "\\"),
        ("[1, 2]", None),
    ],
)
def test_repeated_key(text: str, key: str | None) -> None:
    json.loads(text)
    assert repeated_key(text.encode()) == key


@given(VALUES)
@settings(max_examples=examples(100))
def test_valid_values_repeat_no_key(value: Any) -> None:
    assert repeated_key(json.dumps(value).encode()) is None


def test_empty_text_has_no_structure() -> None:
    assert count_structure(b"") == Structure(0, 0, 0)


def test_repeated_key_takes_no_memory_for_escapes() -> None:
    """A regular expression that could backtrack once took 50 bytes for each escape."""
    body = b'{"prompt": "' + b"\\n" * 100_000 + b'"}'
    tracemalloc.start()
    try:
        assert repeated_key(body) is None
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()
