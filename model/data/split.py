"""Split: the part of each document that is trained on, and the part that is held out.

The held-out share is measured in bytes. A document larger than the whole held-out share is divided,
and its end is held out. (If the ends would be short, few documents are divided: see SHORTEST_END.)
Every other document is either trained on or held out as a whole, depending on its lot: a number
derived from the sha256 of its content.
The documents with the lowest lots are held out. So two equal documents are on the same side
(training or validation), and when documents are added, few others change sides. (For Python's own
text the lot is computed from the file's name, because contents change between Python versions. That
text has three pairs of equal files, 700 bytes in all; the two files of a pair may end up on
different sides.)
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from logitd.model.data.sources.document import Document
from logitd.model.data.special_names import SpecialNames

Side = Literal["train", "val"]
Numbers = npt.NDArray[Any]  # one for each distinct document
NO_NAMES = SpecialNames()
SHORTEST_END = 1000
"""Number of bytes (or ids) that the held-out end of a divided document should have. If the end
would be shorter, the document is not divided, unless it and its copies are together at least twice
as large as the held-out share. Of such documents, those with the lowest lots are divided: as many
as can have ends of this length on average, at least one. The others are trained on."""


@dataclass(frozen=True)
class Split:
    """The division of a text. `ends` has the share of a document that is held out, by its lot; it
    may be 0. All other documents are held out if their lot is less than `below`."""

    ends: Mapping[int, float]
    below: int

    def trained(self, lot: int, size: int) -> int:
        """The length of a document's training part, in the same unit as `size`."""
        if lot in self.ends:
            return int(size * (1 - self.ends[lot]))
        return 0 if lot < self.below else size

    def description(self, val_fraction: float, lots: Set[int]) -> dict[str, Any]:
        """The split of the documents with these lots, as JSON. Lots are the first 16 hexadecimal
        digits of a sha256. `ends` lists the shares that differ from `val_fraction`."""
        ends = {f"{lot:016x}": self.ends[lot] for lot in sorted(self.ends.keys() & lots)}
        others = {digits: share for digits, share in ends.items() if share != val_fraction}
        return {
            "below": f"{self.below:016x}",
            "divided": [digits for digits in ends if digits not in others],
            **({"ends": others} if others else {}),
        }

    @classmethod
    def described(cls, val_fraction: float, description: Mapping[str, Any]) -> Self:
        """Read what `description` returned. Raises KeyError, TypeError or ValueError."""
        shares = dict.fromkeys(description["divided"], val_fraction)
        shares |= dict(description.get("ends", {}))
        ends = {int(digits, 16): float(share) for digits, share in shares.items()}
        return cls(ends, int(description["below"], 16))


def plan_split(documents: Iterable[tuple[int, int]], val_fraction: float) -> Split:
    """The split whose held-out share is nearest to `val_fraction`. `documents` are pairs of lot and
    size. Takes 16 bytes of memory per document."""
    columns = array("Q"), array("Q")
    for document in documents:
        for column, value in zip(columns, document, strict=True):
            column.append(value)
    every, sizes = (np.array(column, dtype=np.uint64) for column in columns)
    lots, first, place, copies = np.unique(  # in ascending order
        every, return_index=True, return_inverse=True, return_counts=True
    )
    together = np.bincount(place, weights=sizes, minlength=len(lots))  # sizes of copies add up
    wanted = val_fraction * together.sum()
    long = sizes[first] * val_fraction >= SHORTEST_END
    large = (together >= 2 * wanted) & (together > 0)
    divided = long & (large | (sizes[first] > wanted))
    ends = dict.fromkeys(lots[divided].tolist(), val_fraction)
    if (short := large & ~long).any():
        ends |= _longer_ends(lots[short], copies[short], together[short], val_fraction)
    in_parts = divided | short
    whole, rest = lots[~in_parts], together[~in_parts]
    held_out = np.concatenate([[0.0], np.cumsum(rest)])
    count = int(np.abs(held_out - val_fraction * rest.sum()).argmin())
    below = int(whole[count]) if count < len(whole) else 0
    return Split(ends, below)


def _longer_ends(
    lots: Numbers, copies: Numbers, together: Numbers, share: float
) -> dict[int, float]:
    """The share held out of each document, by lot, if only the first documents are divided. All
    documents together have the held-out share `share`. `together` is the size of all copies."""
    wanted = share * together.sum()
    count = int(np.searchsorted(np.cumsum(copies), wanted / SHORTEST_END, side="right"))
    count = max(1, count)
    longer = float(wanted / together[:count].sum())
    return {lot: longer if index < count else 0.0 for index, lot in enumerate(lots.tolist())}


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
