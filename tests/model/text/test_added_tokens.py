"""Added tokens: for every flag, texts are split as the `tokenizers` library splits them."""

import time
from collections.abc import Mapping, Sequence

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from logitd.model.text.added_tokens import AddedTokens, Cut, Flag

CONTENTS = ["a", "ab", "b ", " ", "  ", "   ", "<x>", "<x> ", "_", "é", "\n", "x>a"]
SPECIAL: list[list[Flag]] = [[], ["lstrip"], ["rstrip"], ["lstrip", "rstrip"], ["single_word"]]
TOKENS = st.dictionaries(
    st.sampled_from(CONTENTS),
    st.tuples(st.booleans(), st.booleans(), st.sampled_from(SPECIAL)),
    min_size=1,
)
"""Added tokens by text. Each has three values: special, normalized, and a list of other flags."""
TEXTS = st.lists(st.sampled_from([*CONTENTS, "z", "\u0301", "\u00a0", "\x1f", "Ⅷ"])).map("".join)
UNKNOWN = 0


def theirs(tokens: Mapping[str, tuple[bool, bool, Sequence[str]]], text: str) -> list[int | None]:
    """The ids that the `tokenizers` library assigns to the text; None for text outside added
    tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": UNKNOWN}, unk_token="?"))
    for content, (special, normalized, flags) in tokens.items():
        token = tokenizers.AddedToken(
            content, special=special, normalized=normalized, **dict.fromkeys(flags, True)
        )
        (library.add_special_tokens if special else library.add_tokens)([token])
    try:
        ids = library.encode(text).ids
    except BaseException as error:  # a panic if stripped white space is a token too
        assume("bad split" not in str(error))
        raise
    return [None if i == UNKNOWN else i for i in ids]


@given(TOKENS, TEXTS)
def test_cuts_equal_the_library(
    tokens: dict[str, tuple[bool, bool, list[Flag]]], text: str
) -> None:
    ids = {content: place for place, content in enumerate(tokens, start=1)}
    special = {
        content: ids[content] for content, (is_special, _, _) in tokens.items() if is_special
    }
    added = AddedTokens(
        special,
        {content: ids[content] for content in ids if content not in special},
        {
            content: [*flags, "normalized" if normalized else "unnormalized"]
            for content, (_, normalized, flags) in tokens.items()
        },
    )
    assert [cut.token_id for cut in added.split(text, text)] == theirs(tokens, text)
    ordinary = {content: token for content, token in tokens.items() if not token[0]}
    without = {place: ids[content] for place, content in enumerate(ordinary, start=1)}
    expected = [without.get(place) for place in theirs(ordinary, text)]  # type: ignore[arg-type]
    assert [cut.token_id for cut in added.split(text)] == expected


def test_special_tokens_count_where_they_are_written() -> None:
    added = AddedTokens({"<x>": 7}, {"  ": 8}, {})
    assert list(added.split("<x>  <x>", "___  <x>")) == [
        Cut(0, 3, None), Cut(3, 5, 8), Cut(5, 8, 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ([f"<{number}>" for number in range(100_000)], "<1>" * 20_000 + "<" * 20_000),
        ([" " * length for length in range(1, 100)], " " * 100_000),
        ([" "], " " * 50_000),
        ([f"<{chr(0x4E00 + number)}>" for number in range(200)], "<一>" * 20_000 + "<" * 20_000),
    ],
    ids=["many", "runs", "stripping", "branches"],
)
def test_split_takes_linear_time(contents: list[str], text: str) -> None:
    began = time.process_time()
    flags = {content: ["lstrip", "rstrip"] for content in contents}
    added = AddedTokens({}, {content: place for place, content in enumerate(contents)}, flags)
    assert any(cut.token_id is not None for cut in added.split(text))
    assert time.process_time() - began < 10


def test_characters_that_only_begin_tokens_are_passed_over() -> None:
    """Comparing with the tokens at each of them would take seconds."""
    added = AddedTokens({f"<|reserved_{number}|>": number for number in range(100)}, {}, {})
    text = "<" * 1_000_000 + "<|reserved_7|>"
    began = time.process_time()
    assert [cut.token_id for cut in added.split(text, text)] == [None, 7]
    assert time.process_time() - began < 0.5


def test_text_that_nobody_wrote_is_not_searched_for_special_tokens() -> None:
    """A search that stopped at each "<" would take seconds."""
    added = AddedTokens({"<x>": 7}, {}, {})
    text = "<x>" + "<" * 1_000_000
    began = time.process_time()
    assert list(added.split(text, "<x>" + "_" * 1_000_000)) == [
        Cut(0, 3, 7), Cut(3, len(text), None),
    ]  # fmt: skip
    assert list(added.split(text)) == [Cut(0, len(text), None)]
    assert time.process_time() - began < 0.5
