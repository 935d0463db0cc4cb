"""Tokenizer: ids are bytes, text is a view of them; nothing is lost, nothing half is shown."""

import base64
import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.text import pieces
from logitd.model.text.tokenizer import (
    END_OF_TEXT,
    SPLIT_PATTERN,
    Tokenizer,
    TokenizerError,
    TokenizerKind,
    TokenSpan,
    parse_ranks,
)
from tests.model.factories import byte_tokenizer

MERGES = (
    *(b"th", b"the", b" t", b" the", b"in", b"ing", b"  ", b"    ", b"\n\n", b"aa", b"aaaa", b"12"),
    # Pieces of characters: of the euro sign, of an emoji, of a letter with two bytes.
    *(b"\xe2\x82", b"\x82\xac", b"\xf0\x9f", b"\xf0\x9f\x98", b"\x98\x80", b"t\xc3", b"\xa9 "),
    *(b"\xe2\x82\xac", b"\xc3\xa9"),
)
"""In the order of their ranks; every one is made of two tokens before it."""

RANKS = {bytes([byte]): byte for byte in range(256)} | {
    token: 256 + index for index, token in enumerate(MERGES)
}
TOKENIZER = Tokenizer(
    ranks=RANKS, pattern=SPLIT_PATTERN, special_tokens={END_OF_TEXT: len(RANKS), "<|user|>": 300}
)
PLAIN = tiktoken.Encoding("plain", pat_str=SPLIT_PATTERN, mergeable_ranks=RANKS, special_tokens={})
BYTES = byte_tokenizer()
BARE = Tokenizer(ranks=RANKS, pattern=SPLIT_PATTERN, special_tokens={})
ID = st.integers(0, TOKENIZER.vocab_size - 1)
RAGGED_TEXT = st.lists(
    st.text(max_size=20)
    | st.sampled_from(["the €", "é ", "  \n\n ", "aaaaa", "12345", "😀", END_OF_TEXT])
).map("".join)


# Text to ids and back


@given(st.text() | RAGGED_TEXT)
@example("")
@example("\r\n \u00a0\u2028\u3000\x00\ufeff")
def test_every_text_comes_back(text: str) -> None:
    for tokenizer in (TOKENIZER, BYTES):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()


@given(RAGGED_TEXT)
def test_byte_vocabulary_spells_bytes(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())


@given(RAGGED_TEXT)
def test_ids_are_those_of_a_plain_tiktoken_encoding(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == PLAIN.encode_ordinary(text)
    assert TOKENIZER.decode_bytes(ids) == PLAIN.decode_bytes(ids)


@given(st.lists(RAGGED_TEXT, max_size=5))
def test_batch_is_its_texts(texts: list[str]) -> None:
    assert TOKENIZER.encode_batch(texts, threads=2) == list(map(TOKENIZER.encode, texts))


@given(RAGGED_TEXT, RAGGED_TEXT)
def test_name_of_a_special_token_is_plain_text(before: str, after: str) -> None:
    text = before + END_OF_TEXT + after
    ids = TOKENIZER.encode(text)
    assert not any(map(TOKENIZER.is_special, ids))
    assert TOKENIZER.decode(ids) == text


def test_special_tokens() -> None:
    assert TOKENIZER.end_of_text == len(RANKS)
    assert TOKENIZER.is_special(300)
    assert not TOKENIZER.is_special(299)
    assert TOKENIZER.token_bytes(300) == b"<|user|>"
    assert TOKENIZER.decode([104, 105, len(RANKS)]) == "hi" + END_OF_TEXT
    assert BARE.end_of_text is None
    assert BARE.vocab_size == len(RANKS)


def test_ids_between_special_tokens_have_no_bytes() -> None:
    """Published encodings have such gaps (100256 of cl100k_base): a model may draw one."""
    assert TOKENIZER.vocab_size == 301
    assert TOKENIZER.token_bytes(299) == b""
    assert TOKENIZER.decode([104, 299, 105]) == "hi"


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert TOKENIZER.decode_bytes([0xFF, 0x41]) == b"\xffA"
    assert TOKENIZER.decode([0xFF, 0x41]) == "\ufffdA"
    assert TOKENIZER.token_text(0xFF) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 301, 10**12])
