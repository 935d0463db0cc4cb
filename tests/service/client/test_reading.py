"""Reading JSON into dataclasses: an error names the path of the member that is missing or wrong."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import Bytes, Generation, Info, Probs, Scores

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@dataclass(frozen=True)
class Inner:
    id: int
    bytes: Bytes = b""


@dataclass(frozen=True)
class Outer:
    text: str
    number: float
    flag: bool
    either: str | int | None
    inners: tuple[Inner, ...] | None
    table: dict[str, int]
    anything: Any


GOOD: dict[str, Any] = {
    "text": "a",
    "number": 1.5,
    "flag": True,
    "either": "x",
    "inners": [{"id": 1, "bytes": [0, 255]}, {"id": 2}],
    "table": {"a": 1},
    "anything": {"b": [None]},
}


def test_members_of_all_kinds_are_read() -> None:
    assert read(Outer, GOOD) == Outer(
        "a", 1.5, True, "x", (Inner(1, b"\0\xff"), Inner(2)), {"a": 1}, {"b": [None]}
    )


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [("number", 3, 3.0), ("either", None, None), ("either", 7, 7), ("inners", None, None),
     ("inners", [], ()), ("anything", None, None)],
)  # fmt: skip
def test_members_may_have_other_forms(name: str, value: Any, found: Any) -> None:
    outer = read(Outer, {**GOOD, name: value})
    assert getattr(outer, name) == found
    assert type(getattr(outer, name)) is type(found)


def test_unknown_members_are_ignored() -> None:
    assert read(Outer, {**GOOD, "new": 1, "inners": [{"id": 1, "newer": {}}]}).inners == (Inner(1),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 5}, "text is an integer; it should be a text"),
        ({"number": "5"}, "number is a text; it should be a number"),
        ({"number": 10**400}, "number is an integer; it should be a number"),
        ({"number": True}, "number is true or false; it should be a number"),
        ({"flag": 1}, "flag is an integer; it should be true or false"),
        ({"either": 1.5}, "either is a number; it should be an integer"),
        ({"inners": {}}, "inners is an object; it should be a list"),
        ({"inners": [{"id": 1}, {"id": True}]}, "inners.1.id is true or false; it should be an "
         "integer"),
        ({"inners": [{"bytes": []}]}, "inners.0.id is missing"),
        ({"inners": [{"id": 1, "bytes": [256]}]}, "inners.0.bytes is a list; it should be a list "
         "of bytes"),
        ({"inners": [5]}, "inners.0 is an integer; it should be an object"),
        ({"table": {"a": None}}, "table.a is null; it should be an integer"),
        ({"table": []}, "table is a list; it should be an object"),
    ],
)  # fmt: skip
def test_wrong_members_are_named_with_their_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongShape) as caught:
        read(Outer, GOOD | changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", GOOD)
def test_missing_members_are_named(name: str) -> None:
    with pytest.raises(WrongShape, match=f"^{name} is missing$"):
        read(Outer, {k: v for k, v in GOOD.items() if k != name})


@pytest.mark.parametrize("value", [None, 1, "a", [GOOD], True, 1.5])
def test_replies_are_objects(value: Any) -> None:
    with pytest.raises(WrongShape, match=r"^the reply is .*; it should be an object$"):
        read(Outer, value)


@given(JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    for form in (Generation, Probs, Scores, Info, Outer):
        with suppress(WrongShape):
            read(form, value)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_any_member_is_read_or_refused(name: str, value: Any) -> None:
    try:
        outer = read(Outer, {**GOOD, name: value})
    except WrongShape:
        return
    json.dumps(asdict(outer), default=list)
