"""Index: the folder of an extraction, and `index.json`, which lists its contents.

  index.json                  the request, the checkpoint, the data, and the shards
  shard-000000.parquet, ...   shards (`shards.py`), or .safetensors
  extract.lock                names the process that writes; removed when extraction is finished

The index is written before the first shard and after each shard. So a command that is killed at any
moment can be continued: a shard that the index does not list is computed again. The index contains
no times and no traces of interruptions, so the same extraction always produces the same bytes. A
command whose options, checkpoint or data differ from the index cannot continue the folder. A folder
that contains other files is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from logitd.model.extraction.errors import ExtractionError
from logitd.model.files import PART, open_regular, parse_json, read_regular, write_whole
from logitd.model.first_error import first_error
from logitd.model.folder_lock import FolderLock, FolderLocked

INDEX, LOCK = "index.json", "extract.lock"
FORMAT_VERSION = 1
INDEX_BYTES = 2**28
"""Maximum size, in bytes, of the index file, enough for the index of a million shards."""
SHARD = r"^shard-[0-9]{6,}\.(parquet|safetensors)$"
_ASIDE = re.compile(rf"\.(index\.json|{SHARD[1:-1]})" + re.escape(PART))
"""Matches the names of files that were being written when the command was killed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A written shard with `rows` tokens. It ends before the token at `position` in `document`."""

    file: Annotated[str, Field(pattern=SHARD)]
    rows: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str
    document: NonNegativeInt
    position: NonNegativeInt

    @property
    def end(self) -> tuple[int, int]:
        return self.document, self.position


class _Index(BaseModel):
    """The members of the index that are read; the others are only compared."""

    data_name: str
    shards: list[Shard]
    computation: dict[str, Any] = {}


class ExtractionFolder:
    """The folder at `path`, locked until `close`, and its shards. Raises ExtractionError if another
    process is writing to it, if it contains other files, or if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards: list[Shard] = []
        self._facts: dict[str, Any] = {}
        self._complete = False
        self._lock: FolderLock | None = None
        if path.exists() and not path.is_dir():
            raise ExtractionError(f"{path} exists and is not a folder: choose another --out")
        if path.is_dir() and not self._begun:
            self._refuse_others()  # before a lock is written
        self._made = not path.exists()
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = FolderLock(path / LOCK)
            except FolderLocked as error:
                raise ExtractionError(
                    f"{path} is being written by {error.owner}: wait until it has ended, or choose "
                    "another --out"
                ) from error

    @property
    def rows(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def _begun(self) -> bool:
        return (self.path / INDEX).exists()

    def close(self) -> None:
        """Unlock the folder. Removes the lock file of a finished extraction. Also removes the
        folder if it was created for an extraction that did not start."""
        assert self._lock is not None, "locked since it was opened"
        with suppress(OSError):  # the folder may have been removed
            if not self._lock.replaced:
                if self._complete or not self._begun:
                    (self.path / LOCK).unlink(missing_ok=True)
                if self._made and not self._begun:
                    self.path.rmdir()
        self._lock.release()

    def begin(self, facts: Mapping[str, Any], data_name: str) -> None:
        """Start an extraction with these facts, or continue one: check the hash of every listed
        shard, and remove half-written files."""
        self._facts = {"format_version": FORMAT_VERSION, "data_name": data_name, **facts}
        with self._writing():
            if begun := self._begun:
                self._resume(facts)
            self._refuse_others()
            for child in self.path.iterdir():
                if self._is_left_over(child.name):
                    child.unlink()
            if not begun:
                self._write_index()

    def add(self, content: bytes, suffix: str, *, rows: int, end: tuple[int, int]) -> None:
        """Write the next shard and list it in the index. Raises ExtractionError if the folder
        cannot be written, for example because the disk is full."""
        name = self._next_name(suffix)
        shard = Shard(name, rows, len(content), hashlib.sha256(content).hexdigest(), *end)
        with self._writing():
            write_whole(self.path / name, content)
            self.shards.append(shard)
            self._write_index()

    def complete(self) -> None:
        self._complete = True
        with self._writing():
            self._write_index()

    def _write_index(self) -> None:
        document = {
            **self._facts,
            "complete": self._complete,
            "rows": self.rows,
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(self.path / INDEX, (json.dumps(document, indent=1) + "\n").encode())

    def _resume(self, facts: Mapping[str, Any]) -> None:
        path = self.path / INDEX
        try:
            document = parse_json(read_regular(path, INDEX_BYTES))
            begun = _Index.model_validate(document)
        except (OSError, ValueError) as error:
            reason = first_error(error) if isinstance(error, ValidationError) else error
            raise ExtractionError(
                f"{path} is not the index of an extraction ({reason}): choose another --out"
            ) from error
        self.shards = begun.shards
        self._facts["data_name"] = begun.data_name
        # The default number of threads depends on the machine and on --ray.
        begun_with = begun.computation.get("threads")
        threads = f" (with --threads {begun_with})" if begun_with else ""
        if different := list(differences(document, {"format_version": FORMAT_VERSION, **facts})):
            raise ExtractionError(
                f"{self.path} was started with other options: {'; '.join(different)}. Use the same "
                f"options to continue{threads}, or choose another --out"
            )
        for shard in self.shards:
            path = self.path / shard.file
            try:
                with open_regular(path) as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise ExtractionError(
                    f"{path} is listed in {INDEX} but cannot be read ({error.strerror}): put it "
                    "back, or choose another --out"
                ) from error
            if found != shard.sha256:
                raise ExtractionError(
                    f"{path} was damaged or changed: it has {path.stat().st_size:,} bytes, but "
                    f"{INDEX} lists {shard.bytes:,} bytes with another sha256. Choose another --out"
                )

    def _refuse_others(self) -> None:
        known = {INDEX, LOCK, *(shard.file for shard in self.shards)}
        for child in sorted(self.path.iterdir()):
            if child.name not in known and not self._is_left_over(child.name):
                raise ExtractionError(
                    f"{self.path} contains {child.name}, which this extraction did not write: "
                    "choose a new folder for --out"
                )

    def _next_name(self, suffix: str) -> str:
        return f"shard-{len(self.shards):06d}{suffix}"

    def _is_left_over(self, name: str) -> bool:
        """True for a file left by a killed command: incomplete, or not listed in the index."""
        unlisted = {self._next_name(suffix) for suffix in (".parquet", ".safetensors")}
        return bool(_ASIDE.fullmatch(name)) or (self._begun and name in unlisted)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            if self._lock is not None and self._lock.replaced:
                raise ExtractionError(
                    f"{self.path} was removed or moved during the extraction, and another process "
                    "made a new folder of that name. If you moved it, repeat the command with its "
                    "new path as --out"
                )
            yield
        except OSError as error:
            rest = "; finished shards are kept: repeat the command to continue" * self._begun
            raise ExtractionError(
                f"{self.path} cannot be written: {error.strerror or error}. Free disk space, fix "
                f"the error, or choose another --out{rest}"
            ) from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Describe each entry of `now` whose value in `before` is different, and each that a mapping in
    `now` lacks. The descriptions have both values."""
    for name in {**before, **now} if path else now:
        old, value = before.get(name), now.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            yield from differences(old, value, f"{path}{name}.")
        elif old != value:
            yield f"{path}{name} was {json.dumps(old)} and is {json.dumps(value)}"
