"""Split patterns are translated from one regex engine to the other, and give the same pieces for
any text."""

import pytest
import regex
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
    ],
)
def test_patterns_are_rewritten(pattern: str, theirs: str, ours: str) -> None:
    assert to_oniguruma(pattern) == theirs
    assert from_oniguruma(pattern) == ours


@pytest.mark.parametrize(
    "pattern", ["(?s:.)", "(?m)a", "a(?i)b|c", "(?-i:a)", "a)", "[a", "(?P<n>a)"]
)
def test_untranslatable_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConvertError):
        to_oniguruma(pattern)