def test_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    for use in (
        TOKENIZER.token_bytes,
        TOKENIZER.token_text,
        TOKENIZER.detokenizer().push,
        lambda bad: TOKENIZER.decode([65, bad]),
    ):
        with pytest.raises(TokenizerError, match=f"{token_id}.*301.*300"):
            use(token_id)


# Names of special tokens


@given(st.lists(RAGGED_TEXT | st.sampled_from([END_OF_TEXT, "<|user|>"])).map("".join))
def test_text_with_special_ids_comes_back_and_its_parts_stand_alone(text: str) -> None:
    ids = TOKENIZER.encode(text, special_ids=True)
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    parts = re.split(r"(<\|endoftext\|>|<\|user\|>)", text)
    alone = [
        [TOKENIZER.special_tokens[part]] if index % 2 else TOKENIZER.encode(part)
        for index, part in enumerate(parts)
    ]
    assert ids == [token_id for part in alone for token_id in part]


@given(RAGGED_TEXT)
def test_vocabulary_without_special_tokens_has_no_names(text: str) -> None:
    assert BARE.encode(text, special_ids=True) == BARE.encode(text) == TOKENIZER.encode(text)


# Where tokens lie


def touched(text: str, tokens: list[bytes]) -> list[TokenSpan]:
    """The characters that each token's bytes touch, looked up byte by byte."""
    of_byte = [index for index, character in enumerate(text) for _ in character.encode()]
    spans, at = [], 0
    for token in tokens:
        mine = of_byte[at : at + len(token)]
        spans.append(TokenSpan(mine[0], mine[-1] + 1))
        at += len(token)
    return spans


@given(RAGGED_TEXT | st.text(), st.booleans())
def test_spans_are_the_characters_that_a_token_touches(text: str, special_ids: bool) -> None:
    for tokenizer in (TOKENIZER, BYTES):
        ids = tokenizer.encode(text, special_ids=special_ids)
        tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        assert tokenizer.spans(ids) == touched(text, tokens)


# Piece by piece


@given(st.lists(ID))
@example([0xF0, 0x9F, 0x98])
@example([0xE2, 0x82, 300, 0xAC])
def test_pieces_join_to_the_whole_text(ids: list[int]) -> None:
    for tokenizer in (TOKENIZER, BYTES):
        known = [token_id for token_id in ids if token_id < tokenizer.vocab_size]
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in known]
        assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(known)


@given(st.lists(ID))
def test_piece_once_shown_is_never_taken_back(ids: list[int]) -> None:
    detokenizer, shown = TOKENIZER.detokenizer(), ""
    for end in range(len(ids)):
        shown += detokenizer.push(ids[end])
        assert TOKENIZER.decode(ids).startswith(shown)


@given(RAGGED_TEXT, st.data())
def test_every_whole_character_is_shown_and_no_part_of_one(text: str, data: st.DataObject) -> None:
    """The shown text is all that is certain, however the bytes are cut into tokens."""
    raw, ids = text.encode(), []
    while raw:
        token = data.draw(
            st.sampled_from([token for token in RANKS if raw.startswith(token)]), label="token"
        )
        ids.append(RANKS[token])
        raw = raw[len(token) :]
    detokenizer, shown, count = TOKENIZER.detokenizer(), "", 0
    for token_id in ids:
        shown += detokenizer.push(token_id)
        count += len(TOKENIZER.token_bytes(token_id))
        assert shown == text.encode()[:count].decode(errors="ignore")
    assert detokenizer.finish() == ""


# Files


def test_ranks_file_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.tiktoken"
    TOKENIZER.write_ranks(path)
    back = Tokenizer.read_ranks(path, special_tokens=TOKENIZER.special_tokens)
    assert back.ranks == RANKS
    assert list(back.ranks.values()) == list(range(len(RANKS)))  # the file is in order
    assert (back.pattern, back.special_tokens) == (SPLIT_PATTERN, TOKENIZER.special_tokens)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # keeps no copy
    assert load_tiktoken_bpe(str(path)) == RANKS  # tiktoken itself reads it


def test_ranks_file_alone_ends_texts(tmp_path: Path) -> None:
    path = tmp_path / "any.tiktoken"
    TOKENIZER.write_ranks(path)
    assert Tokenizer.read_ranks(path).special_tokens == {END_OF_TEXT: len(RANKS)}


