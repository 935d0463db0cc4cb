"""Names of special tokens in texts that are read in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data import vocabulary
from logitd.model.data.sources.document import PIECE, text_document
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


def test_vocabulary_is_learned_from_a_text_whose_name_crosses_a_border() -> None:
    """The piece before it became longer than PIECE, and the training ended with a traceback."""
    text = "ab" * (PIECE // 2 - 1) + "<|a|>b" + "cd" * PIECE
    pieces = list(NAMES.whole(text_document("text", text)).pieces())
    assert max(map(len, pieces)) > PIECE
    assert len(vocabulary.learn(pieces, 260).ranks) > 256
