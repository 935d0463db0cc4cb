"""Text: where training documents come from, and which of their parts validate.

Files, folders and globs; and, without any, the text that this Python carries: the reference text
of `pydoc_data.topics` and the sources of the standard library, read as files and never imported.
Documents are read in pieces, so a text may be larger than memory. Everything is UTF-8; what is not
is refused by name. Does not tokenise (`model/training/prepare.py`).
"""

import ast
import glob
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from model.training.config import TrainingError

Side = Literal["train", "val"]

PIECE = 100_000
"""Most characters in a piece. Tokenizers overflow their stack on runs of a million spaces."""

BY_NAME = 20
"""From so many documents on, whole documents are held out; below, the end of each."""

STDLIB_WITHOUT = frozenset(
    (
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
        *("ensurepip", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
    )
)
"""Folders of the standard library that teach little: tests, tables, what is not part of it."""


class TextError(TrainingError):
    """A text that cannot be trained on; the message names the file or the numbers."""


@dataclass(frozen=True)
class Document:
    """A named text. `pieces` reads it anew each time, in order, PIECE characters at most a time."""

    name: str
    size: int  # bytes in UTF-8
    pieces: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Text:
    """Documents with what a checkpoint must say of them."""

    name: str
    licence: str
    documents: Sequence[Document]
    built_in: bool = False


def open_text(data: Sequence[str], licence: str | None) -> Text:
    """The documents that `--data` names, or the built-in text when it names none."""
    if not data:
        return python_text(Path(sysconfig.get_path("stdlib")))
    files = {file.resolve(): file for name in data for file in _files(name)}
    documents = [_file(file, file.as_posix()) for file in files.values() if file.stat().st_size]
    if not documents:
        raise TextError(f"{', '.join(data)}: {len(files)} files, and all are empty")
    more = f" and {len(data) - 3} more" if len(data) > 3 else ""
    return Text(
        name=", ".join(data[:3]) + more,
        licence=licence or "not stated",
        documents=documents,
    )


def python_text(stdlib: Path) -> Text:
    """The reference text and the sources below a standard library's folder."""
    documents = [*_topics(stdlib), *_sources(stdlib)]
    if not documents:
        raise TextError(
            f"{stdlib} holds no Python sources (a frozen or stripped Python): name a text with "
            "--data"
        )
    version = sys.version.split()[0]
    return Text(
        name=f"Python {version}: reference text and standard library sources",
        licence="PSF-2.0 (Python Software Foundation License Version 2)",
        documents=documents,
        built_in=True,
    )


def sides(document: Document, val_fraction: float, count: int) -> Iterator[tuple[Side, str]]:
    """A document's pieces with the side that each is on, one of `count` documents.

    Of many documents some are held out whole, chosen by the hash of their names, so that adding
    others moves none. Of few documents the end of each is held out.
    """
    if count >= BY_NAME:
        held_out = _lot(document) < val_fraction * 2**64
        for piece in document.pieces():
            yield ("val" if held_out else "train"), piece
        return
    cut = int(document.size * (1 - val_fraction))
    at = 0
    for piece in document.pieces():
        raw = piece.encode()
        here = _line_end(raw, cut - at) if at < cut < at + len(raw) else 0
        at += len(raw)
        if here:
            yield "train", raw[:here].decode()
            yield "val", raw[here:].decode()
        elif at <= cut:
            yield "train", piece
        else:
            yield "val", piece


def first_held_out(text: Text) -> list[Document]:
    """Many documents in the order in which `sides` holds them out: of any val_fraction those that
    validate come first."""
    return sorted(text.documents, key=_lot)


def _lot(document: Document) -> int:
    """A number below 2^64 that a document's name has drawn."""
    return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8])


def _line_end(raw: bytes, at: int) -> int:
    """The first place at or after `at` behind a line's end, or at least between characters."""
    if newline := raw.find(b"\n", at) + 1:
        return newline
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _files(name: str) -> list[Path]:
    """The files that one word of `--data` names, in the order of their names."""
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (file for file in path.rglob("*") if file.is_file())
        files = [file for file in below if not _is_hidden(file.relative_to(path))]
        if not files:
            raise TextError(f"the folder {name} holds no files")
    else:
        files = [Path(match) for match in glob.glob(name, recursive=True)]
        files = [file for file in files if file.is_file()]
        if not files:
            raise TextError(f"{name} is no file, no folder and no glob that matches a file")
    return sorted(files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file(path: Path, name: str) -> Document:
    return Document(name=name, size=path.stat().st_size, pieces=partial(_read, path))


def _read(path: Path) -> Iterator[str]:
    """A file in pieces, cut behind a line's end where there is one."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rest = ""
            while block := file.read(PIECE - len(rest)):
                block = rest + block
                cut = block.rfind("\n") + 1 if len(block) == PIECE else len(block)
                cut = cut or len(block)
                yield block[:cut]
                rest = block[cut:]
            if rest:
                yield rest
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason}); "
            "convert it, or name only text, for example 'FOLDER/**/*.txt'"
        ) from error


def _topics(stdlib: Path) -> Iterator[Document]:
    """The topics of Python's `help()`, from the literal dictionary in their source file."""
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(value).items()):
                yield Document(f"topics/{topic}", len(text.encode()), partial(_pieces, text))


def _sources(stdlib: Path) -> Iterator[Document]:
    for path in sorted(_python_files(stdlib)):
        parts = path.relative_to(stdlib).parts
        # Written when Python was built or installed, with the paths of that machine.
        local = parts[-1].startswith("_sysconfigdata") or parts[-1] == "sitecustomize.py"
        if not local and path.stat().st_size:
            yield _file(path, "/".join(parts))


def _python_files(stdlib: Path) -> Iterator[Path]:
    """The sources below the standard library's folder. Folders without are not even entered: one
    of them may hold every installed package."""
    for folder, inner, names in os.walk(stdlib):
        inner[:] = [name for name in inner if name not in STDLIB_WITHOUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
