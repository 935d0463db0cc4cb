"""Index: the folder of an extraction, and `index.json`, which says what is in it.

  index.json                  what was asked for, of which checkpoint and data, and the shards
  shard-000000.parquet, ...   shards (`shards.py`), or .safetensors
  extract.lock                who writes it now; not there when it is finished

The index is written before the first shard and after each, so that a kill at any moment leaves a
folder that can be gone on with: a shard that it does not list is computed again. It has no times
and says nothing of interruptions: the same extraction ends in the same bytes. Who goes on is held
against what it says, and refused with what differs; a file that is not of the extraction is not
touched, and refused by name.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from logitd.model.extraction.errors import ExtractionError
from logitd.model.files import PART, parse_json, read_regular, write_whole
from logitd.model.folder_lock import FolderLock, FolderLocked

INDEX, LOCK = "index.json", "extract.lock"
FORMAT_VERSION = 1
INDEX_BYTES = 2**28
"""More than a million shards take."""
_ASIDE = re.compile(r"\.(index\.json|shard-\d{6,}\.(parquet|safetensors))" + re.escape(PART))
"""What a kill may leave of a file that was being written."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One that is written.

    rows      tokens that it has
    document, position   the place behind its last token
    """

    file: str
    rows: int
    bytes: int
    sha256: str
    document: int
    position: int

    @property
    def end(self) -> tuple[int, int]:
        return self.document, self.position


class ExtractionFolder:
    """The folder at `path`, locked until `release`, and its shards.

    Raises ExtractionError where another process writes it, where it holds something else, or where
    it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards: list[Shard] = []
        self._facts: dict[str, Any] = {}
        if path.exists() and not path.is_dir():
            raise ExtractionError(f"{path} exists and is not a folder: choose another --out")
        if path.is_dir() and not (path / INDEX).exists():
            self._refuse_others()  # nothing is written where no extraction is
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path / LOCK)
        except FolderLocked as error:
            raise ExtractionError(
                f"{path} is being written by {error.owner}: wait until that has ended, or choose "
                "another --out"
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error

    def release(self, *, finished: bool) -> None:
        """Let others in; nothing but files of the extraction is left where it is finished, and
        nothing at all where it has not begun."""
        begun = (self.path / INDEX).exists()
        if finished or not begun:
            (self.path / LOCK).unlink(missing_ok=True)
        if self._made and not begun:
            self.path.rmdir()
        self._lock.release()

    def begin(self, facts: Mapping[str, Any], data_name: str) -> None:
        """Take up an extraction with these facts, or start one: what a kill left half written is
        removed, and every shard that is listed is held against its hash."""
        self._facts = {"format_version": FORMAT_VERSION, "data_name": data_name, **facts}
        try:
            if (self.path / INDEX).exists():
                self._take_up(facts)
                self._refuse_others()
                self._sweep()
            else:
                self._refuse_others()
                self._sweep()
                self._write(complete=False)
        except OSError as error:
            raise self._unwritable(error) from error

    def shard_name(self, suffix: str) -> str:
        """The name of the next shard."""
        return f"shard-{len(self.shards):06d}{suffix}"

    def add(self, content: bytes, suffix: str, *, rows: int, end: tuple[int, int]) -> Shard:
        """Write the next shard, and list it. Raises ExtractionError where the disk is full."""
        name = self.shard_name(suffix)
        shard = Shard(name, rows, len(content), hashlib.sha256(content).hexdigest(), *end)
        try:
            write_whole(self.path / name, content)
            self.shards.append(shard)
            self._write(complete=False)
        except OSError as error:
            raise self._unwritable(error) from error
        return shard

    def complete(self) -> None:
        """Say in the index that no shard is to come."""
        try:
            self._write(complete=True)
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def rows(self) -> int:
        """Tokens in all shards."""
        return sum(shard.rows for shard in self.shards)

    def _write(self, *, complete: bool) -> None:
        document = {
            **self._facts,
            "complete": complete,
            "rows": self.rows,
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(self.path / INDEX, (json.dumps(document, indent=1) + "\n").encode())

    def _take_up(self, facts: Mapping[str, Any]) -> None:
        document = self._read()
        if different := list(differences(document, {"format_version": FORMAT_VERSION, **facts})):
            raise ExtractionError(
                f"{self.path} was begun otherwise: {'; '.join(different)}. Ask for the same to go "
                f"on with it{_threads_flag(document, facts)}, or choose another --out"
            )
        self._facts["data_name"] = document["data_name"]
        for shard in self.shards:
            self._check(shard)

    def _read(self) -> dict[str, Any]:
        path = self.path / INDEX
        try:
            document: dict[str, Any] = parse_json(read_regular(path, INDEX_BYTES))
            self.shards = [Shard(**shard) for shard in document["shards"]]
            document["data_name"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ExtractionError(
                f"{path} is not the index of an extraction ({type(error).__name__}: {error}): "
                "choose another --out"
            ) from error
        return document

    def _check(self, shard: Shard) -> None:
        path = self.path / shard.file
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        except OSError as error:
            raise ExtractionError(
                f"{path} is listed in {INDEX} and cannot be read ({error.strerror}): put it back, "
                "or choose another --out"
            ) from error
        if digest.hexdigest() != shard.sha256:
            raise ExtractionError(
                f"{path} is not what was written: it has {path.stat().st_size:,} bytes with "
                f"another sha256 than {INDEX} says ({shard.bytes:,} bytes). It was damaged or "
                "changed: choose another --out"
            )

    def _refuse_others(self) -> None:
        """Raise ExtractionError for a file that this extraction has not written."""
        for child in sorted(self.path.iterdir()):
            if child.name not in self._known() and not self._is_left_over(child.name):
                raise ExtractionError(
                    f"{self.path} holds {child.name}, which this extraction has not written: "
                    "choose a new folder for --out"
                )

    def _sweep(self) -> None:
        """Remove what was being written when a process was killed."""
        for child in self.path.iterdir():
            if self._is_left_over(child.name):
                child.unlink()

    def _known(self) -> set[str]:
        return {INDEX, LOCK, *(shard.file for shard in self.shards)}

    def _is_left_over(self, name: str) -> bool:
        """Whether a kill may have left this file: half written, or written and not yet listed."""
        next_shards = {self.shard_name(suffix) for suffix in (".parquet", ".safetensors")}
        return bool(_ASIDE.fullmatch(name)) or (
            name in next_shards and (self.path / INDEX).exists()
        )

    def _unwritable(self, error: OSError) -> ExtractionError:
        begun = (self.path / INDEX).exists()
        rest = "; what is written there stays, and the same command goes on" if begun else ""
        return ExtractionError(
            f"{self.path} cannot be written: {error.strerror or error}. Make room or mend it, or "
            f"choose another --out{rest}"
        )


def _threads_flag(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which flag gives the threads of before: their default is not the same on every machine, nor
    with --ray."""
    threads = before.get("computation", {}).get("threads")
    if not threads or threads == now.get("computation", {}).get("threads"):
        return ""
    return f" (--threads {threads})"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What of `now` stands otherwise in `before`, as parts of a sentence."""
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            yield from differences(old, value, f"{path}{name}.")
        elif old != value:
            yield f"{path}{name} was {json.dumps(old)} and is {json.dumps(value)}"
