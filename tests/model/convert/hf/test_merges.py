"""Ranks and merges encode alike: for every piece, merging by rank, as tiktoken does, gives the same
tokens as applying the list of merges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert.hf.merges import (
    BYTE_CHARACTERS,
    last_pair,
    merge_piece,
    merges_of,
    written,
)
from logitd.model.text.tokenizer import Tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}


@given(st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=25), st.text("abc"))
def test_merges_of_any_ranks_encode_alike(tokens: list[str], piece: str) -> None:
    """The tokens are random, not learned, and in any order. A token that no merge produces is used
    only if it is the whole piece."""
    ranks = BYTES | {token.encode(): 256 + rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer(ranks=ranks, pattern=r"[\s\S]+", special_tokens={})
    merges, alone = merges_of(ranks)
    assert len(merges) + len(alone) == len(tokens)
    places = {(a.decode(), b.decode()): place for place, (a, b) in enumerate(merges)}
    parts = [piece] if piece.encode() in ranks else merge_piece(piece, places)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(piece)] == parts


@pytest.mark.parametrize(
    ("token", "pair"),
    [
        (b"ab", (b"a", b"b")),
        (b"abc", (b"a", b"bc")),
        (b"bcd", (b"bc", b"d")),
        (b"abcd", (b"abc", b"d")),
        (b"xyz", None),
    ],
)
def test_last_pair_is_found(token: bytes, pair: tuple[bytes, bytes] | None) -> None:
    more = (b"bc", b"ab", b"abc", b"cd", b"abcd", b"xyz", b"bcd")
    ranks = BYTES | {name: 256 + rank for rank, name in enumerate(more)}
    assert last_pair(token, ranks) == pair


def test_bytes_are_written_as_gpt2_has_them() -> None:
    assert len(set(BYTE_CHARACTERS.values())) == 256
    assert written(b" the\n\xe9\xad") == "ĠtheĊéŃ"
