"""Card and curve: reads a checkpoint's card, and the loss curve, progress and samples of its run,
for display.

The losses are read from the log of the checkpoint's run or, if the log has none, from the table in
the card. All files may be missing, edited or damaged. Their contents are only displayed, so
unreadable parts are skipped.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CARD
from logitd.model.checkpoint.run_folder import run_of
from logitd.model.files import open_regular, parse_json, read_text

METRICS = "metrics.jsonl"
"""Log of a run: one JSON object per line."""
SAMPLES = "samples.txt"
"""Samples of a run, oldest first."""
SAMPLE = re.compile(r"^=== step (\d{1,18})$", re.MULTILINE)
"""Matches the first line of a sample."""
METRICS_BYTES = 2**23
"""Maximum number of bytes read from the end of a log. That is enough for 25,000 reports."""
TAIL_BYTES = 2**16
"""Maximum number of bytes read from the end of the log for the newest report, and from the end of
the samples file for the newest samples."""
CARD_BYTES = 2**20
MOST_POINTS = 1000

_ROW = re.compile(r"^\| ([\d,]+) \| (\d+\.\d+) \| (\d+\.\d+) \|$", re.MULTILINE)
"""Matches a row of the loss table in a card (`model/training/recording/card.py`): step, loss, bits
per byte."""
_SAMPLE = re.compile(r"^## Samples\n.*?^```+\n([^▸]+)▸", re.MULTILINE | re.DOTALL)
"""Matches the first sample in a card, up to the end of its prompt."""


@dataclass(frozen=True, slots=True)
class Point:
    """A loss in nats per token, and in bits per byte if that was measured."""

    step: int
    loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses by step. A training loss is the mean of the steps since the previous report."""

    training: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest report of a run, and the run's newest samples with their prompts. Times are in
    seconds.

    done          fraction of the run that is complete
    seconds_left  expected time from the report until the last step is saved
    idle_seconds  time since the log was last written to
    sampled_at    step of the samples; None if there are none
    """

    step: int
    done: float
    loss: float
    tokens_per_second: float
    seconds_left: float
    idle_seconds: float
    sampled_at: int | None
    samples: tuple[str, ...]


def read_card(path: Path) -> str | None:
    """The card of the checkpoint at `path`; None if it is missing or unreadable."""
    try:
        return read_text(path / CARD, CARD_BYTES)
    except (OSError, ValueError):
        return None


def sampled_prompt(card: str | None) -> str | None:
    found = _SAMPLE.search(card or "")
    return found[1] if found else None


def read_curve(path: Path, card: str | None) -> Curve:
    """The curve of the checkpoint at `path`, with at most MOST_POINTS training points and at most
    MOST_POINTS validation points."""
    records = list(_records(_folder_of_log(path) / METRICS, METRICS_BYTES))
    training = _points(records, "train", "loss")
    validation = _points(records, "eval", "val_loss")
    if not training and not validation and card is not None:
        validation = [
            Point(int(step.replace(",", "")), float(loss), float(bits))
            for step, loss, bits in _ROW.findall(card)
        ]
    return Curve(_thinned(training), _thinned(validation))


def _folder_of_log(path: Path) -> Path:
    return run_of(path) or path.resolve()


def read_progress(path: Path) -> Progress | None:
    """The progress of the run that wrote the checkpoint at `path`; None if the run's log has no
    valid report."""
    run = _folder_of_log(path)
    reports = [each for each in _records(run / METRICS, TAIL_BYTES) if each.get("kind") == "train"]
    if not reports:
        return None
    names = ("done", "loss", "tokens_per_second", "seconds_left")
    numbers = {name: reports[-1].get(name) for name in names}
    step = reports[-1].get("step")
    if not isinstance(step, int) or not all(isinstance(each, float) for each in numbers.values()):
        return None
    try:
        idle = time.time() - os.stat(run / METRICS).st_mtime
    except OSError:
        return None
    sampled_at, samples = read_samples(run)
    return Progress(
        step=step,
        idle_seconds=max(0.0, idle),
        sampled_at=sampled_at,
        samples=samples,
        **numbers,  # type: ignore[arg-type]
    )


def read_samples(run: Path) -> tuple[int | None, tuple[str, ...]]:
    """The last step at which a run wrote samples, and these samples; None and () if there are
    none."""
    parts = SAMPLE.split(_tail(run / SAMPLES, TAIL_BYTES)[1].decode(errors="replace"))[1:]
    if not parts:
        return None, ()
    steps, texts = [int(step) for step in parts[::2]], parts[1::2]
    return steps[-1], tuple(
        text.strip("\n") for step, text in zip(steps, texts, strict=True) if step == steps[-1]
    )


def _tail(path: Path, size: int) -> tuple[int, bytes]:
    """The last `size` bytes of a file, and the offset at which they start. Empty if the file cannot
    be read."""
    try:
        with open_regular(path) as file:
            start = file.seek(max(0, file.seek(0, 2) - size))
            return start, file.read(size)
    except (OSError, ValueError):
        return 0, b""


def _records(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The records in the complete lines among the last `size` bytes of a log."""
    start, tail = _tail(path, size)
    # The first line may be incomplete, the last one always is.
    for line in tail.split(b"\n")[1 if start else 0 : -1]:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _points(records: Sequence[dict[str, Any]], kind: str, loss: str) -> list[Point]:
    return [
        Point(record["step"], record[loss], bits if isinstance(bits, float) else None)
        for record in records
        for bits in [record.get("val_bits_per_byte")]
        if record.get("kind") == kind
        and isinstance(record.get("step"), int)
        and isinstance(record.get(loss), float)
    ]


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    every = max(1, -(-len(points) // (MOST_POINTS - 1)))
    kept = points[::every]
    return (*kept, *points[-1:]) if points and kept[-1] is not points[-1] else tuple(kept)
