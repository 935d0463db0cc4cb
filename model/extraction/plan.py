"""Plan: from documents to units of work, in an order that the data alone decides.

A document is encoded as the trainer encodes it, without END_OF_TEXT, and cut into windows of at
most the model's context: window k begins at token k * stride and counts the tokens that the window
before did not reach, so each token of a document is counted exactly once. What it does not count is
context. A token that a window counts is therefore computed with at least window - stride tokens
before it, and in the first window with all of them.

Units follow each other as documents do, and fill one shard after the other: a unit is never
divided. Nothing is sorted by length: the engine computes prompts one after the other in blocks of
32 positions, several a step, and pads none to the length of another. Documents are read as a
stream, so memory does not grow with them. Does not compute.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from logitd.model.data.sources.document import Document
from logitd.model.data.vocabulary import encode
from logitd.model.extraction.errors import ExtractionError
from logitd.model.text.tokenizer import Tokenizer

MOST_POSITIONS = 2**31 - 1
"""Tokens of a document."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of a document.

    document   index in the data
    source     its name: a file, and the line or row where there are several in one
    start      where in the document the first of `token_ids` is, in tokens
    context    how many of them another unit counts
    """

    document: int
    source: str
    start: int
    token_ids: tuple[int, ...]
    context: int

    @property
    def counted(self) -> int:
        """How many of its tokens it counts."""
        return len(self.token_ids) - self.context

    @property
    def place(self) -> tuple[int, int]:
        """Document and position of the first token that it counts."""
        return self.document, self.start + self.context

    @property
    def end(self) -> tuple[int, int]:
        """Document and position behind the last one."""
        return self.document, self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Windows:
    """How documents are cut: `length` tokens at most, `stride` of them counted."""

    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What the data is, known by reading all of it once."""

    documents: int
    bytes: int
    sha256: str  # of all names and contents


def choose_windows(context_length: int, stride: int | None, *, predicts: bool) -> Windows:
    """Windows of the model's context. `predicts`: each counted token needs one before it in the
    window. Raises ExtractionError for a stride that would leave tokens out."""
    widest = context_length - 1 if predicts else context_length
    if stride is None:
        return Windows(context_length, widest)
    if not 1 <= stride <= widest:
        reason = ", one of which the first counted token is predicted from" if predicts else ""
        raise ExtractionError(
            f"stride is {stride}, and a window has {context_length} tokens{reason}: give 1 to "
            f"{widest}"
        )
    return Windows(context_length, stride)


class DataReader:
    """Reads documents once, in order, and knows afterwards what they were: so that a text that
    changes while it is read is noticed."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self._digest = hashlib.sha256()
        self.documents = 0
        self.bytes = 0  # so far

    def __iter__(self) -> Iterator[tuple[int, str, Iterator[str]]]:
        """Index, name and pieces of each document, whose pieces are read to the end before the
        next one is asked for."""
        for document in self._documents:
            name = document.name.encode(errors="surrogateescape")
            content = hashlib.sha256()
            # A file may have a name that is not text; a column of texts cannot have it.
            yield self.documents, name.decode(errors="replace"), self._pieces(document, content)
            # Hashes of one length: no text looks like the border between two.
            self._digest.update(hashlib.sha256(name).digest() + content.digest())
            self.documents += 1

    def _pieces(self, document: Document, content: "hashlib._Hash") -> Iterator[str]:
        for piece in document.pieces():
            raw = piece.encode()
            content.update(raw)
            self.bytes += len(raw)
            yield piece

    def survey(self) -> Survey:
        """What was read, when all of it was."""
        return Survey(self.documents, self.bytes, self._digest.hexdigest())


def survey(documents: Iterable[Document]) -> Survey:
    """Read everything and keep nothing."""
    reader = DataReader(documents)
    for _, _, pieces in reader:
        for _ in pieces:
            pass
    return reader.survey()


def units_of(
    reader: DataReader,
    tokenizer: Tokenizer,
    windows: Windows,
    begin: tuple[int, int] = (0, 0),
    *,
    special_ids: bool = False,
) -> Iterator[Unit]:
    """The units of documents from the place (document, position) on where an earlier unit ended.
    Documents before it are read and not encoded. Raises DataError for what the vocabulary lacks."""
    for number, name, pieces in reader:
        if number < begin[0]:
            for _ in pieces:
                pass
            continue
        encoded = (encode(tokenizer, piece, special_ids=special_ids) for piece in pieces)
        for unit in document_units(number, name, encoded, windows):
            if unit.place >= begin:
                yield unit


def document_units(
    document: int, source: str, parts: Iterable[Sequence[int]], windows: Windows
) -> Iterator[Unit]:
    """The windows of one document, whose token ids come in parts."""
    held: list[int] = []  # from `start` on
    start = counted = 0  # positions; what is before `counted` was counted
    for part in parts:
        held += part
        if start + len(held) > MOST_POSITIONS:
            raise ExtractionError(
                f"{source} has more than {MOST_POSITIONS:,} tokens, which are the most that "
                "positions of 32 bits count: cut it into several documents"
            )
        while len(held) >= windows.length:
            token_ids = tuple(held[: windows.length])
            yield Unit(document, source, start, token_ids, counted - start)
            counted = start + windows.length
            start += windows.stride
            del held[: windows.stride]
    if start + len(held) > counted:
        yield Unit(document, source, start, tuple(held), counted - start)


def shards_of(units: Iterable[Unit], shard_tokens: int) -> Iterator[list[Unit]]:
    """Units in groups of at most so many counted tokens; more only where a single unit has."""
    group: list[Unit] = []
    tokens = 0
    for unit in units:
        if group and tokens + unit.counted > shard_tokens:
            yield group
            group, tokens = [], 0
        group.append(unit)
        tokens += unit.counted
    if group:
        yield group
