"""llama2.c's tokenizer.bin gives the same ids as the algorithm in its run.c. Also tested are named
alphabets, the names of vocabularies in checkpoints, and unknown words in a check text."""

import string
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert.check_text import read_check_text
from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.choose import choose_vocabulary
from logitd.model.convert.vocabulary.llama2c import llama2c_tokenizer
from logitd.model.convert.vocabulary.named import named_vocabulary
from logitd.model.convert.vocabulary.table import Table

Entries = list[tuple[float, str]]
_BYTES: Entries = [(0.0, f"<0x{byte:02X}>") for byte in range(256)]
_MERGED = [" a", "ab", " ab", "ba", "bab", "aa", "  "]
SMALL: Entries = [
    *((0.0, name) for name in ("<unk>", "\n<s>\n", "\n</s>\n")),
    *_BYTES,
    *((-float(rank), text) for rank, text in enumerate(_MERGED)),
    *((-float(100 + rank), text) for rank, text in enumerate(" ab’")),
]


def llama2c_file(entries: Entries) -> bytes:
    texts = [(score, text.encode()) for score, text in entries]
    raw = struct.pack("<I", max(len(text) for _, text in texts))
    return raw + b"".join(struct.pack("<fi", score, len(text)) + text for score, text in texts)


def as_run_c(entries: Entries, text: str) -> list[int]:
    """Encode as run.c does: start from whole characters or their bytes, then repeatedly merge the
    best pair. Of equally good pairs, the first is merged."""
    ids = {text: token_id for token_id, (_, text) in enumerate(entries)}
    tokens: list[int] = []
    for character in text:
        known = ids.get(character)
        tokens += [byte + 3 for byte in character.encode()] if known is None else [known]
    while True:
        pairs = [
            (entries[ids[joined]][0], -index)
            for index in range(len(tokens) - 1)
            if (joined := entries[tokens[index]][1] + entries[tokens[index + 1]][1]) in ids
        ]
        if not pairs:
            return tokens
        at = -max(pairs)[1]
        tokens[at : at + 2] = [ids[entries[tokens[at]][1] + entries[tokens[at + 1]][1]]]


@given(st.text(alphabet=" abc’é\n", max_size=20))
def test_ids_equal_those_of_run_c(text: str) -> None:
    tokenizer = llama2c_tokenizer(llama2c_file(SMALL), "tokenizer.bin").tokenizer
    assert tokenizer.encode(text) == as_run_c(SMALL, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([*SMALL, (-200.0, "a’")], "joins a multi-byte character"),
        ([*SMALL, (1.0, "bb")], "not in the order of its scores"),
        ([*SMALL, (-6.0, "bb")], "some scores are equal"),  # of two such pairs, the first is merged
    ],
)
def test_vocabularies_that_ranks_cannot_say_are_refused(entries: Entries, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence):
        llama2c_tokenizer(llama2c_file(entries), "tokenizer.bin")


def test_other_file_is_refused_as_a_tokenizer() -> None:
    for raw in (b"", b"abcd", llama2c_file(SMALL)[:-1], bytes(400)):
        with pytest.raises(ConvertError, match="is not llama2"):
            llama2c_tokenizer(raw, "tokenizer.bin")


def test_named_alphabet_is_a_vocabulary() -> None:
    for name, texts in (("printable", string.printable), ("ascii", bytes(range(32, 127)).decode())):
        candidate = named_vocabulary(f"{name},first=2", ids=len(texts) + 2, skip_normalizer=False)
        tokenizer = candidate.tokenizer
        assert tokenizer.encode("a b") == [2 + texts.index(letter) for letter in "a b"]
        assert tokenizer.vocab_size == len(texts) + 2
    whole = named_vocabulary("bytes,last=1", ids=257, skip_normalizer=False).tokenizer
    assert whole.encode("é\0") == [*"é".encode(), 0]
    assert whole.vocab_size == 257


def test_alphabet_is_suggested_by_its_size(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="256 ids may be --tokenizer bytes"):
        choose_vocabulary(None, contents={}, folder=tmp_path, facts={}, rows=256)


@pytest.mark.parametrize("key", ["tokenizer_chars", "tokenizer_vocab", "model_vocab", "chars"])
def test_vocabularies_have_the_name_of_their_owner(key: str, tmp_path: Path) -> None:
    found = choose_vocabulary(
        None, contents={key: list("\nabc")}, folder=tmp_path, facts={}, rows=4
    )
    assert found.tokenizer.encode("cab\n") == [3, 1, 2, 0]


def words() -> ForeignTokenizer:
    texts = dict(enumerate(("<PAD>", "<UNK>", "the", "cat", "sat")))
    return build_tokenizer(Table(texts=texts, where="words"))


def test_check_text_is_lowered_with_unknown_words_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("The cat SAT\nthe dog", encoding="utf-8")
    assert read_check_text(path, [path], words()).token_ids == [2, 3, 4, 2, 1]