def test_empty_lines_and_carriage_returns_are_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "any.tiktoken"
    TOKENIZER.write_ranks(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert Tokenizer.read_ranks(path).ranks == RANKS


@pytest.mark.parametrize(
    "line", [b"IQ==", b"IQ== one", b"IQ== 1 2", b"I!Q= 1", b"!", b"\xff\xfe 0"]
)
def test_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "any.tiktoken"
    path.write_bytes(base64.b64encode(b"a") + b" 0\n" + line + b"\n")
    with pytest.raises(TokenizerError, match=f"line 2.*any.tiktoken.*{re.escape(repr(line))}"):
        Tokenizer.read_ranks(path)


# Vocabularies that tiktoken would panic on, or take and answer wrongly


def without_bytes() -> Tokenizer:
    ranks = {bytes([byte]): byte - 2 for byte in range(2, 256)}
    return Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={})


def with_ranks(change: Callable[[dict[bytes, int]], None]) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        ranks = dict(RANKS)
        change(ranks)
        return Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={})

    return make


def with_special(**special_tokens: int) -> Callable[[], Tokenizer]:
    return lambda: Tokenizer(ranks=RANKS, pattern=SPLIT_PATTERN, special_tokens=special_tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            without_bytes,
            "2 of the 256.*first: 0",
        ),
        (
            with_ranks(lambda ranks: ranks.update({b"new": 1000})),
            "278 ranks.*277",
        ),
        (
            with_ranks(lambda ranks: ranks.update({b"the": 65})),
            "277 ranks.*276",
        ),
        (
            with_special(one=65),
            "one.*65.*277",
        ),
        (
            with_special(one=277, two=277),
            "one.*277.*two.*277",
        ),
        (with_special(one=-1), "one.*-1"),
        (
            lambda: Tokenizer(ranks=RANKS, pattern=r"(\p{L}+", special_tokens={}),
            r"split pattern.*\(",
        ),
    ],
    ids=["no-byte", "gap", "same-rank", "collision", "same-special", "negative", "pattern"],
)
def test_unusable_vocabulary_is_refused(make: Callable[[], Tokenizer], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        make()


# The split pattern

MILLION = 1_000_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "character",
    [
        *(" ", "\n", "\r\n", "\t", "\u00a0", "a"),
        *(pytest.param(other, marks=pytest.mark.slow) for other in "7.'é😀\u0301"),
        pytest.param(" a", marks=pytest.mark.slow),
    ],
)
def test_million_of_anything_is_only_long(character: str) -> None:
    """A run of about a million spaces overflows tiktoken's stack with the published patterns: a
    panic that `except Exception` does not catch. Ours bounds every run of white space."""
    run = character * (MILLION // len(character))
    for text in (run, f"a{run}b"):
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("it's I'LL", ["it", "'s", " I", "'LL"]),
        ("12345", ["12", "34", "5"]),
        ("a  b", ["a", " ", " b"]),
        ("x = [1]\n\n", ["x", " =", " [", "1", "]\n\n"]),
        ("a\n  b", ["a", "\n", " ", " b"]),
        ("." * 65, ["." * 64, "."]),
    ],
)
def test_pattern_cuts_text(text: str, pieces: list[str]) -> None:
    """A vocabulary that holds every piece of the text as one token shows where it is cut."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for length in range(2, len(text.encode()) + 1):
        for start in range(len(text) - length + 1):
            ranks.setdefault(text[start : start + length].encode(), len(ranks))
    tokenizer = Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={})
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)] == pieces


# Published encodings


def test_unknown_encoding_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"gpt5.*gpt2.*cl100k_base.*o200k_base"):
        Tokenizer.named("gpt5")


def cached_cl100k() -> Path:
    """Place where tiktoken keeps cl100k_base."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    name = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"  # the sha1 of its address
    return Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache") / name


@pytest.mark.skipif(not cached_cl100k().exists(), reason="cl100k_base is not in tiktoken's cache")
def test_cl100k_base() -> None:
    tokenizer = Tokenizer.named("cl100k_base")
    assert tokenizer.vocab_size == 100_277
    assert tokenizer.encode("Hello world") == [9906, 1917]
    assert tokenizer.end_of_text == 100_257


# Special tokens before and between ordinary ones, and kinds without merges


