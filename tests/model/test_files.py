"""Files: irregular files are refused at once, and a write either completes or leaves nothing."""

import os
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.files import (
    FileError,
    atomic_folder,
    open_regular,
    parse_json,
    read_regular,
    read_text,
    require_new,
    write_whole,
    written_to,
)
from tests.model.full_disk import files_of_at_most


def odd_files(folder: Path) -> dict[str, Path]:
    """Irregular files, by the names that messages use for them."""
    folder.mkdir(exist_ok=True)
    (folder / "directory").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(folder)  # a socket's path must be short
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


def test_looping_links_and_missing_files_raise_the_system_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(loop, 100)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 100)


def test_pipe_that_replaces_a_checked_file_is_refused(
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
def test_read_is_bounded(tmp_path_factory: pytest.TempPathFactory, size: int, most: int) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(b"x" * size)
    if size <= most:
        assert read_regular(path, most) == b"x" * size
    else:
        with pytest.raises(FileError, match=f"{size} bytes.*{most}"):
            read_regular(path, most)


def test_read_of_unknown_size_is_bounded() -> None:
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert b"python" in read_regular(path, 2**22)
    with pytest.raises(FileError, match="100 bytes"):
        read_regular(path, 100)


def test_refused_file_leaves_no_descriptor(tmp_path: Path) -> None:
    paths = odd_files(tmp_path).values()
    before = len(os.listdir("/proc/self/fd"))
    for path in paths:
        with pytest.raises(FileError):
            open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_line_ends_are_normalized_as_by_python(tmp_path: Path) -> None:
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
def test_unwritable_json_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text.encode())


def test_json_keeps_its_values() -> None:
    text = '{"a": [1, -9223372036854775808, 1.5, 1e300, null, true, "\\ud83d\\ude00"]}'
    assert parse_json(text.encode()) == {"a": [1, -(2**63), 1.5, 1e300, None, True, "\U0001f600"]}


def test_failed_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"first")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        write_whole(path, b"x" * 101)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"first")]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("8 requested and 2 written"), "8 requested and 2 written"),  # NumPy's
    ],
)
def test_write_error_names_the_file_and_the_reason(error: OSError, reason: str) -> None:
    with (
        pytest.raises(FileError, match=f"new cannot be written: .*{reason}"),
        written_to(Path("new")),
    ):
        raise error


def test_unwritable_destination_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="file already exists: choose another path"):
        require_new(tmp_path / "file")
    with pytest.raises(FileError, match="file/new cannot be written: Not a directory"):
        require_new(tmp_path / "file" / "new")
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(FileError, match="link already exists"):
        require_new(tmp_path / "link")
    with pytest.raises(FileError, match="new cannot be written: No such file"):
        require_new(tmp_path / "link" / "new")
    require_new(tmp_path / "a" / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_folder_appears_complete(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with atomic_folder(path) as aside:
        (aside / "file").write_text("x")
        assert not path.exists()
    assert (path / "file").read_text() == "x"
    assert os.stat(path).st_mode & 0o777 == 0o755
    assert [each.name for each in path.parent.iterdir()] == ["b"]


def test_files_in_subfolders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    plain = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_folder(tmp_path / "a") as aside:
        (aside / "code").mkdir()
        (aside / "code" / "model.py").write_text("x")
    assert {Path(path).name for path in synced} >= {"code", "model.py"}


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(1)])
def test_failed_folder_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "b") as aside:
            (aside / "file").write_text("x")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []
