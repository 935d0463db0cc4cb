"""Words as tokens: decoding, and ids that equal a dictionary's ids for the words that `re.findall`
or `str.split` returns."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.vocabulary.choose import choose_vocabulary
from logitd.model.text.tokenizer import TokenizerError

PLAIN = ["the", "cat", "sat", "on", "a", "I", "mat", "café", "42"]
MARKED = [*PLAIN, ".", ",", "!", "'"]
QUOTED = ["SELECT", "'gold'", ">=", "FROM", "a", "<s>", "x-y"]
BOOK = ["Hello", "--", "self-made", ",", ".", "_", "'", "s", "<|endoftext|>", "<|unk|>"]
BOOK_CUT = r"([,.:;?_!\"()']|--|\s)"


def of(words: list[str], pattern: str = "", **more: Any) -> ForeignTokenizer:
    contents = {"itos": words, "pattern": pattern}
    return choose_vocabulary(
        None, contents=contents, folder=Path("nowhere"), facts={}, rows=len(words), **more
    )


def spaced(words: list[str]) -> st.SearchStrategy[str]:
    """Words with any white space between, before and after them."""
    white = st.sampled_from([" ", "  ", "\n", "\t ", " \n\n"])
    ordinary = st.sampled_from([word for word in words if not word.startswith("<")])
    pairs = st.lists(st.tuples(ordinary, white))
    return st.builds(
        lambda first, parts: first + "".join(map("".join, parts)), st.sampled_from(["", " ", "\n"]),
        pairs,
    )  # fmt: skip


@pytest.mark.parametrize("words", [PLAIN, MARKED, QUOTED, BOOK], ids=["plain", "marks", "sql", "b"])
@given(st.data())
def test_ids_equal_split_and_a_dictionary(words: list[str], data: st.DataObject) -> None:
    tokenizer = of(words).tokenizer
    text = data.draw(spaced(words))
    ids = [words.index(word) for word in text.split()]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == "".join(f" {word}" for word in text.split())
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    spans = tokenizer.spans(ids, text)
    assert [text[span.start : span.end] for span in spans] == text.split()


@given(st.lists(st.sampled_from([*MARKED, " ", "\n"])).map("".join))
def test_marks_need_no_space_before_them(text: str) -> None:
    """Word vocabularies with punctuation tokens are usually made with the `re.findall` pattern
    below."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    tokenizer = of(MARKED).tokenizer
    if set(pieces) <= set(MARKED):
        assert tokenizer.encode(text) == list(map(MARKED.index, pieces))
        assert tokenizer.encode(tokenizer.decode(tokenizer.encode(text))) == tokenizer.encode(text)
    else:
        with pytest.raises(TokenizerError, match="not one of the 13 words and marks"):
            tokenizer.encode(text)


@given(st.lists(st.sampled_from([*BOOK[:8], " "])).map("".join))
def test_books_word_pattern_is_read(text: str) -> None:
    pieces = [part.strip() for part in re.split(BOOK_CUT, text) if part.strip()]
    assume(set(pieces) <= set(BOOK))
    tokenizer = of(BOOK).tokenizer
    assert tokenizer.encode(text) == list(map(BOOK.index, pieces))
    assert tokenizer.end_of_text == 8


@pytest.mark.parametrize("pattern", [r"\w+|[^\w\s]+", r"[\w'-]+|[^\w\s]"])
@given(st.lists(st.sampled_from(["it's", "state-of", "10", "a", "--", "...", ",", " "])))
def test_stored_pattern_is_used(pattern: str, parts: list[str]) -> None:
    """Another pattern was assumed, and the note said that none was stored."""
    text = "".join([*parts, "the"])
    words = sorted({*re.findall(pattern, text), "a", "the"})
    vocabulary = of(words, pattern)
    assert vocabulary.tokenizer.encode(text) == [*map(words.index, re.findall(pattern, text))]
    assert "assumed" not in " ".join(vocabulary.notes)


def test_stored_pattern_that_splits_tokens_is_noted() -> None:
    notes = " ".join(of(BOOK, BOOK_CUT).notes)
    assert f"the split pattern {BOOK_CUT!r} splits tokens; " in notes


def test_assumptions_are_noted() -> None:
    notes = " ".join(of(MARKED).notes)
    assert r"\w+|[^\w\s] is assumed" in notes
    assert "white space only separates words" in notes
    assert "token for unknown words" in notes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("the dog sat", "'dog', at character 4 of the text, is not one of the 9 words"),
        ("aI", "'aI', at character 0"),  # not the words 'a' and 'I' in succession
        ("the cats", "'cats', at character 4"),
        ("\n  <unk>", "'<', at character 3"),
    ],
)
def test_unknown_word_is_named(text: str, sentence: str) -> None:
    with pytest.raises(TokenizerError, match=sentence):
        of(PLAIN).tokenizer.encode(text)


def test_names_of_special_tokens_are_text_by_default() -> None:
    tokenizer = of([*PLAIN, "<bos>", "<pad>"]).tokenizer
    assert tokenizer.encode("<bos> the cat<pad>", special_ids=True) == [9, 0, 1, 10]
    with pytest.raises(TokenizerError, match="'<'"):
        tokenizer.encode("<bos> the")
    assert tokenizer.decode([9, 0, 1]) == "<bos> the cat"


# White space among the tokens

JOINED = {
    "words and single spaces": [" ", "\n", "a", "cat", "the", ".", "don", "'"],
    "words with their space": ["the", " the", " cat", "cat", " ", "\n", ".", " ("],
    "runs of white space": [" ", "  ", "\n\n", "\n", "the", "cat", "."],
    "whatever has no space": [" ", "\n", "it's", "->", "x=1"],
}


@pytest.mark.parametrize("shape", JOINED)
@given(st.data())
def test_text_of_tokens_round_trips(shape: str, data: st.DataObject) -> None:
    words = JOINED[shape]
    tokenizer = of(words).tokenizer
    text = "".join(data.draw(st.lists(st.sampled_from(words))))
    pieces = re.findall(tokenizer.pattern, text)
    assert "".join(pieces) == text
    if set(pieces) <= set(words):
        assert tokenizer.encode(text) == list(map(words.index, pieces))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    else:
        with pytest.raises(TokenizerError, match="is not one of the"):
            tokenizer.encode(text)


# Tokens of several words

LABELS = ["Milling", "Turning", "Turning Finish", "5-axis Milling", "Sand Casting", "<eos>"]


@given(st.lists(st.sampled_from(LABELS[:-1])))
def test_tokens_of_several_words(labels: list[str]) -> None:
    tokenizer = of(LABELS).tokenizer
    ids = list(map(LABELS.index, labels))
    assert tokenizer.encode(" ".join(labels)) == ids
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_ambiguous_tokens_of_several_words_are_refused() -> None:
    with pytest.raises(
        ConvertError, match="'a b' begins with the token 'a', and another token begins with 'b'"
    ):
        of(["a", "a b", "b c", "cd"])


# Parts of words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["play", "##ing", "the"], "WordPiece's mark"),
        (["play", "ing</w>"], "a mark of the end of a word"),
        (["\u2581the", "\u2581a", "s"], "SentencePiece's mark of a space"),
        (["\u0120the", "\u0120a", "s"], "byte-level BPE's mark"),
        (["t", "h", "e", "th", "the", "he"], "such as 'th'"),
        ([" ", "it's", "it's mine"], "each splits \"it's mine"),
    ],
)
def test_parts_of_words_are_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(ConvertError, match=rf"{sentence}.* --tokenizer none"):
        of(words)
