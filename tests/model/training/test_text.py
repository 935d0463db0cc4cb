"""Where documents come from, how they are cut, and which are held out."""

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.training.text import (
    BY_NAME,
    PIECE,
    Document,
    TextError,
    open_text,
    python_text,
    sides,
)


def _document(text: str, name: str = "a") -> Document:
    return Document(name, len(text.encode()), lambda: iter([text] if text else []))


def _joined(document: Document) -> str:
    return "".join(document.pieces())


def test_files_folders_and_globs_give_each_file_once_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "deep" / "a.txt").write_text("a")
    (folder / ".hidden").write_text("h")
    (folder / "empty.txt").write_text("")
    text = open_text([str(folder), str(folder / "*.txt"), str(folder / "b.txt")], "CC0")
    names = [Path(document.name).name for document in text.documents]
    assert names == ["b.txt", "a.txt"]
    assert text.licence == "CC0"
    assert not text.built_in


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_is_read_in_bounded_pieces_and_nothing_is_changed(
    tmp_path: Path, newline: str
) -> None:
    path = tmp_path / "long.txt"
    content = (f"äöü {'x' * 70}" + newline) * 4000 + "y" * (2 * PIECE + 7)
    path.write_bytes(content.encode())
    (document,) = open_text([str(path)], None).documents
    pieces = list(document.pieces())
    assert max(map(len, pieces)) <= PIECE
    assert "".join(pieces) == content
    assert document.size == len(content.encode())
    assert pieces[0].endswith("\n")


def test_what_is_no_utf8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve".encode("latin-1"))
    (document,) = open_text([str(path)], None).documents
    with pytest.raises(TextError, match=r"latin\.txt is not UTF-8 \(byte 0xef"):
        list(document.pieces())


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no file, no folder and no glob"):
        open_text([str(tmp_path / "*.txt")], None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TextError, match="holds no files"):
        open_text([str(tmp_path / "empty")], None)
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(TextError, match="1 files, and all are empty"):
        open_text([str(tmp_path / "nothing.txt")], None)


def test_the_built_in_text_is_this_pythons_reference_and_sources() -> None:
    text = python_text(Path(sysconfig.get_path("stdlib")))
    names = {document.name for document in text.documents}
    assert {"topics/with", "argparse.py", "json/decoder.py"} <= names
    assert not any(name.startswith(("test/", "idlelib/", "site-packages/")) for name in names)
    assert 5e6 < sum(document.size for document in text.documents) < 2e7
    assert text.built_in
    assert text.licence.startswith("PSF-2.0")
    topic = next(document for document in text.documents if document.name == "topics/with")
    assert "context manager" in _joined(topic)


def test_a_python_without_topics_still_has_sources_and_one_without_both_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("PREFIX = '/somewhere'\n")
    assert [document.name for document in python_text(tmp_path).documents] == ["module.py"]
    (tmp_path / "module.py").unlink()
    with pytest.raises(TextError, match="holds no Python sources"):
        python_text(tmp_path)


@given(st.text(max_size=300), st.floats(0.01, 0.5))
def test_the_end_of_a_single_document_is_held_out(text: str, fraction: float) -> None:
    text = text.encode(errors="replace").decode()
    parts = list(sides(_document(text), fraction, count=1))
    assert "".join(piece for _, piece in parts) == text
    order = [side for side, _ in parts]
    assert order == sorted(order), "train comes before val"


def test_a_document_is_cut_behind_a_lines_end() -> None:
    parts = list(sides(_document("one\ntwo\nthree\nfour\n"), 0.4, count=1))
    assert parts == [("train", "one\ntwo\nthree\n"), ("val", "four\n")]


def test_of_many_documents_some_are_held_out_whole_and_adding_others_moves_none() -> None:
    documents = [_document("text", f"file{index}") for index in range(1000)]

    def held_out(count: int) -> set[str]:
        return {
            document.name
            for document in documents[:count]
            if [side for side, _ in sides(document, 0.1, count)] == ["val"]
        }

    assert 60 < len(held_out(1000)) < 140
    assert held_out(BY_NAME) == {
        name for name in held_out(1000) if int(name.removeprefix("file")) < BY_NAME
    }