def test_special_tokens_may_stand_anywhere() -> None:
    ranks = {bytes([byte]): byte + 1 + (byte >= 100) for byte in range(256)}  # without 0 and 101
    tokenizer = Tokenizer(
        ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={"<pad>": 0, "<sep>": 101, "<eos>": 258}
    )
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("ce") == [100, 103]
    assert tokenizer.encode("c<sep>e", special_ids=True) == [100, 101, 103]
    assert tokenizer.decode([0, 100, 101]) == "<pad>c<sep>"
    with pytest.raises(TokenizerError, match=r"255.*special"):
        Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={"<pad>": 0})


WORDS = Tokenizer(
    ranks={b" the": 0, b" cat": 1, b" .": 3},
    pattern=r"\w+|[^\w\s]",
    special_tokens={"<eos>": 2},
    end_of_text_name="<eos>",
    kind="words",
)
PIECES = Tokenizer(
    ranks={b"the": 0, b" ": 1, b"caf\xc3\xa9": 2},
    pattern=r"\S+|\s",
    special_tokens={},
    kind="pieces",
)


def test_words_are_looked_up_and_white_space_only_separates() -> None:
    assert WORDS.encode(" the cat\n\nthe.") == [0, 1, 0, 3]
    assert WORDS.decode([0, 1, 2]) == " the cat<eos>"
    assert WORDS.encode("the<eos>cat", special_ids=True) == [0, 2, 1]
    assert WORDS.encode_batch(["the", "cat"], threads=2) == [[0], [1]]
    assert WORDS.end_of_text == 2
    assert WORDS.spans([0, 2, 1], "the <eos> \n cat") == [
        TokenSpan(0, 3), TokenSpan(4, 9), TokenSpan(12, 15),
    ]  # fmt: skip
    assert WORDS.least_tokens(" " * 1000) == 0
    with pytest.raises(TokenizerError, match=r"'dog'.*character 5.*3"):
        WORDS.encode("the  dog")


def test_pieces_are_tokens_as_a_whole() -> None:
    assert PIECES.encode("the café") == [0, 1, 2]
    assert PIECES.spans([0, 1, 2]) == [TokenSpan(0, 3), TokenSpan(3, 4), TokenSpan(4, 8)]
    with pytest.raises(TokenizerError, match=r"'caf'.*character 4"):
        PIECES.encode("the caf")


CATASTROPHIC = r"(?:a|aa)+\d|a"


@pytest.mark.parametrize("kind", ["pieces", "words"])
def test_pattern_that_takes_too_long_is_stopped(
    kind: TokenizerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MOST_SECONDS", 0.2)
    ranks = {b" a" if kind == "words" else b"a": 0}
    tokenizer = Tokenizer(ranks=ranks, pattern=CATASTROPHIC, special_tokens={}, kind=kind)
    assert not tokenizer.cuts_in_time
    assert tokenizer.encode("aaa") == [0, 0, 0]
    with pytest.raises(TokenizerError, match=r"0\.2 seconds"):
        tokenizer.encode("a" * 40)


def test_known_patterns_take_time_in_proportion() -> None:
    assert TOKENIZER.cuts_in_time
    assert Tokenizer.without_text(9).cuts_in_time
    bundled = Path(__file__).parents[3] / "checkpoints" / "python-small"
    assert read_checkpoint(bundled).tokenizer.cuts_in_time  # by an earlier pattern
    for cut in pieces.CUTS:
        tokenizer = Tokenizer(
            ranks={b" a": 0, b" a b": 1}, special_tokens={}, kind="words",
            pattern=pieces.whole_first(["a b"]) + cut,
        )  # fmt: skip
        assert tokenizer.cuts_in_time
        for text in ("a" * 50_000, "'" * 50_000, " \n" * 25_000, "-a" * 25_000):
            began = time.process_time()
            with contextlib.suppress(TokenizerError):
                tokenizer.encode(text)
            assert time.process_time() - began < 2


def test_pattern_that_leaves_something_out_is_noticed() -> None:
    bare = Tokenizer(ranks={b"a": 0}, pattern="a", special_tokens={}, kind="pieces")
    spaced = Tokenizer(ranks={b" a": 0}, pattern="a", special_tokens={}, kind="words")
    for text, place in (("ab", 1), ("ba", 0), ("aba", 1)):
        with pytest.raises(TokenizerError, match=f"'b'.*character {place}"):
            spaced.encode(text)
        with pytest.raises(TokenizerError, match=f"'b'.*character {place}"):
            bare.encode(text)
    dropping = replace_pattern(TOKENIZER, r"\p{L}+|\s+")
    for call in (
        lambda: dropping.encode("x = 1"),
        lambda: dropping.encode_batch(["x = 1"], threads=1),
    ):
        with pytest.raises(TokenizerError, match="3 of the text's 5 bytes"):
            call()
    assert dropping.decode(dropping.encode("x y")) == "x y"


def replace_pattern(tokenizer: Tokenizer, pattern: str) -> Tokenizer:
    special = tokenizer.special_tokens
    return Tokenizer(ranks=tokenizer.ranks, pattern=pattern, special_tokens=special)


def test_model_without_a_vocabulary() -> None:
    tokenizer = Tokenizer.without_text(10)
    assert (tokenizer.vocab_size, tokenizer.has_text, tokenizer.end_of_text) == (10, False, None)
    assert (tokenizer.decode([0, 9]), tokenizer.token_bytes(3)) == ("", b"")
    with pytest.raises(TokenizerError, match="10 ids"):
        tokenizer.decode([10])
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.encode_batch(["a"], threads=1)):
        with pytest.raises(TokenizerError, match="no vocabulary"):
            call()
    with pytest.raises(TokenizerError, match=r"none.*1 ranks"):
        Tokenizer(ranks={b"a": 0}, pattern="", special_tokens={}, vocab_size=1, kind="none")


