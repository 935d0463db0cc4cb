"""Split patterns are translated from one regex engine to the other, and give the same pieces for
any text."""

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.dialect import from_oniguruma, to_oniguruma
from logitd.model.convert.probe import probe_text
from logitd.model.text.published import KNOWN_FILES
from logitd.model.text.tokenizer import SPLIT_PATTERN

PATTERNS = [SPLIT_PATTERN, *(pattern for pattern, _ in KNOWN_FILES.values())]
RAGGED = st.text(st.sampled_from("abS'tT12345 \n\r\t.,()é€\u00a0हि\u094d\u0301"))


def library_pieces(pattern: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.hypothesis
def test_rewritten_patterns_cut_the_same_pieces(pattern: str) -> None:
    written = to_oniguruma(pattern)

    @given(RAGGED)
    def same(text: str) -> None:
        assert library_pieces(written, text) == regex.findall(pattern, text)

    same()
    assert library_pieces(written, probe_text()) == regex.findall(pattern, probe_text())


def test_regex_engines_differ() -> None:
    assert library_pieces(SPLIT_PATTERN, "12345") == ["12345"]
    assert library_pieces(to_oniguruma(SPLIT_PATTERN), "12345") == ["12", "34", "5"]


@pytest.mark.parametrize(
    ("pattern", "theirs", "ours"),
    [
        (r"[^\s\]]{1,3}+", r"(?>[^\s\]]{1,3})", r"(?:[^\s\]]{1,3})+"),
        (r"(?:a|(b)){2}+c", r"(?>(?:a|(b)){2})c", r"(?:(?:a|(b)){2})+c"),
        (r"\p{L}{1,2}+x{3}", r"(?>\p{L}{1,2})x{3}", r"(?:\p{L}{1,2})+x{3}"),
        (r"^a$", r"\Aa\z", r"(?:(?<=\n)|\A)a(?=\n|\z)"),
        (r"[$^]\$\^[]$]", r"[$^]\$\^[]$]", r"[$^]\$\^[]$]"),
        (r"(?i:'s)|a{,}+", r"(?i:'s)|a{,}+", r"(?i:'s)|a{,}+"),
        (r"\p{N}{2}?", r"\p{N}{2}", r"(?:\p{N}{2})?"),
        (r"\p{N}{1,2}?", r"\p{N}{1,2}?", r"\p{N}{1,2}?"),
    ],
)
def test_patterns_are_rewritten(pattern: str, theirs: str, ours: str) -> None:
    assert to_oniguruma(pattern) == theirs
    assert from_oniguruma(pattern) == ours


PLACES = st.sampled_from(("", "", r"\b", r"\B", "^", r"(?!\S)", r"(?<!\w)", r"(?=[\w'])"))
ATOMS = st.sampled_from(
    (
        *(r"\w", r"\W", r"\s", r"\S", r"\d", r"\p{L}", r"\p{Lu}", r"[\w']", r"[^\w\s]", r"[^\W\d]"),
        *(r"[^\r\n\p{L}]", ".", "a", "'", "ß", r"\n", "(?i:'s|'ll)", "(?i:[a-k])", "(?:ab|c)"),
        *(r"[²\u00bc]", r"\x41", r"[\p{L}&&[^a]]", r"(?>\w+)"),
    )
)
AT_LEAST_ONE = st.sampled_from(("", "+", "{1,2}", "{2}", "{1,2}?", "{1,2}+", "++", "{2,}", "{2,}+"))
REPEATS = AT_LEAST_ONE | st.sampled_from(("*", "?", "{2}?", "{,2}", "?+", "{2}+", "{,2}+"))
BRANCHES = st.lists(
    st.tuples(PLACES, ATOMS, AT_LEAST_ONE, ATOMS, REPEATS, PLACES | st.just("$")).map("".join),
    min_size=1,
    max_size=3,
)
"""Alternatives, none of which matches an empty text: tiktoken cannot use such a pattern."""
HARD = st.text(
    st.sampled_from("aAsSßkK 12²½'\n\r\t._é\u200c\u200d\u0301हि\u094dſ\u212a"), max_size=12
)


@given(BRANCHES, HARD)
@pytest.mark.hypothesis
def test_translated_patterns_cut_the_same_pieces(branches: list[str], text: str) -> None:
    """Guards against word characters, exact intervals and ends of lines that mean something else
    in the other engine."""
    pattern = "|".join([*branches, r"[\s\S]"])
    for theirs, ours in ((pattern, from_oniguruma(pattern)), (to_oniguruma(pattern), pattern)):
        split = pre_tokenizers.Split(Regex(theirs), "removed", invert=True)
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        assert tiktoken_pieces(ours, text, pieces) == pieces


def tiktoken_pieces(pattern: str, text: str, pieces: list[str]) -> list[str]:
    """The pieces of a text. Each of `pieces` is a token of the vocabulary."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += sorted({piece.encode() for piece in pieces} - {*tokens})
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    parts = encoding.decode_tokens_bytes(encoding.encode_ordinary(text))
    return [part.decode(errors="replace") for part in parts]


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?s:.)", "(?m)a", "a(?i)b|c", "(?-i:a)", "a)", "[a", "(?P<n>a)", r"\pL", r"\h", r"\<"),
        *("[[:alpha:]]", "[a--b]", "[a~~b]", r"\p{Word}", r"[\x80-\xff]", "(?i:ss)", "(?i:ß)"),
        *(r"(?i:\p{L})", r"(?i:\w)", "(?i:f(?:i))", r"(?i)a|\p{Lu}"),
    ],
)
def test_untranslatable_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConvertError):
        to_oniguruma(pattern)
