"""Stop strings are found no matter how the text is split, and no part of them is shown."""

import itertools
import sys
from types import FrameType
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.text.growing_text import StopFinder

# With few letters stop strings overlap themselves and each other.
TEXT = st.text("ab€", max_size=30)
STOP = st.text("ab€", min_size=1, max_size=5)


def feed(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """The text shown after each piece, and the stop string that was found, if any."""
    finder, shown = StopFinder(stop), []
    for piece in pieces:
        text, stopped_by = finder.push(piece)
        shown.append(text)
        if stopped_by is not None:
            return shown, stopped_by
    return [*shown, finder.finish()], None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(TEXT, STOP, st.lists(st.integers(0, 30)))
@example("aaab", "aab", [1, 2, 3])
@example("abab€", "ab€", [2, 4])
def test_stop_string_is_found_however_the_text_is_cut(
    text: str, stop: str, places: list[int]
) -> None:
    before, separator, _ = text.partition(stop)
    shown, ended_by = feed([stop], cut(text, places))
    assert "".join(shown) == before
    assert ended_by == (stop if separator else None)


@given(TEXT, st.lists(STOP, max_size=4), st.lists(st.integers(0, 30)))
@example("a", ["ab"], [])  # all of the stop string except its last character
def test_text_that_could_begin_a_stop_string_is_held_back_and_no_more(
    text: str, stops: list[str], places: list[int]
) -> None:
    finder, pushed, shown = StopFinder(stops), "", ""
    for piece in cut(text, places):
        new, stopped_by = finder.push(piece)
        pushed, shown = pushed + piece, shown + new
        if stopped_by is not None:
            assert pushed[len(shown) :].startswith(stopped_by)
            return
        held = pushed.removeprefix(shown)
        assert pushed == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        # A longer end of the text that begins a stop string would be held back.
        assert not any(
            stop.startswith(pushed[start:]) for stop in stops for start in range(len(shown))
        )
    assert shown + finder.finish() == pushed


@given(TEXT, st.lists(STOP, min_size=1, max_size=4))
@example("ab", ["ab", "b€"])
def test_first_complete_stop_string_ends_the_text(text: str, stops: list[str]) -> None:
    shown, stopped_by = feed(stops, list(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (stopped_by, "".join(shown)) == (None, text)
        return
    complete = text[: min(ends)]
    # The longest stop string that is complete at this character begins first.
    candidates = [stop for stop in stops if complete.endswith(stop)]
    longest = max(candidates, key=len)
    assert stopped_by == longest
    assert "".join(shown) == complete.removesuffix(longest)


def test_held_text_is_compared_once_with_all_stop_strings() -> None:
    """Guards against stop strings that kept the event loop busy: each token compared every end of
    the held text with every string."""
    finder = StopFinder([" " * 1023 + "b", *("c" * 1023 + chr(100 + i) for i in range(63))])
    called = 0

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal called
        called += event == "c_call"

    sys.setprofile(count)
    try:
        for _ in range(100):
            finder.push(" " * 32)
    finally:
        sys.setprofile(None)
    assert called < 100 * 200


def test_first_stop_string_within_a_piece_counts() -> None:
    assert StopFinder(["c", "ab"]).push("xabc") == ("x", "ab")
    assert StopFinder(["abc", "ab"]).push("xabc") == ("x", "ab"), "it was complete first"
    assert StopFinder(["ab", "ab"]).push("ab") == ("", "ab")
