"""Shards: saved ids are read back, and damaged files are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.shards import HEADER, Shard, open_shard, write_shard

MINE, OTHER = b"m" * 32, b"o" * 32


def _write(path: Path, ids: list[int], vocab_size: int = 1000) -> None:
    with write_shard(path, vocab_size=vocab_size, tokenizer_sha256=MINE) as writer:
        writer.append(ids, 3 * len(ids))
        writer.end_document()
        writer.append([], 0)
        writer.end_document()
        writer.append(ids[:1], 0)


@pytest.mark.parametrize(("vocab_size", "width"), [(65_536, 2), (65_537, 4), (100_277, 4)])
def test_ids_come_back_in_the_smallest_type(tmp_path: Path, vocab_size: int, width: int) -> None:
    ids = [0, 1, vocab_size - 1]
    _write(tmp_path / "a", ids, vocab_size)
    shard = open_shard(tmp_path / "a", MINE)
    assert shard.tokens.tolist() == [*ids, 0]
    assert isinstance(shard.tokens, np.memmap)
    assert shard.tokens.itemsize == width
    assert (shard.count, shard.text_bytes) == (4, 9)
    assert (tmp_path / "a").stat().st_size == HEADER.size + 4 * width + 2 * 8
    assert shard.ends is not None
    assert shard.ends.tolist() == [3]
    assert shard.document_ends(end_of_text=1).tolist() == [3, 4], "the id 1 ends nothing"


def without_documents(raw: bytes) -> bytes:
    """The same ids as a shard of version 1 of 4 ids of 2 bytes."""
    return raw[:8] + (1).to_bytes(4, "little") + raw[12 : HEADER.size + 4 * 2]


def test_end_of_text_ends_the_documents_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    _write(path, [1, 2, 3])
    path.write_bytes(without_documents(path.read_bytes()))
    shard = open_shard(path, MINE)
    assert shard.tokens.tolist() == [1, 2, 3, 1]
    assert shard.document_ends(end_of_text=2).tolist() == [2, 4]
    assert shard.document_ends(end_of_text=1).tolist() == [1, 4]
    monkeypatch.setattr("logitd.model.data.shards.SCANNED", 4)
    tokens = np.array([1, 0, 1, 0, 0, 2, 2, 0, 3])
    assert Shard(path, tokens, 0).document_ends(0).tolist() == [2, 4, 5, 8, 9]
    assert Shard(path, tokens[:-1], 0).document_ends(0).tolist() == [2, 4, 5, 8]


def test_refused_id_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"token 1 of the text has the id 70000, which is outside the"
    ):
        _write(tmp_path / "a", [1, 70_000])
    with pytest.raises(DataError, match="outside the vocabulary"):
        _write(tmp_path / "a", [-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damaged", "tokenizer", "message"),
    [
        (lambda raw: raw, OTHER, f"another tokenizer .*{MINE.hex()[:12]}.*{OTHER.hex()[:12]}"),
        (lambda raw: raw[:-2], MINE, "its header says that 4 ids and their documents take 88"),
        (lambda raw: raw[:-8], MINE, "has 80 bytes, .* take 88: it is truncated"),
        (lambda raw: raw[:70], MINE, "has 70 bytes, .* take 80: it is truncated"),
        (lambda raw: raw[:-8] + raw[-8:][::-1], MINE, "the ends of its documents are not in asc"),
        (lambda raw: without_documents(raw)[:-2], MINE, "has 70 bytes, .* take 72: it is trunc"),
        (lambda raw: b"NOTMINE!" + raw[8:], MINE, "begins with b'NOTMINE!'"),
        (lambda raw: raw[:10], MINE, "too short"),
    ],
)
def test_damaged_or_foreign_shard_is_refused(
    tmp_path: Path, damaged: Callable[[bytes], bytes], tokenizer: bytes, message: str
) -> None:
    path = tmp_path / "a"
    _write(path, [1, 2, 3])
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_shard(path, tokenizer)
    with pytest.raises(DataError, match="missing"):
        open_shard(tmp_path / "b", tokenizer)


def test_empty_shard_can_be_opened(tmp_path: Path) -> None:
    with write_shard(tmp_path / "a", vocab_size=10, tokenizer_sha256=MINE):
        pass
    assert open_shard(tmp_path / "a", MINE).count == 0
