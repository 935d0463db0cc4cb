"""Hashed files: every byte is delivered once, and the hash is computed from the delivered bytes."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from logitd.model.checkpoint.hashed_file import PIECE, HashedFile


@pytest.fixture
def raw() -> bytes:
    """Random bytes, a few more than three reads of PIECE bytes take."""
    return os.urandom(3 * PIECE + 17)


@pytest.fixture
def path(tmp_path: Path, raw: bytes) -> Path:
    (tmp_path / "file").write_bytes(raw)
    return tmp_path / "file"


@pytest.mark.parametrize("count", [PIECE, PIECE - 3, 100_003])
def test_pieces_are_the_file(path: Path, raw: bytes, count: int) -> None:
    with HashedFile(path) as file:
        seen = b""
        while piece := bytes(file.take(count)):
            assert len(piece) == min(count, len(raw) - len(seen))
            seen += piece
        assert seen == raw
        assert file.finish() == hashlib.sha256(raw).hexdigest()
        assert file.taken == len(raw)


def test_hash_covers_bytes_that_are_not_taken(path: Path, raw: bytes) -> None:
    with HashedFile(path) as file:
        assert file.take(5) == raw[:5]
        assert file.take_all(PIECE + 9) == raw[5 : PIECE + 14]
        assert file.finish() == hashlib.sha256(raw).hexdigest()
        assert file.take_all(1) == b""


def test_empty_file_has_the_hash_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with HashedFile(tmp_path / "empty") as file:
        assert not file.take(8)
        assert file.finish() == hashlib.sha256().hexdigest()


def test_changed_bytes_are_hashed_as_delivered(path: Path, raw: bytes) -> None:
    """The file is overwritten in place, before and after the read position."""
    with HashedFile(path) as file:
        seen = bytes(file.take(PIECE))
        with path.open("r+b") as other:
            other.write(b"\xff" * len(raw))
        seen += bytes(file.take(PIECE))
        digest = file.finish()
    rest = b"\xff" * (len(raw) - 2 * PIECE)
    assert seen == raw[:PIECE] + b"\xff" * PIECE
    assert digest == hashlib.sha256(seen + rest).hexdigest()


def test_shrinking_file_ends_early(path: Path, raw: bytes) -> None:
    with HashedFile(path) as file:
        file.take(PIECE)
        os.truncate(path, PIECE + 10)
        assert file.take(PIECE) == raw[PIECE : PIECE + 10]
        assert file.finish() == hashlib.sha256(raw[: PIECE + 10]).hexdigest()


def test_hashing_thread_ends_with_the_file(path: Path) -> None:
    with HashedFile(path) as file:
        file.take(100)
    assert not any(one.name.startswith("logitd-hash") for one in threading.enumerate())
