"""Documents: sizes of texts, and separators."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data import sources
from logitd.model.data.errors import DataError
from logitd.model.data.prepare import prepare_text
from logitd.model.data.sources.document import (
    Document,
    Text,
    beginning,
    split_documents,
    text_document,
)
from logitd.model.data.sources.open_text import open_text


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1), st.integers(0, 200))
def test_count_is_exact_up_to_the_limit(texts: list[str], limit: int) -> None:
    documents = [text_document(str(index), text) for index, text in enumerate(texts)]
    whole = sum(len(text.encode()) for text in texts)
    found = Text("some", "none", documents).count_bytes(limit)
    assert found == whole if whole <= limit else limit < found <= whole


def test_unknown_size_is_read_up_to_the_limit() -> None:
    read = 0

    def pieces() -> Iterator[str]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield "é" * 50

    assert Text("long", "none", [Document("long", pieces)]).count_bytes(1000) == 1100
    assert read == 11


@given(st.lists(st.text("ab<|>\n", max_size=9), min_size=2), st.integers(1, 9))
def test_split_does_not_depend_on_pieces(parts: list[str], length: int) -> None:
    text = "<|>".join(parts)
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    found = split_documents([Document("a", lambda: iter(pieces))], "<|>")
    expected = [part.strip("\n") for part in text.split("<|>")]
    assert ["".join(d.pieces()) for d in found] == [part for part in expected if part]


def test_beginning_ends_at_a_word() -> None:
    documents = [text_document("a", "one two"), text_document("b", "three four")]
    for characters, expected in ((100, "one two\nthree four"), (16, "one two\n"), (6, "one")):
        assert beginning(documents, characters) == expected


def test_separator_that_does_not_occur_is_refused() -> None:
    documents = [text_document("a", "x\n\ny"), text_document("b", "z")]
    with pytest.raises(DataError, match=r"'\\\\n\\\\n' \(--split-at\) is nowhere"):
        list(split_documents(documents, r"\n\n"))
    assert len(list(split_documents([*documents, text_document("c", "--")], "--"))) == 2


def test_endless_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.document, "LONGEST_PART", 10)
    with pytest.raises(DataError, match=r"a has more than 10 characters .*'--' \(--split-at\)"):
        list(split_documents([text_document("a", "0123--0123456789a")], "--"))


@pytest.mark.parametrize("packed", [False, True])
def test_files_and_their_shards_have_the_same_size(packed: bool, tmp_path: Path) -> None:
    raw = ("Thirty days hath September. \n" * 200).encode()
    path = tmp_path / ("text.txt.gz" if packed else "text.txt")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    text = open_text([str(path)])
    assert text.count_bytes(1e9) == len(raw)
    prepare_text(text, tmp_path / "data", vocabulary="own", vocab_size=300, val_fraction=0.1)
    shards = open_text([str(tmp_path / "data")])
    assert shards.shards
    assert shards.count_bytes(1e9) == len(raw)
