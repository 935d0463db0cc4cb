"""Message text: its methods return what the methods of `str` return for the plain text, but plain
strings made from it contain surrogates."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.text.message_text import SURROGATES, Hidden, MessageText

SPECIALS = ("<|end|>", "</a>", "é\n")
LETTERS = "<|/>endaENDA é\nxßX"
TEXT = st.text(st.sampled_from(LETTERS), max_size=8)
PART = st.text(st.sampled_from(LETTERS), min_size=1, max_size=2)

METHODS: dict[str, Callable[[str, str], Any]] = {
    "==": lambda text, part: text == part,
    "== from the other side": lambda text, part: part == text,
    "== to itself": lambda text, part: text == text[:],
    "!=": lambda text, part: text != part,
    "in": lambda text, part: part in text,
    "in a list": lambda text, part: text in ["x", part],
    "in a dictionary": lambda text, part: {part: 1}.get(text),
    "to nothing": lambda text, part: (text.__eq__(5), bool(text), len(text), text.isalpha()),
    "an index": lambda text, part: text[0] if text else "",
    "a slice": lambda text, part: (text[1:], text[:-1], text[::-1], text[1:3] == part),
    "iteration": lambda text, part: [item == part for item in text],
    "startswith": lambda text, part: (text.startswith(part), text.startswith(("x", part), 1)),
    "endswith": lambda text, part: (text.endswith(part), text.endswith(("x", part))),
    "find": lambda text, part: (text.find(part), text.rfind(part), text.count(part)),
    "index": lambda text, part: text.index(part) if part in text else text.rindex(text),
    "split": lambda text, part: (text.split(part), text.split(), text.split(sep=part, maxsplit=1)),
    "rsplit": lambda text, part: (text.rsplit(part, 1), text.splitlines(), text.isspace()),
    "partition": lambda text, part: (text.partition(part), text.rpartition(part)),
    "strip": lambda text, part: (text.strip(), text.strip(part)),
    "lstrip": lambda text, part: (text.lstrip(part), text.rstrip(part)),
    "removeprefix": lambda text, part: (text.removeprefix(part), text.removesuffix(part)),
    "replace": lambda text, part: (text.replace(part, "x"), text.replace(part, "x", 1)),
    "upper": lambda text, part: (text.upper(), text.lower(), text.title()),
    "capitalize": lambda text, part: (text.capitalize(), text.casefold(), text.swapcase()),
    "one after the other": lambda text, part: text.split(part)[-1].strip().upper()[:2] == "EN",
    "order": lambda text, part: (text < part, part < text, text >= part, text <= "a"),
    "center": lambda text, part: (text.center(9), text.ljust(9), text.rjust(9), text.zfill(9)),
    "translate": lambda text, part: (text.translate({60: "|", 97: "x"}), text.expandtabs(2)),
    "kinds": lambda text, part: (
        *(text.isalnum(), text.isascii(), text.isdecimal(), text.isdigit(), text.islower()),
        *(text.isnumeric(), text.isprintable(), text.istitle(), text.isupper()),
    ),
    "format": lambda text, part: ("%s" + text) % part == part + text and (text + "%s") % "x",
    "repr": lambda text, part: repr([text]),
}


def hidden(*texts: str) -> Hidden:
    return Hidden.of(SPECIALS, texts)


def shown(value: Any, show: Hidden) -> Any:
    if isinstance(value, str):
        return value.translate(show.show)
    if isinstance(value, (list, tuple)):
        return type(value)(shown(item, show) for item in value)
    return value


@pytest.mark.parametrize("name", METHODS)
@given(text=TEXT, part=PART)
def test_message_text_answers_as_its_text(name: str, text: str, part: str) -> None:
    table = hidden(text)
    answer = METHODS[name](MessageText(text, table), part)
    assert shown(answer, table) == METHODS[name](text, part)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [s for item in value for s in strings(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", METHODS)
@given(text=TEXT, part=PART)
def test_message_text_shows_no_dangerous_character(name: str, text: str, part: str) -> None:
    """Joining texts and changing their case keep special characters hidden."""
    dangerous = set("".join(SPECIALS))
    for item in strings(METHODS[name](MessageText(text, hidden(text)), part)):
        raw = "".join([item])
        assert type(raw) is str
        for plain in (raw, raw.upper(), raw.lower(), raw.title(), raw.casefold()):
            assert not dangerous & set(plain)


def test_placeholders_are_surrogates() -> None:
    table = hidden("abc")
    assert set(table.hide) >= {ord(c) for name in SPECIALS for c in name}
    assert all(code in SURROGATES for code in table.hide.values())
    assert {table.show[code] for code in table.hide.values()} == set(table.hide)


@pytest.mark.parametrize(
    ("special", "text", "hidden_characters"),
    [("S", "x", "Ss"), ("S", "ß", "Ssß"), ("k", "\u212a", "kK\u212a"), ("<", "abc", "<"),
     ("", "abc", "")],
)  # fmt: skip
def test_message_text_hides_characters_that_case_changes_make_special(
    special: str, text: str, hidden_characters: str
) -> None:
    table = Hidden.of([special], [text])
    assert {chr(code) for code in table.hide} == set(hidden_characters)
