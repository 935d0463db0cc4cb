"""Tokens on disk."""

from pathlib import Path

import numpy as np
import pytest

from logitd.model.data.shards import HEADER, ShardError, open_shard, write_shard

MINE, OTHER = b"m" * 32, b"o" * 32


def _write(path: Path, ids: list[int], vocab_size: int = 1000) -> None:
    with write_shard(path, vocab_size=vocab_size, tokenizer_sha256=MINE) as writer:
        writer.append(ids, 3 * len(ids))
        writer.append([], 0)
        writer.append(ids[:1], 0)


@pytest.mark.parametrize(("vocab_size", "width"), [(65_536, 2), (65_537, 4), (100_277, 4)])
def test_ids_come_back_in_the_smallest_type_that_holds_them(
    tmp_path: Path, vocab_size: int, width: int
) -> None:
    ids = [0, 1, vocab_size - 1]
    _write(tmp_path / "a", ids, vocab_size)
    shard = open_shard(tmp_path / "a", MINE)
    assert shard.tokens.tolist() == [*ids, 0]
    assert isinstance(shard.tokens, np.memmap)
    assert shard.tokens.itemsize == width
    assert (shard.count, shard.text_bytes) == (4, 9)
    assert (tmp_path / "a").stat().st_size == HEADER.size + 4 * width


def test_an_id_outside_the_vocabulary_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        ShardError, match=r"token 1 of the text has the id 70000, which is outside the"
    ):
        _write(tmp_path / "a", [1, 70_000])
    with pytest.raises(ShardError, match="outside the vocabulary"):
        _write(tmp_path / "a", [-1])
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizers_shard_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a", [1, 2])
    with pytest.raises(ShardError, match="written by another tokenizer"):
        open_shard(tmp_path / "a", OTHER)


def test_cut_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _write(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(ShardError, match="header promises 4 ids, 72 bytes"):
        open_shard(path, MINE)
    path.write_bytes(b"NOTMINE!" + whole[8:])
    with pytest.raises(ShardError, match="begins with b'NOTMINE!'"):
        open_shard(path, MINE)
    path.write_bytes(whole[:10])
    with pytest.raises(ShardError, match="too short"):
        open_shard(path, MINE)
    with pytest.raises(ShardError, match="missing"):
        open_shard(tmp_path / "b", MINE)


def test_an_empty_shard_is_a_shard(tmp_path: Path) -> None:
    with write_shard(tmp_path / "a", vocab_size=10, tokenizer_sha256=MINE):
        pass
    assert open_shard(tmp_path / "a", MINE).count == 0
