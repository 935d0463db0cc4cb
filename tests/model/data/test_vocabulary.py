"""Learning a vocabulary."""

from itertools import pairwise

import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.vocabulary import SMALLEST, check, learn, tokenizer_sha256
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer
from tests.model.conftest import story

LEARNED = learn([story(800)], 340)


def test_merges_equal_textbook_byte_pair_encoding() -> None:
    """Compare with a slow trainer that counts pairs within pieces and merges the most frequent
    one."""
    text = "low low low lower lower newest newest newest newest widest widest"
    learned = learn([text], 256 + 4 + 1)
    pieces = [list(word) for word in _split(text)]
    for rank in range(256, 260):
        counts: dict[tuple[bytes, bytes], int] = {}
        for piece in pieces:
            for pair in pairwise(piece):
                counts[pair] = counts.get(pair, 0) + 1
        most = max(counts.values())
        token = next(token for token, number in learned.ranks.items() if number == rank)
        best = [pair for pair, count in counts.items() if count == most]
        assert token in {left + right for left, right in best}
        pair = next(pair for pair in best if pair[0] + pair[1] == token)
        pieces = [_merge(piece, pair) for piece in pieces]


def _split(text: str) -> list[list[bytes]]:
    words = text.split(" ")
    spelled = [words[0], *(" " + word for word in words[1:])]
    return [[bytes([byte]) for byte in word.encode()] for word in spelled]


def _merge(piece: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for token in piece:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def test_size_includes_end_of_text_and_learning_is_repeatable() -> None:
    assert LEARNED.vocab_size == 340
    assert LEARNED.end_of_text == 339
    assert learn([story(800)], 340).ranks == LEARNED.ranks


def test_short_text_yields_fewer_tokens() -> None:
    assert 257 <= learn(["hello hello hello"], 1000).vocab_size < 270


def test_bytes_alone_are_the_smallest_vocabulary() -> None:
    assert learn(["text"], SMALLEST).vocab_size == 257
    with pytest.raises(DataError, match="vocab_size 256 is below 257"):
        learn(["text"], 256)


def test_long_run_of_spaces_does_not_panic() -> None:
    assert learn([" " * 100_000] * 3, 300).vocab_size <= 300


def test_hash_differs_between_vocabularies() -> None:
    assert tokenizer_sha256(learn([story(800)], 341)) != tokenizer_sha256(LEARNED)
    other = Tokenizer(
        ranks=LEARNED.ranks, pattern=r"\s+|\S+", special_tokens=LEARNED.special_tokens
    )
    assert tokenizer_sha256(other) != tokenizer_sha256(LEARNED)


@pytest.mark.parametrize(
    "words",
    ["हिन्दी किताब मेरी बच्चे में", "தமிழ் நூல்கள்", "e\u0301te\u0301 nai\u0308ve"],
    ids=["Hindi", "Tamil", "decomposed"],
)
def test_combining_marks_stay_with_their_letters(words: str) -> None:
    text = f" {words}" * 50
    learned = learn([text], 1024)
    assert learned.decode(learned.encode(text)) == text
    # Each word is frequent, so each becomes one token.
    assert len(learned.encode(f" {words}")) == len(words.split())


def test_pattern_that_drops_text_is_refused() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    lossy = Tokenizer(ranks=ranks, pattern="[a-z]+", special_tokens={END_OF_TEXT: 256})
    check(lossy, "abc")
    with pytest.raises(DataError, match="drops 3 of the text's 7 bytes"):
        check(lossy, "ab, cd!")
