"""Files that are not what their names promise: a sentence at once, whatever is there."""

import os
import re
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.files import (
    FileError,
    open_regular,
    parse_json,
    read_regular,
    read_text,
    write_whole,
    written_to,
)
from tests.model.full_disk import files_of_at_most


def odd_files(folder: Path) -> dict[str, Path]:
    """Files that are not regular, by what a message calls them; none is removed afterwards."""
    folder.mkdir(exist_ok=True)
    (folder / "directory").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(folder)  # a socket's path is short
        server.bind("socket")
        os.chdir(before)
    return {
        "a directory": folder / "directory",
        "a pipe (FIFO)": folder / "pipe",
        "a device": folder / "zero",
        "a socket": folder / "socket",
    }


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    for kind, path in odd_files(tmp_path).items():
        with pytest.raises(FileError, match=f"{path}.*{re.escape(kind)}") as caught:
            read_regular(path, 100)
        assert caught.value.strerror == str(caught.value)


def test_links_to_themselves_and_missing_files_are_the_systems_errors(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(loop, 100)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 100)


def test_pipe_that_takes_a_files_place_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    regular = path.stat()
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda self: regular)
        with pytest.raises(FileError, match="pipe"):
            open_regular(path)


@given(size=st.integers(0, 300), most=st.integers(0, 300))
def test_no_more_is_read_than_was_said(
    tmp_path_factory: pytest.TempPathFactory, size: int, most: int
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(b"x" * size)
    if size <= most:
        assert read_regular(path, most) == b"x" * size
    else:
        with pytest.raises(FileError, match=f"{size} bytes.*{most}"):
            read_regular(path, most)


def test_size_that_is_not_told_is_bounded_too() -> None:
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert b"python" in read_regular(path, 2**22)
    with pytest.raises(FileError, match="100 bytes"):
        read_regular(path, 100)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    paths = odd_files(tmp_path).values()
    before = len(os.listdir("/proc/self/fd"))
    for path in paths:
        with pytest.raises(FileError):
            open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() >= 1


def test_line_ends_are_those_of_python(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\rc\n\u00e9".encode())
    assert read_text(path) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "deeply"),
        ("1" * 400, "64 bits"),
        ("1" * 10_000, "64 bits"),
        (str(2**63), "64 bits"),
        ("1e400", "1e400"),
        ("-1e400", "-1e400"),
        ("NaN", "NaN"),
        ("[Infinity]", "Infinity"),
        ('{"a": "\\ud800"}', "surrogates"),
        ('{"\\udfff": 1}', "surrogates"),
        ("{", "property name"),
    ],
)
def test_json_that_could_not_be_written_again_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text.encode())


def test_other_json_is_read_as_it_is() -> None:
    text = '{"a": [1, -9223372036854775808, 1.5, 1e300, null, true, "\\ud83d\\ude00"]}'
    assert parse_json(text.encode()) == {"a": [1, -(2**63), 1.5, 1e300, None, True, "\U0001f600"]}


def test_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"first")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        write_whole(path, b"x" * 101)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"first")]


def test_write_error_names_the_file_and_the_reason(tmp_path: Path) -> None:
    """NumPy has no number for a write cut short."""
    said = []
    for error in (OSError(28, "No space left on device"), OSError("8 requested and 2 written")):
        with pytest.raises(FileError) as caught, written_to(tmp_path / "new"):
            raise error
        said.append(str(caught.value))
    assert all(str(tmp_path / "new") in message for message in said)
    assert "No space left on device" in said[0]
    assert "8 requested and 2 written" in said[1]
