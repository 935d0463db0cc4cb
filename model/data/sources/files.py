"""Files: reads the documents in files of all supported types.

  one object per line       JSON lines, one document per line (`records.py`)
  NAME.json, .csv, .tsv     one document per item or row
  NAME.parquet              one document per row
  others                    UTF-8 text, one document per file

All types except Parquet may be compressed with gzip. gzip is recognized by the first bytes, and
JSON lines by the first two lines. Files that are not text are refused.
"""

import glob
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import PIECE, Document, word_border
from logitd.model.data.sources.records import (
    LONGEST_LINE,
    csv_documents,
    is_json_object,
    json_lines,
    json_value,
    parquet_documents,
    tsv_documents,
)

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file. No UTF-8 text begins with them."""
Kind = Literal["text", "json lines", "json", "csv", "tsv", "parquet"]
BY_NAME: dict[str, Kind] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
}
RECORDS = {
    "json lines": json_lines,
    "json": json_value,
    "csv": csv_documents,
    "tsv": tsv_documents,
}
ONLY_TEXT = (
    "convert it to UTF-8 (a text from Windows: iconv -f WINDOWS-1252 -t UTF-8, or -f UTF-16), or "
    "name only text files, for example 'FOLDER/**/*.txt'"
)


def named_files(name: str) -> list[Path]:
    """The files named by one value of `--data`, sorted."""
    path = Path(name)
    if os.path.isfile(path):  # unlike Path's, accepts a name of any length
        return [path]
    if os.path.isdir(path):
        below = list(_below(path))
        missing = f"the folder {name} has no files"
    else:
        below = [Path(match) for match in glob.glob(name, recursive=True)]
        missing = f"{name} is not a file, a folder or a glob that matches a file"
    if lost := next((file for file in below if not file.exists()), None):
        raise DataError(f"{lost} is a link to a file that does not exist: fetch it, or remove it")
    if not (files := [file for file in below if file.is_file()]):
        raise DataError(missing)
    return sorted(files)


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder, except for hidden ones. Links to folders are followed, as in a
    glob, and each folder is read once. Raises DataError for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}")

    seen = set()
    for path, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(path, name) for name in names if not name.startswith("."))


def each_once(files: Iterable[Path]) -> list[Path]:
    return list({file.resolve(): file for file in files}.values())


def documents_of(path: Path, name: str, text_field: str | None) -> Iterator[Document]:
    """Read the documents in a file; an empty file has none. Error messages refer to the file as
    `name`.

    text_field  field of records that contains the text; "" reads every file as plain text; None
                means "text", for commands without the flag (`records.py`)
    """
    with _reading(name):
        kind = "text" if text_field == "" else kind_of(path)
        if kind == "parquet":
            yield from parquet_documents(path, name, text_field)
        elif kind != "text":
            with open_utf8(path) as file:
                yield from RECORDS[kind](file, name, text_field)
        elif _has_text(path):
            size = None if _is_packed(path) else path.stat().st_size
            yield Document(name, partial(_read, path, name), size)


def kind_of(path: Path) -> Kind:
    """The type of a file by its name, or JSON lines by its content."""
    name = Path(path.name.lower().removesuffix(".gz"))
    if known := BY_NAME.get(name.suffix):
        return known
    with open_utf8(path) as file:
        if file.read(PIECE).lstrip("\r\n\t ").startswith("{"):
            file.seek(0)
            lines = iter(partial(file.readline, LONGEST_LINE), "")
            first = islice((line for line in lines if not line.isspace()), 2)
            if all(map(is_json_object, first)):
                return "json lines"
    return "json" if name.suffix == ".json" else "text"


def holds_records(path: Path) -> bool:
    with _reading(path.as_posix()):
        return kind_of(path) != "text"


def documents_of_all(files: Sequence[Path], text_field: str | None) -> Iterator[Document]:
    for file in files:
        yield from documents_of(file, file.as_posix(), text_field)


def open_utf8(path: Path) -> TextIO:
    """Open a plain or compressed file as text, without a byte order mark at its start; line endings
    stay unchanged."""
    if _is_packed(path):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            count = len(error.object) - error.start
            raise DataError(
                f"{name} ends inside a UTF-8 character (byte 0x{error.object[error.start]:02x}): "
                f"if it was cut there, remove that character (head -c -{count}); if it never was "
                f"UTF-8, {ONLY_TEXT}"
            ) from error
        raise DataError(
            f"{name} is not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}): "
            f"{ONLY_TEXT}"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{name} begins like a gzip file but cannot be unpacked ({error}): it is truncated or "
            "damaged"
        ) from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


def _has_text(path: Path) -> bool:
    with open_utf8(path) as file:
        return bool(file.read(1))


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GZIP)) == GZIP


def _read(path: Path, name: str) -> Iterator[str]:
    with _reading(name), open_utf8(path) as file:
        rest = ""
        while block := file.read(PIECE - len(rest)):
            if "\0" in block:
                raise DataError(
                    f"{name} has NUL characters, so it is binary or UTF-16: {ONLY_TEXT}"
                )
            block = rest + block
            cut = word_border(block) if len(block) == PIECE else len(block)
            yield block[:cut]
            rest = block[cut:]
        if rest:
            yield rest
