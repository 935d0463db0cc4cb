"""Run: a whole text through a checkpoint into a folder, and on from where that was killed.

Ties the rest together: the checkpoint and what is wanted of it are checked, the data is read once
to know what it is, the folder is locked and held against both, and then shard after shard is
computed and written. Prints nothing: the caller is told by events.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.progress import Report, unreported
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.extraction.compute import AUTO, Computer, Group, Placing, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.index import ExtractionFolder
from logitd.model.extraction.on_ray import Cluster, open_on_ray, require_ray
from logitd.model.extraction.plan import (
    DataReader,
    Survey,
    Windows,
    choose_windows,
    shards_of,
    survey,
    units_of,
)
from logitd.model.extraction.shards import require_parquet
from logitd.model.extraction.wanted import (
    LENS_TOP_K,
    Wanted,
    lens_wanted,
    logprobs_wanted,
    stages_wanted,
)
from logitd.model.version import VERSION

SECONDS_BETWEEN = 0.5
"""Between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is extracted, and into how large shards.

    stages        names and patterns; none: logprobs, with those of the `top_k` likeliest
    lens          instead, what each layer would say, with its `top_k` likeliest (0: LENS_TOP_K)
    stride        tokens that each window counts; None: as many as it can
    shard_tokens  of a shard at most; None: what `Wanted` takes
    """

    stages: tuple[str, ...] = ()
    top_k: int = 0
    lens: bool = False
    stride: int | None = None
    shard_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The data is known, and the folder is ready for shards; some may be there."""

    survey: Survey
    shards: int
    rows: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an extraction stands, about twice a second."""

    tokens: int  # in all sittings
    share: float  # of the data, 0 to 1, as far as can be said before it is encoded
    tokens_per_second: float  # in this sitting
    seconds_left: float
    shards: int


@dataclass(frozen=True, slots=True)
class Extracted:
    """What a finished extraction has. `tokens` and `seconds` are of this sitting alone."""

    path: Path
    rows: int
    documents: int
    shards: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


Tell = Callable[[Surveyed | Progress], None]


def extract(
    path: Path,
    data: Sequence[str],
    out: Path,
    asked: Asked,
    *,
    placing: Placing = AUTO,
    cluster: Cluster | None = None,
    text_field: str = "text",
    max_download_mb: int = 1000,
    log: Callable[[str], None] = lambda line: None,
    report: Report = unreported,
    tell: Tell = lambda event: None,
) -> Extracted:
    """Compute every token of the texts of `data` by the checkpoint at `path`, into the folder
    `out`, in this process or on a `cluster`. Leaves torch's threads as `placing` says.

    Raises ExtractionError, DataError, CheckpointError, DeviceError and KernelError.
    """
    if cluster is not None:
        require_ray()
    checkpoint = read_checkpoint(path)
    wanted = _wanted(checkpoint, asked)
    context = checkpoint.config.context_length
    windows = choose_windows(context, asked.stride, predicts=wanted.predicts)
    text = _text(data, checkpoint, text_field, max_download_mb, report)
    folder = ExtractionFolder(out)
    finished = False
    try:
        surveyed = survey(text.documents)
        if cluster is None:
            computer: Computer = open_computer(path, wanted, placing, log)
        else:
            computer = open_on_ray(checkpoint, wanted, placing, cluster, log)
        try:
            shard_tokens = asked.shard_tokens or wanted.shard_tokens(checkpoint.config)
            facts = _facts(
                checkpoint, surveyed, wanted, windows, shard_tokens, computer.computation
            )
            folder.begin(facts, text.name)
            tell(Surveyed(surveyed, len(folder.shards), folder.rows))
            sitting = _Sitting(folder, surveyed, tell)
            reader = DataReader(text.documents)
            begin = folder.shards[-1].end if folder.shards else (0, 0)
            units = units_of(reader, checkpoint.tokenizer, windows, begin)
            groups = sitting.planned(shards_of(units, shard_tokens), reader)
            for group, content in computer.shards(groups, sitting.done):
                rows = sum(unit.counted for unit in group)
                folder.add(content, wanted.suffix, rows=rows, end=group[-1].end)
        finally:
            computer.close()
        _check_unchanged(surveyed, reader.survey(), text, folder)
        folder.complete()
        finished = True
    finally:
        folder.release(finished=finished)
    return Extracted(
        path=out,
        rows=folder.rows,
        documents=surveyed.documents,
        shards=len(folder.shards),
        tokens=sitting.tokens,
        seconds=sitting.seconds,
    )


def _wanted(checkpoint: CheckpointInfo, asked: Asked) -> Wanted:
    """What is asked for, as far as the model can give it."""
    if not checkpoint.tokenizer.has_text:
        raise ExtractionError(
            f"{checkpoint.name} has no vocabulary, so a text has no tokens for it; LLM.score and "
            "LLM.activations (model/llm.py) take token ids"
        )
    if asked.stages:
        return stages_wanted(asked.stages, checkpoint.config)
    require_parquet()
    if asked.lens:
        return lens_wanted(asked.top_k or LENS_TOP_K, checkpoint.config)
    return logprobs_wanted(asked.top_k, checkpoint.config)


def _text(
    data: Sequence[str],
    checkpoint: CheckpointInfo,
    text_field: str,
    max_download_mb: int,
    report: Report,
) -> Text:
    if not data:
        raise ExtractionError("no data is named: give --data files, folders or addresses")
    text = open_text(data, text_field=text_field, max_download_mb=max_download_mb, report=report)
    if text.shards:
        raise ExtractionError(
            f"{text.name} are token ids that a run wrote: name the text that they were made of"
        )
    return text


def _facts(
    checkpoint: CheckpointInfo,
    surveyed: Survey,
    wanted: Wanted,
    windows: Windows,
    shard_tokens: int,
    computation: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on, as the index says it."""
    return {
        "logitd": VERSION,
        "checkpoint": {
            "name": checkpoint.name,
            "weights_sha256": checkpoint.weights_sha256,
            "tokenizer_sha256": tokenizer_sha256(checkpoint.tokenizer).hex(),
        },
        "data": {
            "sha256": surveyed.sha256,
            "documents": surveyed.documents,
            "bytes": surveyed.bytes,
        },
        "settings": {
            **wanted.settings(),
            "window": windows.length,
            "stride": windows.stride,
            "shard_tokens": shard_tokens,
        },
        "computation": dict(computation),
    }