ADDED = Tokenizer(
    ranks=RANKS,
    pattern=SPLIT_PATTERN,
    special_tokens={END_OF_TEXT: len(RANKS), "<|end|>": len(RANKS) + 1},
    added_tokens={"   ": len(RANKS) + 2, "the": RANKS[b"the"]},
    added_flags={"<|end|>": ["lstrip", "rstrip"]},
    end_ids=[len(RANKS) + 1, 10],
)


def test_added_tokens_are_part_of_the_vocabulary() -> None:
    spaces = len(RANKS) + 2
    assert ADDED.vocab_size == spaces + 1
    assert ADDED.encode("a     the") == [97, spaces, RANKS[b"  "], RANKS[b"the"]]
    assert ADDED.encode("other<|end|>") == [111, RANKS[b"the"], 114, *b"<|end|>"]
    assert ADDED.decode([97, spaces]) == "a   "
    assert not ADDED.is_special(spaces)
    assert ADDED.ends == (len(RANKS), len(RANKS) + 1, 10)
    ids = ADDED.encode("a \n<|end|>  b", special_ids=True)
    assert ids == [97, len(RANKS) + 1, 98]
    assert ADDED.spans(ids, "a \n<|end|>  b") == [
        TokenSpan(0, 1), TokenSpan(1, 12), TokenSpan(12, 13),
    ]  # fmt: skip
    assert ADDED.least_tokens("<|end|>" + " " * 1000) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": {"a": 98}}, "share an id"),
        ({"added_tokens": {"": 400}}, "0 characters"),
        ({"added_tokens": {"x" * 2000: 400}}, "2,000.*1,024"),
        ({"added_tokens": {"\ud800": 400}}, "surrogates"),
        ({"added_flags": {"<x>": ["lstrip"]}}, "lstrip.*<x>"),
        ({"added_flags": {END_OF_TEXT: ["strip"]}}, "strip"),
        ({"end_ids": [400]}, "end_ids has 400"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(
            ranks=RANKS, pattern=SPLIT_PATTERN, special_tokens={END_OF_TEXT: len(RANKS)}, **changes
        )


def test_ends_of_token_ids_alone() -> None:
    tokenizer = Tokenizer.described({"kind": "none", "vocab_size": 9, "end_ids": [3, 8]}, {})
    assert tokenizer.ends == (3, 8)
    assert tokenizer.description() == {"kind": "none", "vocab_size": 9, "end_ids": [3, 8]}


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, WORDS, PIECES, ADDED], ids=["bpe", "words", "pieces", "added"]
)
def test_description_and_ranks_are_the_whole_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.write_ranks(tmp_path / "ranks")
    said = json.loads(json.dumps(tokenizer.description()))
    back = Tokenizer.described(said, parse_ranks((tmp_path / "ranks").read_bytes(), "ranks"))
    assert vars(back)["tokens"] == tokenizer.tokens
    assert back.description() == tokenizer.description()
    assert back.encode("the") == tokenizer.encode("the")
