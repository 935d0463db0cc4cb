"""Card and curve: reads a checkpoint's card and the loss curve of its run, for display.

The curve comes from the log of the checkpoint's run, or else from the table in the card. Both may
be missing, edited or damaged. Unreadable parts are skipped, because they are only displayed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CARD
from logitd.model.files import open_regular, parse_json, read_text

METRICS = "metrics.jsonl"
"""Log of a run: one JSON object per line."""
METRICS_BYTES = 2**23
"""Maximum number of bytes read from the end of a log, enough for 25,000 reports."""
CARD_BYTES = 2**20
MOST_POINTS = 1000

_ROW = re.compile(r"^\| ([\d,]+) \| (\d+\.\d+) \| (\d+\.\d+) \|$", re.MULTILINE)
"""Row of the curve in a card (`model/training/recording/card.py`): step, loss, bits per byte."""
_SAMPLE = re.compile(r"^## Samples\n.*?^```+\n([^▸]+)▸", re.MULTILINE | re.DOTALL)
"""First sample in a card, up to the end of its prompt."""


@dataclass(frozen=True, slots=True)
class Point:
    """A loss in nats per token, and in bits per byte if that was measured."""

    step: int
    loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses by step. `training` is smoothed, as the trainer reports it."""

    training: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()


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
    """The curve of the checkpoint at `path`, with at most MOST_POINTS training and validation
    points each."""
    records = list(_records(path.resolve().parent / METRICS))
    training = _points(records, "train", "smoothed_loss")
    validation = _points(records, "eval", "val_loss")
    if not training and not validation and card is not None:
        validation = [
            Point(int(step.replace(",", "")), float(loss), float(bits))
            for step, loss, bits in _ROW.findall(card)
        ]
    return Curve(_thinned(training), _thinned(validation))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records in the complete lines at the end of a log."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = file.seek(max(0, size - METRICS_BYTES))
            lines = file.read(METRICS_BYTES).split(b"\n")
    except (OSError, ValueError):
        return
    for line in lines[
        1 if start else 0 : -1
    ]:  # the first line may be incomplete, the last one always is
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
