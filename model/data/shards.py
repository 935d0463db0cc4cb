"""Shards: token ids on disk, which are memory-mapped, so that a text may be larger than memory.

A shard consists of a header of 64 bytes, the ids, the number of documents (8 bytes) and for each
document the index after its last id (8 bytes). All numbers are little-endian; an id has 2 bytes for
vocabularies up to 65,536, else 4. Shards of version 1 have no documents; the end of text ends them.
The header:

  8 bytes   magic "LOGITDTK"
  4 bytes   version, 2
  4 bytes   bytes per id
  8 bytes   number of ids
  8 bytes   number of bytes of their text, without separators
  32 bytes  sha256 of the tokenizer (`vocabulary.tokenizer_sha256`)

In a run, `data.json` lists the sha256 of each shard (`prepare.py`).
"""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from logitd.model.data.errors import DataError
from logitd.model.files import CONFIG_BYTES, parse_json, read_regular, whole_file

DATA = "data"
"""Folder of the shards in a run directory (`prepare.py`)."""
DESCRIPTION = "data.json"
"""File in that folder that describes the text."""

MAGIC = b"LOGITDTK"
VERSION = 2
WITHOUT_DOCUMENTS = 1
HEADER = struct.Struct("<8sIIQQ32s")
SCANNED = 2**22
"""Number of ids read at a time when a shard without documents is searched for their ends."""


@dataclass(frozen=True)
class Shard:
    """The ids of a text, on disk."""

    path: Path
    tokens: npt.NDArray[Any]  # (count,), uint16 or uint32, read only
    text_bytes: int
    ends: npt.NDArray[np.int64] | None = None  # (D,), index after the last id of each document

    @property
    def count(self) -> int:
        return len(self.tokens)

    def document_ends(self, end_of_text: int) -> npt.NDArray[np.int64]:  # (D,)
        """The index after the last id of each document. The ids after the last end, if any, are one
        more document. Without a list of documents, the id `end_of_text` ends each."""
        found = self.ends
        if found is None:
            parts = (self.tokens[at : at + SCANNED] for at in range(0, self.count, SCANNED))
            ends = [
                at * SCANNED + 1 + np.flatnonzero(p == end_of_text) for at, p in enumerate(parts)
            ]
            found = np.concatenate([np.empty(0, np.int64), *ends])
        whole = not self.count or (found.size and found[-1] == self.count)
        return found if whole else np.append(found, self.count)


