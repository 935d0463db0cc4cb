"""Files of every kind: their documents and pieces, and files that are refused."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import PIECE, Document, pieces_of
from logitd.model.data.sources.files import documents_of, each_once, named_files


def joined(document: Document) -> str:
    return "".join(document.pieces())


def read(path: Path) -> str:
    """Text of the only document in a file."""
    (document,) = documents_of(path, path.name, "text")
    return joined(document)


def test_files_folders_and_globs_name_each_file_once_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "deep" / "a.txt").write_text("a")
    (folder / ".hidden").write_text("h")
    words = [str(folder), str(folder / "*.txt"), str(folder / "b.txt")]
    files = each_once(file for word in words for file in named_files(word))
    assert [file.name for file in files] == ["b.txt", "a.txt"]


def test_linked_folder_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    (tmp_path / "other" / "back").symlink_to(folder)
    (folder / "link").symlink_to(tmp_path / "other")
    assert named_files(str(folder)) == [folder / "link" / "a.txt"]


def test_missing_and_unreadable_parts_of_a_folder_are_refused(tmp_path: Path) -> None:
    """They were left out of the text."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    for word in (str(tmp_path), str(tmp_path / "*.txt")):
        with pytest.raises(DataError, match=r"b\.txt is a link to a file that does not exist"):
            named_files(word)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "closed").mkdir(mode=0o000)
    if os.access(tmp_path / "closed", os.R_OK):
        pytest.skip("this user may read every folder")
    with pytest.raises(DataError, match=r"closed cannot be read: Permission denied"):
        named_files(str(tmp_path))


def test_word_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file, a folder or a glob that matches"):
        named_files(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="has no files"):
        named_files(str(tmp_path))


def test_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    """Guards against a text from Windows whose mark became its first token."""
    path = tmp_path / "a.txt"
    path.write_text("\ufeff\ufeffone", encoding="utf-8")
    assert read(path) == "\ufeffone", "only the first"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_file_is_read_unchanged_in_bounded_pieces(
    tmp_path: Path, newline: str, packed: bool
) -> None:
    path = tmp_path / "long.txt"
    content = (f"äöü {'x' * 70}" + newline) * 4000 + "y" * (2 * PIECE + 7)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    (document,) = documents_of(path, "long", "text")
    pieces = list(document.pieces())
    assert max(map(len, pieces)) <= PIECE
    assert "".join(pieces) == content
    assert document.count_bytes() == len(content.encode())
    assert (document.size is None) == packed
    assert pieces[0].endswith("\n")


@given(st.lists(st.sampled_from(["ab\n", "é" * 70_000, "x" * 30_001, "\n", "🙂\n"])))
def test_text_in_memory_has_the_same_pieces(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(pieces_of(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= PIECE for piece in pieces)
    # A piece ends after a line break if it contains one.
    assert all(p.endswith("\n") or "\n" not in p for p in pieces[:-1])


@pytest.mark.parametrize("end", ["", " "])
def test_pieces_of_a_long_line_end_before_white_space(tmp_path: Path, end: str) -> None:
    """The white space before a word is a part of its token in most vocabularies."""
    line = "four " * PIECE + "x" * PIECE + end
    (tmp_path / "a.txt").write_text(line)
    (document,) = documents_of(tmp_path / "a.txt", "a", "text")
    pieces = list(document.pieces())
    assert "".join(pieces) == line
    assert pieces == list(pieces_of(line))
    assert all(piece.endswith("r") for piece in pieces[:5])
    assert max(map(len, pieces)) <= PIECE


def test_gzip_is_recognized_by_its_content(tmp_path: Path) -> None:
    for name in ("a.gz", "a.txt", "a"):
        (tmp_path / name).write_bytes(gzip.compress(b"packed"))
        assert read(tmp_path / name) == "packed"
    (tmp_path / "plain.gz").write_bytes(b"not packed")
    assert read(tmp_path / "plain.gz") == "not packed"


BINARY = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("naïve".encode("latin-1"), r"it\.txt is not UTF-8 \(byte 0xef"),
        (BINARY[128:], r"it\.txt is not UTF-8 \(byte 0x80"),
        ("né".encode()[:-1], r"ends inside a UTF-8 character \(byte 0xc3\): .*head -c -1\)"),
        (gzip.compress("n🙂".encode()[:-1], mtime=0), r"byte 0xf0.* \(head -c -3\)"),
        ("words".encode("utf-16"), r"it\.txt is not UTF-8 \(byte 0xff"),
        ("words".encode("utf-16-le"), "NUL characters.*UTF-16"),
        (bytes(3000), "NUL characters"),
        (gzip.compress(BINARY[128:]), r"it\.txt is not UTF-8 \(byte 0x80"),
        (
            gzip.compress(os.urandom(900).hex().encode())[:-500],
            "begins like a gzip file but cannot be unpacked",
        ),
        (b"\x1f\x8bnonsense", "begins like a gzip file but cannot be unpacked"),
    ],
)
def test_binary_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "it.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("text")
    (document,) = documents_of(path, path.name, "text")
    path.unlink()
    with pytest.raises(DataError, match=r"gone\.txt cannot be read: No such file"):
        joined(document)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_empty_file_has_no_document(tmp_path: Path, content: bytes) -> None:
    for name in ("empty.txt", "empty.jsonl", "empty.json", "empty.csv"):
        (tmp_path / name).write_bytes(content)
        assert list(documents_of(tmp_path / name, name, "text")) == []
