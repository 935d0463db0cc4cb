"""Split: which side a piece of text is on, training or validation. No document is on both.

Of many documents some are held out whole. The sha256 of a document decides which, so adding
documents does not move others, and documents of the same content are on the same side. (For
Python's own text the name decides, because the content changes from one Python to the next.) Of few
documents the end of each is held out. Does not tokenise.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from logitd.model.data.sources.document import Document

Side = Literal["train", "val"]
MANY = 20
"""Number of documents from which whole ones are held out, instead of the end of each."""


def are_many(documents: Iterable[Document]) -> bool:
    """Whether whole documents are held out of these. Reads no more of them than it needs."""
    return sum(1 for _ in islice(documents, MANY)) == MANY


def sides(document: Document, val_fraction: float, *, many: bool) -> Iterator[tuple[Side, str]]:
    """A document's pieces, each with its side. `many`: there are many documents."""
    if many:
        side = whole_side(lot(document), val_fraction)
        for piece in document.pieces():
            yield side, piece
        return
    cut = int(document.count_bytes() * (1 - val_fraction))
    at = 0
    for piece in document.pieces():
        raw = piece.encode()
        here = _line_end(raw, cut - at) if at < cut < at + len(raw) else 0
        at += len(raw)
        if here:
            yield "train", raw[:here].decode()
            yield "val", raw[here:].decode()
        else:
            yield "train" if at <= cut else "val", piece


def whole_side(lot: int, val_fraction: float) -> Side:
    """The side of a document, by its number below 2^64."""
    return "val" if lot < val_fraction * 2**64 else "train"


def lot(document: Document) -> int:
    """A number below 2^64 that decides the side of a document, from its name or its content. The
    lowest are held out first, whatever the val_fraction."""
    if document.drawn_by_name:
        return lot_of([document.name.encode()])
    return lot_of(piece.encode() for piece in document.pieces())


def lot_of(parts: Iterable[bytes]) -> int:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8])


def _line_end(raw: bytes, at: int) -> int:
    """The first position from `at` on that follows a line break, or else one between characters."""
    if newline := raw.find(b"\n", at) + 1:
        return newline
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
