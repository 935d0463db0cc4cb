"""Damage to files, of the kinds that disks, copying and people cause: bytes and fields are changed.

`damaged(raw)` draws a file that differs from `raw` in a few places; `edited(document)` draws JSON
that differs from `document` in one place. Both shrink toward the original. The tests decide which
errors are right.
"""

import copy
import json
from typing import Any

from hypothesis import strategies as st

HOSTILE = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 2**31, 2**63, 10**400, 1e308, float("nan"), "", "\ud800", [], {}]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 300), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(-2, 300), max_size=3),
)
"""Hostile values for a field of JSON."""


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with some changed, removed or inserted, or with the end cut off."""
    result = bytearray(raw)
    for _ in range(draw(st.integers(0, 4))):
        # Headers and ends are the most sensitive parts of a format.
        near = st.integers(0, min(len(result), 300)) | st.integers(0, len(result))
        place = draw(near | near.map(lambda at: len(result) - at))
        match draw(st.sampled_from(["change", "cut", "remove", "insert", "repeat"])):
            case "change":
                result[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del result[place:]
            case "remove":
                del result[place : place + draw(st.integers(1, 20))]
            case "insert":
                result[place:place] = draw(st.binary(max_size=20))
            case "repeat":
                result[place:place] = result[place : place + draw(st.integers(1, 200))]
    return bytes(result)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Pairs of a container and a key in it, outermost containers first."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


@st.composite
def edited(draw: st.DrawFn, document: Any) -> Any:
    """Change one field: replace its value, nest its value deeply, leave the field out, or add a
    field with another name."""
    result = copy.deepcopy(document)
    container, key = draw(st.sampled_from(places(result)[:400]))
    match draw(st.sampled_from(["replace", "remove", "add", "nest"])):
        case "replace":
            container[key] = draw(HOSTILE)
        case "remove":
            del container[key]
        case "add" if isinstance(container, dict):
            container[draw(st.text(max_size=8))] = draw(HOSTILE)
        case _:
            for _ in range(draw(st.sampled_from([1, 3, 400]))):
                container[key] = [container[key]]
    return result


def written(document: Any) -> bytes:
    """JSON as Python writes it, with values such as NaN that standard JSON does not have."""
    return json.dumps(document).encode()
