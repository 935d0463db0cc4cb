"""Documents: named texts that are read in pieces, so that a text may be larger than memory."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logitd.model.data.errors import DataError
from logitd.model.data.shards import text_bytes_of

PIECE = 100_000
"""Maximum number of characters in a piece. It is limited because a million consecutive spaces
overflow the stack of some tokenizers."""

_LAST_SPACE = re.compile(r"\s\S*\Z")

LONGEST_PART = 2**26
"""Maximum number of characters between two separators. All of them are in memory at once."""


@dataclass(frozen=True)
class Document:
    """A named text. Each call to `pieces` reads it from the start, in pieces of at most PIECE
    characters."""

    name: str
    pieces: Callable[[], Iterator[str]]
    size: int | None = None  # in bytes; None: unknown until it is read
    drawn_by_name: bool = False  # its name, not its content, decides whether it is held out

    def count_bytes(self) -> int:
        """Number of bytes in the document. The document is read only if its size is unknown."""
        return self.size if self.size is not None else sum(map(_size, self.pieces()))


class Documents:
    """The documents of several sources. Each iteration opens the sources again, and yields one
    document at a time."""

    def __init__(self, *sources: Callable[[], Iterable[Document]]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            yield from source()


def split_documents(documents: Iterable[Document], separator: str) -> Iterator[Document]:
    """Split documents at a separator. Line breaks at the beginning and end of each part are
    removed. Raises DataError at the end if no document has the separator."""
    found = False

    def texts_of(document: Document) -> Iterator[str]:
        nonlocal found
        for number, text in enumerate(_between(document, separator)):
            found = found or number > 0
            yield text.strip("\r\n")

    for document in documents:
        texts = texts_of(document)
        for number, text in enumerate(filter(None, texts), start=1):
            name = f"{document.name}, part {number}"
            yield text_document(name, text, drawn_by_name=document.drawn_by_name)
    if not found:
        raise DataError(
            f"the separator {separator!r} (--split-at) is nowhere in the text: correct it, or "
            "remove it; in a shell a line break is $'\\n'"
        )


def _between(document: Document, separator: str) -> Iterator[str]:
    rest = ""
    for piece in document.pieces():
        *whole, rest = (rest + piece).split(separator)
        yield from whole
        if len(rest) > LONGEST_PART:
            raise DataError(
                f"{document.name} has more than {LONGEST_PART:,} characters without the separator "
                f"{separator!r} (--split-at)"
            )
    yield rest


@dataclass(frozen=True)
class Text:
    """Documents, or shards that are already tokenized, with facts for the checkpoint's record."""

    name: str
    licence: str
    documents: Iterable[Document]
    built_in: bool = False  # only Python's own text
    python: bool = False  # contains Python's own text, in whole documents
    downloads: Sequence[Mapping[str, Any]] = ()  # url, sha256 and bytes of each file
    shards: Sequence[Path] = ()

    def count_bytes(self, limit: float) -> int:
        """Number of bytes of text in all documents or shards. Documents are read only until the
        count exceeds `limit`, so a result above `limit` is a lower bound."""
        if self.shards:
            return sum(map(text_bytes_of, self.shards))
        total = 0
        for document in self.documents:
            known = document.size is not None
            for size in [document.size or 0] if known else map(_size, document.pieces()):
                total += size
                if total > limit:
                    return total
        return total


def text_document(name: str, text: str, **facts: Any) -> Document:
    return Document(name, partial(pieces_of, text), len(text.encode()), **facts)


def pieces_of(text: str) -> Iterator[str]:
    """Divide a text in memory into pieces, at borders of words if possible."""
    at = 0
    while len(text) - at > PIECE:
        piece = text[at : at + PIECE]
        end = word_border(piece)
        yield piece[:end]
        at += end
    if at < len(text):
        yield text[at:]


def word_border(text: str) -> int:
    """The length of a text up to its last border of a word: after the last line break, or if there
    is none, before the last white space, which most vocabularies store with the next word. The
    whole length if there is no border."""
    if end := text.rfind("\n") + 1:
        return end
    found = _LAST_SPACE.search(text, 1)
    return found.start() if found else len(text)


def beginning(documents: Iterable[Document], characters: int) -> str:
    """At most the first `characters` characters of the documents, which are joined by line breaks.
    A longer text ends at a border of a word."""
    text = ""
    for document in documents:
        text += "\n" * bool(text)
        for piece in document.pieces():
            text += piece
            if len(text) > characters:
                return text[: word_border(text[:characters])]
    return text


def _size(piece: str) -> int:
    return len(piece.encode())
