"""Plan: divides documents into units of work. Their order depends only on the data.

A document is encoded as in training, but without END_OF_TEXT, and cut into windows of at most the
model's context. Window k begins at token k * stride. Values are extracted for the counted tokens of
a window: the tokens that the previous window did not contain. The tokens before them are context.
So each token is counted once, with at least window - stride tokens before it, or with all earlier
tokens of the document.

The units are in the order of the documents, and fill one shard after another; no unit is divided.
They are not sorted by length, because the engine does not pad prompts to equal lengths. Documents
are read as a stream, so memory does not grow with the data.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from logitd.model.data.sources.document import Document
from logitd.model.data.special_names import SpecialNames
from logitd.model.data.vocabulary import encode
from logitd.model.extraction.errors import ExtractionError
from logitd.model.text.tokenizer import Tokenizer

MOST_POSITIONS = 2**31 - 1
"""Maximum number of tokens of a document."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of a document.

    document   index of the document in the data
    source     name of the document: a file, and the line or row in it
    start      position in the document of the window's first token
    context    number of tokens at the start of the window that an earlier unit counts
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
        """Document and position of the first counted token."""
        return self.document, self.start + self.context

    @property
    def end(self) -> tuple[int, int]:
        """Document, and the position after the unit's last token."""
        return self.document, self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of at most `length` tokens, each beginning `stride` tokens after the previous one."""

    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Size and hash of the data."""

    sha256: str  # of names and contents
    documents: int
    bytes: int


def choose_windows(context_length: int, stride: int | None, *, predicts: bool) -> Windows:
    """Windows as long as the model's context. If `predicts`, the values of a counted token are
    predictions of it, so the window must have a token before it. Raises ExtractionError for a
    stride that would leave tokens out."""
    widest = context_length - 1 if predicts else context_length
    stride = widest if stride is None else stride
    if not 1 <= stride <= widest:
        reason = ", the first of which only predicts the second" if predicts else ""
        raise ExtractionError(
            f"stride is {stride}, but a window has {context_length} tokens{reason}: set a "
            f"stride from 1 to {widest}"
        )
    return Windows(context_length, stride)


class DataReader:
    """Reads all documents once, in order, and computes their survey at the same time. Comparing the
    surveys of two readings shows whether the data changed in between."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self._digest = hashlib.sha256()
        self.documents = 0
        self.bytes = 0  # so far

    def __iter__(self) -> Iterator[tuple[int, str, Iterator[str]]]:
        """Yield index, name and pieces of each document. The caller reads all pieces before it
        continues."""
        for document in self._documents:
            name = document.name.encode(errors="surrogateescape")
            content = hashlib.sha256()
            # A file name may be invalid UTF-8, which a column of texts cannot contain.
            yield self.documents, name.decode(errors="replace"), self._pieces(document, content)
            # All hashes have the same length, so their borders in the digest are unambiguous.
            self._digest.update(hashlib.sha256(name).digest() + content.digest())
            self.documents += 1

    def _pieces(self, document: Document, content: "hashlib._Hash") -> Iterator[str]:
        for piece in document.pieces():
            raw = piece.encode()
            content.update(raw)
            self.bytes += len(raw)
            yield piece

    def survey(self) -> Survey:
        """The survey of the documents. Call this after reading the last one."""
        return Survey(self._digest.hexdigest(), self.documents, self.bytes)


def survey(documents: Iterable[Document]) -> Survey:
    """Read all documents, and return their survey."""
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
    """The units whose first counted token is at or after `begin`, the (document, position) at which
    the last finished unit ended. Earlier documents are read but not encoded. Raises DataError for
    text that the vocabulary cannot encode.
    """
    names = SpecialNames(tokenizer.special_tokens)
    for number, name, pieces in reader:
        if number < begin[0]:
            for _ in pieces:
                pass
            continue
        encoded = (
            encode(tokenizer, piece, special_ids=special_ids) for piece in names.pieces(pieces)
        )
        for unit in document_units(number, name, encoded, windows):
            if unit.place >= begin:
                yield unit


def document_units(
    document: int, source: str, parts: Iterable[Sequence[int]], windows: Windows
) -> Iterator[Unit]:
    """The windows of one document, whose token ids are given in parts."""
    held: list[int] = []  # tokens from `start` on
    start = counted = 0  # positions; tokens before `counted` are counted
    for part in parts:
        held += part
        if start + len(held) > MOST_POSITIONS:
            raise ExtractionError(
                f"{source} has more than {MOST_POSITIONS:,} tokens, but positions are stored in 32 "
                "bits: split it into several documents"
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
    """Group units into shards of at most `shard_tokens` counted tokens. A unit with more counted
    tokens than that has a shard of its own."""
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
