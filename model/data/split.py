"""Split: the part of each document that is trained on, and the part that is held out.

The held-out share is measured in bytes. A document larger than the whole held-out share is divided
(see SHORTEST_END for an exception), and its end is held out. Every other document is either trained
on or held out as a whole, depending on its lot: a number derived from the sha256 of its content.
The documents with the lowest lots are held out. So two equal documents are on the same side
(training or validation), and when documents are added, few others change sides. (For Python's own
text the lot is computed from the file's name, because contents change between Python versions. That
text has three pairs of equal files, 700 bytes in all; the two files of a pair may end up on
different sides.)
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from logitd.model.data.sources.document import Document
from logitd.model.data.special_names import SpecialNames

Side = Literal["train", "val"]
NO_NAMES = SpecialNames()
SHORTEST_END = 1000
"""Minimum number of bytes (or ids) in the held-out end of a divided document. If the end would be
shorter, the document is divided only if it and its copies are together at least twice as large as
the held-out share."""


@dataclass(frozen=True)
class Split:
    """The division of a text. Documents whose lot is in `divided` are trained on except for their
    end. All other documents are held out if their lot is less than `below`."""

    val_fraction: float
    divided: frozenset[int]
    below: int

    def trained(self, lot: int, size: int) -> int:
        """The length of a document's training part, in the same unit as `size`."""
        if lot in self.divided:
            return int(size * (1 - self.val_fraction))
        return 0 if lot < self.below else size

    def description(self) -> dict[str, Any]:
        """The lots as JSON: each as the 16 hexadecimal digits that its sha256 begins with."""
        return {
            "below": f"{self.below:016x}",
            "divided": [f"{lot:016x}" for lot in sorted(self.divided)],
        }

    @classmethod
    def described(cls, val_fraction: float, description: Mapping[str, Any]) -> Self:
        """Read what `description` returned. Raises KeyError, TypeError or ValueError."""
        divided = frozenset(int(digits, 16) for digits in description["divided"])
        return cls(val_fraction, divided, int(description["below"], 16))


def plan_split(documents: Iterable[tuple[int, int]], val_fraction: float) -> Split:
    """The split whose held-out share is nearest to `val_fraction`. `documents` are pairs of lot and
    size. Takes 16 bytes of memory per document."""
    columns = array("Q"), array("Q")
    for document in documents:
        for column, value in zip(columns, document, strict=True):
            column.append(value)
    every, sizes = (np.array(column, dtype=np.uint64) for column in columns)
    lots, first, place = np.unique(every, return_index=True, return_inverse=True)  # ascending
    together = np.bincount(place, weights=sizes, minlength=len(lots))  # sizes of copies add up
    wanted = val_fraction * together.sum()
    # A document whose end would be too short is not divided, unless the document and its copies are
    # together at least twice as large as the share.
    long = sizes[first] * val_fraction >= SHORTEST_END
    divided = (long & (sizes[first] > wanted)) | (together >= 2 * wanted)
    whole, rest = lots[~divided], together[~divided]
    held_out = np.concatenate([[0.0], np.cumsum(rest)])
    count = int(np.abs(held_out - val_fraction * rest.sum()).argmin())
    below = int(whole[count]) if count < len(whole) else 0
    return Split(val_fraction, frozenset(lots[divided].tolist()), below)


def split_text(documents: Iterable[Document], val_fraction: float) -> Split:
    """Plan the split of documents, measuring their sizes in bytes. Reads every document."""
    return plan_split(map(_lot_and_size, documents), val_fraction)


def sides(
    document: Document, split: Split, names: SpecialNames = NO_NAMES
) -> Iterator[tuple[Side, str]]:
    """The pieces of a document, each with its side, "train" or "val". None of `names` is divided.
    Reads the document twice."""
    document = names.whole(document)
    lot, size = _lot_and_size(document)
    cut, at = split.trained(lot, size), 0
    for piece in document.pieces():
        raw = piece.encode()
        here = 0
        if at < cut < at + len(raw):
            here = _line_end(raw, cut - at, cut - at + (size - cut) // 2)
            here = len(piece[: names.before(piece, len(raw[:here].decode()))].encode())
        at += len(raw)
        if here:
            yield "train", raw[:here].decode()
            yield "val", raw[here:].decode()
        else:
            yield "train" if at <= cut else "val", piece


def lot(document: Document) -> int:
    """The lot of a document: a number below 2^64, derived from its name or its content."""
    return _lot_and_size(document)[0]


def lot_of(parts: Iterable[bytes]) -> int:
    """The lot of a document, computed from its content, which is passed in parts."""
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
    for separator in (b"\n", b" "):
        if found := raw.find(separator, at, end) + 1:
            return found
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
