"""Run an extraction: computes a whole text with a checkpoint and writes the results to a folder.

`extract` checks the checkpoint and the request, locks the folder, loads the model, reads the data
once to compute its hash, compares all this with the folder's index, and then computes and writes
shard after shard.
An interrupted extraction can be continued. The caller gets events; nothing is printed.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.read_options import AS_USUAL, ReadOptions
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.extraction.compute import Group, ShardComputer, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.index import ExtractionFolder
from logitd.model.extraction.on_ray import RayComputer, on_ray
from logitd.model.extraction.plan import (
    DataReader,
    Survey,
    choose_windows,
    shards_of,
    survey,
    units_of,
)
from logitd.model.extraction.quantities import (
    LENS_TOP_K,
    Quantity,
    StoredDType,
    choose_lens,
    choose_logprobs,
    choose_stages,
)
from logitd.model.extras import installation
from logitd.model.inference.options import DEFAULTS, ComputeOptions
from logitd.model.plural import pluralize
from logitd.model.version import VERSION

SECONDS_BETWEEN = 0.5
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class ExtractionRequest:
    """The requested quantity, windows and shards.

    stages        names and patterns of stages to extract; empty for logprobs or the lens
    top_k         number of likeliest tokens per row of logprobs or lens; 0 means LENS_TOP_K for the
                  lens
    lens          extract the lens instead of logprobs
    stride        tokens between the starts of two windows; None: the largest possible number
    shard_tokens  maximum number of tokens per shard, counted before sampling; None: the quantity's
                  default
    stored_dtype  dtype of the values of stages
    sample        share of the tokens whose stages are written; `sample_seed` chooses them
    """

    stages: tuple[str, ...] = ()
    top_k: int = 0
    lens: bool = False
    stride: int | None = None
    shard_tokens: int | None = None
    stored_dtype: StoredDType = "float32"
    sample: float = 1.0
    sample_seed: int = 0


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Event: the data was read and the folder is ready. It may already contain shards."""

    survey: Survey
    shards: int
    rows: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Event: the progress of an extraction, about twice a second."""

    tokens: int  # computed so far, including earlier runs of the command
    share: float  # of the data, 0 to 1; an estimate until all data is encoded
    tokens_per_second: float  # of this run
    seconds_left: float
    shards: int


@dataclass(frozen=True, slots=True)
class Extracted:
    """A finished extraction. `tokens` and `seconds` count only this run of the command."""

    path: Path
    rows: int
    documents: int
    shards: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


Tell = Callable[[Surveyed | Progress | Downloading | Downloaded], None]


def extract(
    path: Path,
    data: Sequence[str],
    out: Path,
    request: ExtractionRequest,
    *,
    options: ComputeOptions = DEFAULTS,
    ray: str | None = None,
    ray_workers: int | None = None,
    reading: ReadOptions = AS_USUAL,
    log: Callable[[str], None] = lambda line: None,
    tell: Tell = lambda event: None,
) -> Extracted:
    """Compute the requested quantity for every token of the texts `data` with the checkpoint at
    `path`, and write the results to the folder `out`. The computation runs in this process, or on
    the Ray cluster at the address `ray`. Sets the number of torch's threads as in `options`.

    Raises ExtractionError, InvalidRequest, DataError, CheckpointError, DeviceError and KernelError.
    """
    if ray is not None:
        _require_package("ray", "ray", "--ray")
    checkpoint = read_checkpoint(path)
    quantity = _choose_quantity(checkpoint, request)
    windows = choose_windows(
        checkpoint.shape.context_length, request.stride, predicts=quantity.predicts
    )
    _refuse_out_in_data(out, data)
    text = _open_data(data, reading, tell)
    with closing(ExtractionFolder(out)) as folder:
        opened: AbstractContextManager[ShardComputer | RayComputer] = (
            closing(open_computer(checkpoint.path, quantity, options, log))
            if ray is None
            else on_ray(checkpoint, quantity, options, ray, ray_workers, log)
        )
        with opened as computer:
            surveyed = survey(text.documents)
            shard_tokens = request.shard_tokens or quantity.shard_tokens(checkpoint.shape)
            facts = {
                "logitd": VERSION,
                "checkpoint": {
                    "name": checkpoint.name,
                    "weights_sha256": checkpoint.weights_sha256,
                    "model_sha256": checkpoint.model_sha256,
                    "tokenizer_sha256": tokenizer_sha256(checkpoint.tokenizer).hex(),
                    "special_tokens": "ids" if checkpoint.special_ids else "text",
                },
                "data": asdict(surveyed),
                "settings": {
                    **quantity.settings(),
                    "window": windows.length,
                    "stride": windows.stride,
                    "shard_tokens": shard_tokens,
                },
                "computation": dict(computer.computation),
            }
            folder.begin(facts, text.name)
            tell(Surveyed(surveyed, len(folder.shards), folder.rows))
            reader = DataReader(text.documents)
            meter = _Meter(folder, quantity.share, surveyed, reader, tell)
            begin = folder.shards[-1].end if folder.shards else (0, 0)
            units = units_of(
                reader, checkpoint.tokenizer, windows, begin, special_ids=checkpoint.special_ids
            )
            groups = meter.planned(shards_of(units, shard_tokens))
            for group, content in computer.shards(groups, meter.computed):
                rows = quantity.rows(group)
                folder.add(content, quantity.suffix, rows=rows, end=group[-1].end)
        _check_unchanged(surveyed, reader.survey(), text, folder)
        folder.complete()
    rows, shards = folder.rows, len(folder.shards)
    return Extracted(out, rows, surveyed.documents, shards, meter.tokens, meter.seconds)


def _choose_quantity(checkpoint: CheckpointInfo, request: ExtractionRequest) -> Quantity:
    if not checkpoint.tokenizer.has_text:
        raise ExtractionError(
            f"{checkpoint.name} has no vocabulary, so it cannot encode a text: pass token ids to "
            "LLM.score and LLM.activations (model/llm.py)"
        )
    if request.stages:
        return choose_stages(
            request.stages,
            checkpoint.shape,
            request.stored_dtype,
            request.sample,
            request.sample_seed,
        )
    _require_package("pyarrow", "parquet", "Parquet")
    if request.lens:
        return choose_lens(request.top_k or LENS_TOP_K, checkpoint.shape)
    return choose_logprobs(request.top_k, checkpoint.shape)


def _require_package(name: str, extra: str, use: str) -> None:
    if find_spec(name) is None:
        raise ExtractionError(f"{use} needs {name}: {installation(extra)}")


def _open_data(data: Sequence[str], reading: ReadOptions, tell: Tell) -> Text:
    if not data:
        raise ExtractionError("there is no text: set --data to files, folders or web addresses")
    text = open_text(data, reading, report=tell)
    if text.shards:
        raise ExtractionError(
            f"{text.name} contains token ids, not text: name the text that was tokenized"
        )
    return text


def _refuse_out_in_data(out: Path, data: Sequence[str]) -> None:
    for folder in filter(os.path.isdir, data):
        if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
            raise ExtractionError(
                f"--out {out} is in the data folder {folder}, so the same command could not "
                "continue after an interruption: its data would have changed. Choose an --out "
                "outside"
            )


def _check_unchanged(before: Survey, after: Survey, text: Text, folder: ExtractionFolder) -> None:
    if not folder.shards:
        raise ExtractionError(
            f"{text.name} contains no tokens ({pluralize(before.documents, 'document')}, "
            f"{before.bytes} bytes in total)"
        )
    if before != after:
        raise ExtractionError(
            f"{text.name} changed while it was read: it had {before.bytes:,} bytes in "
            f"{pluralize(before.documents, 'document', ',')}, then {after.bytes:,} in "
            f"{after.documents:,} (sha256 {before.sha256[:12]}, {after.sha256[:12]}). Some "
            "shards may contain the old text: start over in another --out with a text that does "
            "not change"
        )


class _Meter:
    """Counts the tokens and seconds of this run of the command, and estimates the remaining
    time."""

    def __init__(
        self,
        folder: ExtractionFolder,
        share: float,
        surveyed: Survey,
        reader: DataReader,
        tell: Tell,
    ) -> None:
        self._folder, self._reader, self._tell = folder, reader, tell
        self._bytes = surveyed.bytes
        self._before = self._planned = round(folder.rows / share)  # tokens
        self._planned_bytes = 0
        self._began: float | None = None  # time at which the reader passed the finished shards
        self._reported = time.monotonic()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def planned(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            self._planned += sum(unit.counted for unit in group)
            self._planned_bytes = self._reader.bytes
            self._began = self._began or time.monotonic()
            yield group

    def computed(self, tokens: int) -> None:
        """Count newly computed tokens, and report progress every SECONDS_BETWEEN."""
        self.tokens += tokens
        now = time.monotonic()
        if now - self._reported < SECONDS_BETWEEN:
            return
        self._reported = now
        done = self._before + self.tokens
        expected = max(done, self._planned * self._bytes / max(1, self._planned_bytes))
        rate = self.tokens / max(self.seconds, 1e-9)
        left = (expected - done) / rate
        self._tell(Progress(done, done / expected, rate, left, len(self._folder.shards)))
