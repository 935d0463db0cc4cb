"""Names of special tokens in texts that are read in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.special_names import SpecialNames

NAMES = SpecialNames(["<|a|>", "<|a|>b", "[c]"])
PARTS = st.lists(st.sampled_from(["<|a|>", "<|a|>b", "[c]", "x", "<|", "é", "\n", "yyyyyyyy"]))


@given(PARTS, st.lists(st.integers(6, 20)))
def test_pieces_divide_no_name(parts: list[str], lengths: list[int]) -> None:
    text, pieces, at = "".join(parts), [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    pieces.append(text[at:])
    whole = list(NAMES.pieces(pieces))
    assert "".join(whole) == text
    assert all(whole)
    assert [name for piece in whole for name in NAMES.find(piece)] == NAMES.find(text)


def test_pieces_without_names_stay_as_they_are() -> None:
    assert list(NAMES.pieces(["a <", "|a| >", "[c", "d"])) == ["a <", "|a| >", "[c", "d"]
    assert list(SpecialNames().pieces(["<|a", "|>"])) == ["<|a", "|>"]
