"""Plan: from documents to units of work, in an order that the data alone decides.

A document is encoded as in training, without END_OF_TEXT, and cut into windows of at most the
model's context. Window k begins at token k * stride and counts the tokens that the window before
does not reach; the others are context. So each token is counted once, and is computed with at least
window - stride tokens before it, in the first window with all of them.

Units follow each other as documents do and fill one shard after the other; no unit is divided.
Nothing is sorted by length, because the engine pads no prompt to the length of another. Documents
are a stream, so memory does not grow with them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from logitd.model.data.sources.document import Document
from logitd.model.data.vocabulary import encode
from logitd.model.extraction.errors import ExtractionError
from logitd.model.text.tokenizer import Tokenizer

MOST_POSITIONS = 2**31 - 1
"""Limit of a document in tokens."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of a document.

    document   index of the document in the data
    source     name of the document: a file, and the line or row in it
    start      position of the first token in the document
    context    number of tokens at the start that an earlier unit counts
    """

    document: int
    source: str
    start: int
    token_ids: tuple[int, ...]
    context: int

    @property
    def counted(self) -> int:
        return len(self.token_ids) - self.context

    @property
    def place(self) -> tuple[int, int]:
        """Document and position of the first token that it counts."""
        return self.document, self.start + self.context

    @property
    def end(self) -> tuple[int, int]:
        """Document and position behind its last token."""
        return self.document, self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of at most `length` tokens, which count `stride` of them."""

    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Size and hash of the data."""

    sha256: str  # of names and contents
    documents: int
    bytes: int


def choose_windows(context_length: int, stride: int | None, *, predicts: bool) -> Windows:
    """Windows of the model's context. With `predicts` each counted token needs one before it in the
    window. Raises ExtractionError for a stride that would leave tokens out."""
    widest = context_length - 1 if predicts else context_length
    stride = widest if stride is None else stride
    if not 1 <= stride <= widest:
        reason = ", the first of which predicts the first counted one" if predicts else ""
        raise ExtractionError(
            f"stride is {stride}, and a window has {context_length} tokens{reason}: give 1 to "
            f"{widest}"
        )
    return Windows(context_length, stride)


class DataReader:
    """Reads documents once, in order, and surveys them on the way, so that a change of the data
    between two readings is noticed."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self._digest = hashlib.sha256()
        self.documents = 0
        self.bytes = 0  # so far

    def __iter__(self) -> Iterator[tuple[int, str, Iterator[str]]]:
        """Index, name and pieces of each document; read all pieces before the next document."""
        for document in self._documents:
            name = document.name.encode(errors="surrogateescape")
            content = hashlib.sha256()
            # A file name may be invalid UTF-8, which a column of texts cannot contain.
            yield self.documents, name.decode(errors="replace"), self._pieces(document, content)
            # Hashes have one length, so no text can imitate the border between two.
            self._digest.update(hashlib.sha256(name).digest() + content.digest())
            self.documents += 1

    def _pieces(self, document: Document, content: "hashlib._Hash") -> Iterator[str]:
        for piece in document.pieces():
            raw = piece.encode()
            content.update(raw)
            self.bytes += len(raw)
            yield piece

    def survey(self) -> Survey:
        """The survey, after the last document."""
        return Survey(self._digest.hexdigest(), self.documents, self.bytes)


def survey(documents: Iterable[Document]) -> Survey:
    """Read all documents for their survey."""
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
    """The units of documents from `begin` on, the (document, position) at which an earlier unit
    ended. Earlier documents are read and not encoded. Raises DataError for text outside the
    vocabulary."""
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
    held: list[int] = []  # tokens from `start` on
    start = counted = 0  # positions; tokens before `counted` are counted
    for part in parts:
        held += part
        if start + len(held) > MOST_POSITIONS:
            raise ExtractionError(
                f"{source} has more than {MOST_POSITIONS:,} tokens, the limit of positions of 32 "
                "bits: cut it into several documents"
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
    """Units in groups of at most `shard_tokens` counted tokens; a larger unit is alone."""
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
