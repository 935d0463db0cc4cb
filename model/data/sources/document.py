"""Documents: named texts, read in pieces so that one can be larger than memory. All text is
UTF-8. The other modules of this folder find them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logitd.model.data.errors import DataError
from logitd.model.data.shards import text_bytes_of

PIECE = 100_000
"""Most characters in a piece. Tokenizers overflow their stack on runs of a million spaces."""

LONGEST_PART = 2**26
"""Characters of a part of a file that is divided into documents; it is held in memory whole."""


class TextError(DataError):
    """A text that cannot be trained on; the message names the file or the numbers."""


@dataclass(frozen=True)
class Document:
    """A named text. `pieces` reads it anew each time, in order, PIECE characters at most a time."""

    name: str
    pieces: Callable[[], Iterator[str]]
    size: int | None = None  # bytes in UTF-8; None: not known before it is read
    drawn_by_name: bool = False  # its name decides whether it is held out, instead of its content

    def count_bytes(self) -> int:
        """Bytes in UTF-8, by reading it if need be."""
        return self.size if self.size is not None else sum(map(_size, self.pieces()))


class Documents:
    """The documents of several sources, one after the other, opened again by each iteration: of a
    source with a million documents only one is in memory."""

    def __init__(self, *sources: Callable[[], Iterable[Document]]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[Document]:
        for source in self._sources:
            yield from source()


def split_documents(documents: Iterable[Document], separator: str) -> Iterator[Document]:
    """The texts between separators, without the line breaks around these, as documents."""
    for document in documents:
        texts = (text.strip("\r\n") for text in _between(document, separator))
        for number, text in enumerate(filter(None, texts), start=1):
            name = f"{document.name}, part {number}"
            yield text_document(name, text, drawn_by_name=document.drawn_by_name)


def _between(document: Document, separator: str) -> Iterator[str]:
    rest = ""
    for piece in document.pieces():
        *whole, rest = (rest + piece).split(separator)
        yield from whole
        if len(rest) > LONGEST_PART:
            raise TextError(
                f"{document.name} has more than {LONGEST_PART:,} characters without "
                f"{separator!r} (--split-at) between them"
            )
    yield rest


@dataclass(frozen=True)
class Text:
    """Documents and their record for a checkpoint; or shards that are already tokenised."""

    name: str
    licence: str
    documents: Iterable[Document]
    built_in: bool = False  # Python's own text and nothing else
    downloads: Sequence[Mapping[str, Any]] = ()  # url, sha256 and bytes of each
    shards: Sequence[Path] = ()

    def count_bytes(self, limit: float) -> int:
        """Bytes in UTF-8 of all documents or shards, or some number above `limit` if there are
        more: documents of unknown size are read no further than that."""
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
    """A document that is in memory."""
    return Document(name, partial(pieces_of, text), len(text.encode()), **facts)


def pieces_of(text: str) -> Iterator[str]:
    """A text in memory in pieces, cut after a line's end if there is one."""
    at = 0
    while len(text) - at > PIECE:
        end = text.rfind("\n", at, at + PIECE) + 1 or at + PIECE
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]


def beginning(documents: Iterable[Document], characters: int) -> str:
    """The first characters of documents, with a line break between two."""
    text = ""
    for document in documents:
        text += "\n" * bool(text)
        for piece in document.pieces():
            text += piece
            if len(text) >= characters:
                return text[:characters]
    return text


def _size(piece: str) -> int:
    return len(piece.encode())
