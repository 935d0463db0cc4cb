"""Split: the part of each document that is trained on, and the part that is held out.

The held-out share is measured in bytes. A document that is larger than all that is to be held out
is divided: its end is held out. Of the other documents, whole ones are held out. The sha256 of a
document is its lot, and the lowest lots are held out first. So documents of the same content are
divided alike or on one side, and adding documents moves few others. (For Python's own text the
name decides, because the content changes from one Python to the next; three of its pairs of files
are equal, 700 bytes.) Does not tokenise.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from logitd.model.data.sources.document import Document

Side = Literal["train", "val"]
SHORTEST_END = 1000
"""Bytes or ids from which the end of a document is worth holding out on its own."""


@dataclass(frozen=True)
class Split:
    """The division of a text: of the documents with `divided` lots the end is held out, of the
    others those whose lot is less than `below`."""

    val_fraction: float
    divided: frozenset[int]
    below: int

    def trained(self, lot: int, size: int) -> int:
        """The length of the beginning of a document that is trained on, in the unit of `size`."""
        if lot in self.divided:
            return int(size * (1 - self.val_fraction))
        return 0 if lot < self.below else size


def plan_split(documents: Iterable[tuple[int, int]], val_fraction: float) -> Split:
    """The split of documents, given by lot and size, that holds out nearest to `val_fraction`.
    Takes 16 bytes of memory for each."""
    columns = array("Q"), array("Q")
    for document in documents:
        for column, value in zip(columns, document, strict=True):
            column.append(value)
    every, sizes = (np.array(column, dtype=np.uint64) for column in columns)
    lots, first, place = np.unique(every, return_index=True, return_inverse=True)  # ascending
    together = np.bincount(place, weights=sizes, minlength=len(lots))  # copies of a text add up
    wanted = val_fraction * together.sum()
    # What is short is better held out whole, unless that is twice too much.
    long = sizes[first] * val_fraction >= SHORTEST_END
    divided = (long & (sizes[first] > wanted)) | (together >= 2 * wanted)
    whole, rest = lots[~divided], together[~divided]
    held_out = np.concatenate([[0.0], np.cumsum(rest)])
    count = int(np.abs(held_out - val_fraction * rest.sum()).argmin())
    below = int(whole[count]) if count < len(whole) else 0
    return Split(val_fraction, frozenset(lots[divided].tolist()), below)


def split_text(documents: Iterable[Document], val_fraction: float) -> Split:
    """`plan_split` of documents by their bytes, by reading all of them."""
    return plan_split(map(_lot_and_size, documents), val_fraction)


def sides(document: Document, split: Split) -> Iterator[tuple[Side, str]]:
    """A document's pieces, each with its side. Reads the document twice."""
    lot, size = _lot_and_size(document)
    cut, at = split.trained(lot, size), 0
    for piece in document.pieces():
        raw = piece.encode()
        here = 0
        if at < cut < at + len(raw):
            here = _line_end(raw, cut - at, cut - at + (size - cut) // 2)
        at += len(raw)
        if here:
            yield "train", raw[:here].decode()
            yield "val", raw[here:].decode()
        else:
            yield "train" if at <= cut else "val", piece


def lot(document: Document) -> int:
    """A number below 2^64 that decides the side of a document, from its name or its content. The
    lowest are held out first, whatever the val_fraction."""
    return _lot_and_size(document)[0]


def lot_of(parts: Iterable[bytes]) -> int:
    """The lot of a content."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8])


def _lot_and_size(document: Document) -> tuple[int, int]:
    if document.drawn_by_name:
        return lot_of([document.name.encode()]), document.count_bytes()
    size = 0

    def parts() -> Iterator[bytes]:
        nonlocal size
        for piece in document.pieces():
            raw = piece.encode()
            size += len(raw)
            yield raw

    return lot_of(parts()), size


def _line_end(raw: bytes, at: int, end: int) -> int:
    """The first position from `at` on that follows a line break or else a space before `end`, or
    else one between characters."""
    for separator in (b"\n", b" "):
        if found := raw.find(separator, at, end) + 1:
            return found
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