def _check_unchanged(before: Survey, after: Survey, text: Text, folder: ExtractionFolder) -> None:
    if not folder.rows:
        raise ExtractionError(
            f"{text.name} has {before.documents} documents of {before.bytes} bytes, and no token"
        )
    if before != after:
        raise ExtractionError(
            f"{text.name} changed while it was read: it had {before.bytes:,} bytes in "
            f"{before.documents:,} documents, then {after.bytes:,} in {after.documents:,} (sha256 "
            f"{before.sha256[:12]}, {after.sha256[:12]}). Shards may have either: begin anew with "
            "a text that stays as it is, in another --out"
        )


class _Sitting:
    """What was done since the process began, and what that says of the rest."""

    def __init__(self, folder: ExtractionFolder, surveyed: Survey, tell: Tell) -> None:
        self._folder = folder
        self._bytes = surveyed.bytes
        self._tell = tell
        self._before = folder.rows
        self._planned = folder.rows  # tokens, in all sittings
        self._planned_bytes = 0
        self._began: float | None = None  # until what is there already was passed over
        self._told = time.monotonic()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Of computing, encoding and writing."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def planned(self, groups: Iterable[Group], reader: DataReader) -> Iterator[Group]:
        """The groups as they are asked for, with what was read for them and all before."""
        for group in groups:
            self._planned += sum(unit.counted for unit in group)
            self._planned_bytes = reader.bytes
            if self._began is None:
                self._began = time.monotonic()
            yield group

    def done(self, tokens: int) -> None:
        """So many tokens more are computed."""
        self.tokens += tokens
        now = time.monotonic()
        if now - self._told < SECONDS_BETWEEN:
            return
        self._told = now
        done = self._before + self.tokens
        expected = max(done, self._planned * self._bytes / max(1, self._planned_bytes))
        rate = self.tokens / max(self.seconds, 1e-9)
        self._tell(
            Progress(
                tokens=done,
                share=done / expected,
                tokens_per_second=rate,
                seconds_left=(expected - done) / rate,
                shards=len(self._folder.shards),
            )
        )
