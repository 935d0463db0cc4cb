"""Metrics log: reads `metrics.jsonl`, the log of a run, and checks every record.

A record is a JSON object on a line of its own: its `kind`, "train" or "eval", and numbers. A
power failure, a kill or an editor can damage lines. They are skipped, and a note names them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.card_and_curve import METRICS
from logitd.model.files import TEXT_BYTES, read_regular
from logitd.model.plural import pluralize
from logitd.model.training.configuration.config import TrainingError

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "train": ("seconds", "loss", "learning_rate", "tokens_per_second"),
    "eval": ("seconds", "val_loss", "val_bits_per_byte"),
}
"""For each kind of record, the fields that must be finite numbers. Other fields may be null."""


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The valid records of a log, and notes on the other lines. A missing log has no records.
    Raises TrainingError if the log cannot be read."""
    try:
        lines = read_regular(path, TEXT_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return [], ()
    except OSError as error:
        raise TrainingError(f"the log of the run cannot be read: {error}") from error
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            records.append(record)
        else:
            damaged.append(number)
    notes = []
    if damaged and damaged[-1] == len(lines) and not lines[-1].endswith(b"\n"):
        notes.append(
            f"the last line of {METRICS} is cut off: {len(records)} complete lines were read"
        )
        damaged.pop()
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (" and more" if len(damaged) > 5 else "")
        notes.append(f"skipped {pluralize(len(damaged), 'damaged line')} of {METRICS}: {where}")
    return records, tuple(notes)


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or record.get("kind") not in tuple(NUMBERS):
        return False
    required: list[Any] = [record.get(name) for name in NUMBERS[record["kind"]]]
    others = [value for name, value in record.items() if name != "kind" and value is not None]
    return (
        type(record.get("step")) is int
        and all(map(_is_number, (*required, *others)))
        and all(map(math.isfinite, required))
    )


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)