class ShardWriter:
    """Appends ids to a shard opened by `write_shard`. `ends` is the index after the last id of each
    document."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.count = self.text_bytes = 0
        self.ends = array("q")
        self._file, self._vocab_size = file, vocab_size

    def append(self, token_ids: Sequence[int] | npt.NDArray[Any], text_bytes: int) -> None:
        """Append the ids of a text of `text_bytes` bytes. Raises DataError for an id outside the
        vocabulary."""
        ids = np.asarray(token_ids, dtype=np.int64)  # (count,)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise outside(ids, self.count, self._vocab_size, "the text")
        # NumPy silently wraps ids that do not fit the dtype, hence the check above.
        self._file.write(ids.astype(self.dtype).tobytes())
        self.count += ids.size
        self.text_bytes += text_bytes

    def end_document(self) -> None:
        """Begin a new document with the next ids, if any were appended to this one."""
        if self.count > (self.ends[-1] if self.ends else 0):
            self.ends.append(self.count)


@contextmanager
def write_shard(path: Path, *, vocab_size: int, tokenizer_sha256: bytes) -> Iterator[ShardWriter]:
    """Open a new shard for writing. The file appears at `path` when the block ends; if the block
    raises an error, no file is left."""
    with whole_file(path) as file:
        file.write(bytes(HEADER.size))
        writer = ShardWriter(file, vocab_size)
        yield writer
        width, count, text_bytes = writer.dtype.itemsize, writer.count, writer.text_bytes
        file.write(len(writer.ends).to_bytes(8, "little"))
        file.write(np.array(writer.ends, dtype="<i8").tobytes())
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, width, count, text_bytes, tokenizer_sha256))


def outside(token_ids: npt.NDArray[Any], first: int, vocab_size: int, name: str) -> DataError:
    """The error for the first of these ids that is outside the vocabulary. The ids begin at index
    `first` of the shard `name`."""
    wrong = (token_ids < 0) | (token_ids >= vocab_size)
    at = int(wrong.argmax())
    return DataError(
        f"token {first + at:,} of {name} has the id {token_ids[at]}, which is outside the "
        f"vocabulary of {vocab_size} ids (0 to {vocab_size - 1})"
    )


def text_bytes_of(path: Path) -> int:
    """Number of bytes of text that a shard encodes. The shard may be written by any tokenizer.
    Raises DataError."""
    return _header(path)[3]


def _header(path: Path) -> tuple[int, int, int, int, bytes]:
    """Read version, bytes per id, number of ids, bytes of text, and sha256 of the tokenizer."""
    size = path.stat().st_size if path.is_file() else -1
    if size < HEADER.size:
        raise DataError(f"{path} is missing or too short to be a shard")
    with path.open("rb") as file:
        magic, version, width, count, text_bytes, sha256 = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC or version not in (WITHOUT_DOCUMENTS, VERSION) or width not in (2, 4):
        raise DataError(
            f"{path} begins with {magic!r}, version {version}, {width} bytes per id; this version "
            f"of logitd reads {MAGIC!r}, version {WITHOUT_DOCUMENTS} or {VERSION}, 2 or 4 bytes"
        )
    return version, width, count, text_bytes, sha256


def open_shard(path: Path, tokenizer_sha256: bytes) -> Shard:
    """Map a shard into memory. Raises DataError if it is truncated or belongs to another tokenizer,
    or if its sha256 is not the one that the description in its folder lists."""
    version, width, count, text_bytes, sha256 = _header(path)
    ends_at = HEADER.size + width * count
    size, expected, ends = path.stat().st_size, ends_at, None
    if version != WITHOUT_DOCUMENTS:
        with path.open("rb") as file:
            file.seek(ends_at)
            expected += 8 + 8 * int.from_bytes(file.read(8), "little")
            if size == expected:
                ends = np.frombuffer(file.read(), dtype="<i8")
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, but its header says that {count} ids and their documents "
            f"take {expected}: it is truncated"
        )
    if ends is not None and not (np.diff(ends, prepend=0, append=count + 1) > 0).all():
        raise DataError(f"{path} is damaged: the ends of its documents are not in ascending order")
    if sha256 != tokenizer_sha256:
        raise DataError(
            f"{path} was written by another tokenizer (sha256 {sha256.hex()[:12]}..., the run's "
            f"is {tokenizer_sha256.hex()[:12]}...), so its ids have different meanings"
        )
    listed = _description(path)["shards"].get(path.name)
    if listed not in (None, (found := shard_sha256(path))):
        raise DataError(
            f"{path} has sha256 {found[:12]}..., but {DESCRIPTION} says {str(listed)[:12]}...: the "
            "file was changed or damaged. Restore it from a copy, or train a new run"
        )
    if count == 0:  # an empty file cannot be mapped
        return Shard(path, np.empty(0, dtype=f"<u{width}"), text_bytes, ends)
    tokens = np.memmap(path, dtype=f"<u{width}", mode="r", offset=HEADER.size, shape=(count,))
    return Shard(path, tokens, text_bytes, ends)


def shard_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def special_tokens_of(path: Path) -> str | None:
    """The encoding of special tokens' names in a shard, "ids" or "text"; None if no description
    states it."""
    document = _description(path)
    return document["record"].get("special_tokens") if path.name in document["shards"] else None


def _description(path: Path) -> dict[str, dict[str, Any]]:
    """The `record` and the `shards` in the description of a shard's folder. Both are empty if it is
    missing or damaged, which `read_prepared` reports."""
    parts: dict[str, dict[str, Any]] = {"record": {}, "shards": {}}
    try:
        document = parse_json(read_regular(path.with_name(DESCRIPTION), CONFIG_BYTES))
    except (OSError, ValueError):
        return parts
    if isinstance(document, dict):
        parts |= {name: document[name] for name in parts if isinstance(document.get(name), dict)}
    return parts
