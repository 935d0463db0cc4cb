"""Summary: describes a running, interrupted or finished training run from its directory.

Only run.json, metrics.jsonl, samples.txt and data/data.json are read, never the state or a
checkpoint. Damaged lines are skipped, with a note.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.card_and_curve import METRICS, SAMPLES, read_samples
from logitd.model.checkpoint.run_folder import RUN, is_run
from logitd.model.data.shards import DATA, DESCRIPTION
from logitd.model.files import CONFIG_BYTES, parse_json, read_regular
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.metrics_log import read_metrics
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.size import parameter_count


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run as its files describe it. None means that a value does not exist yet or is unknown."""

    path: Path
    preset: str
    base: Mapping[str, Any] | None  # the fine-tuned checkpoint
    parameters: int  # without adapters
    settings: Mapping[str, Any]  # recipe, shape, adapters, text and base
    changes: Mapping[str, tuple[Any, Any]]  # values of the preset and the run, if they differ
    finished: bool
    idle_seconds: float  # since something was last written
    step: int
    steps: int | None  # None: the clock ends the run
    minutes: float | None  # None: no time limit
    tokens: int
    seconds: float
    loss: float | None  # training loss of the last report, nats per token
    val_loss: float | None
    val_bits_per_byte: float | None
    best_step: int | None
    best_val_loss: float | None
    best_bits_per_byte: float | None
    tokens_per_second: float | None  # the median of the reports
    sampled_at: int | None
    samples: tuple[str, ...]  # samples of that step, including prompts
    notes: tuple[str, ...]  # sentences about damage


def summarize(path: Path) -> RunSummary:
    """Summarize the run directory `path`. Raises TrainingError if `path` is not a run directory."""
    if not is_run(path):
        raise TrainingError(f"{path} is not a run directory: it has no {RUN}")
    training = RunDirectory(path).read_training()
    config, model, length = training.config, training.model, training.length
    records, notes = read_metrics(path / METRICS)
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    last: Mapping[str, Any] = records[-1] if records else {"step": 0, "seconds": 0.0}
    best = min(evals, key=lambda record: float(record["val_loss"]), default={})
    report, evaluation = train[-1] if train else {}, evals[-1] if evals else {}
    counters = Counters(
        step=last["step"],
        seconds=last["seconds"],
        ending=report.get("ending", 0.0),  # written by earlier versions
        share=report.get("done", 0.0),
        minutes=report.get("minutes"),
    )
    sampled_at, samples = read_samples(path)
    # The clock may end a run, and then the steps of its preset do not.
    settings = {**asdict(training.recipe), **model.to_dict(), **asdict(length)}
    if (lora := training.lora) is not None:
        settings |= {"lora": lora.rank, "lora_alpha": lora.alpha, "lora_targets": [*lora.targets]}
    settings |= _text(path / DATA / DESCRIPTION)
    settings |= {name: getattr(config, name) for name in ("text_field", "split_at")}
    base = None if training.base is None else training.base.record
    settings["from"] = None if base is None else base["name"]
    return RunSummary(
        path=path,
        preset=config.preset,
        base=base,
        parameters=parameter_count(model),
        settings=settings,
        changes=_changes(config, settings, model, shape=base is None),
        # The report of the last step comes before its evaluation.
        finished=length.done(counters) >= 1 and evaluation.get("step") == last["step"],
        idle_seconds=max(0.0, time.time() - _last_written(path)),
        step=last["step"],
        steps=length.steps,
        minutes=length.minutes,
        tokens=report.get("tokens", 0),
        seconds=last["seconds"],
        loss=report.get("loss"),
        val_loss=evaluation.get("val_loss"),
        val_bits_per_byte=evaluation.get("val_bits_per_byte"),
        best_step=best.get("step"),
        best_val_loss=best.get("val_loss"),
        best_bits_per_byte=best.get("val_bits_per_byte"),
        tokens_per_second=(
            statistics.median(record["tokens_per_second"] for record in train) if train else None
        ),
        sampled_at=sampled_at,
        samples=samples,
        notes=notes,
    )


def differences(runs: Sequence[RunSummary]) -> dict[str, tuple[Any, ...]]:
    """The settings that differ between runs, with the value in each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: tuple(run.settings.get(name) for run in runs) for name in names}
    return {
        name: of_runs for name, of_runs in values.items() if any(v != of_runs[0] for v in of_runs)
    }


def _changes(
    config: TrainingConfig, settings: Mapping[str, Any], model: GPTConfig, *, shape: bool
) -> dict[str, tuple[Any, Any]]:
    preset = PRESETS.get(config.preset)
    if preset is None:  # a preset of another version
        return {}
    built = preset.config(model.vocab_size).to_dict() if shape else {}
    before = {**built, **asdict(preset.recipe)}
    return {
        name: (before[name], value)
        for name, value in settings.items()
        if name in before and before[name] != value and (name, value) != ("steps", None)
    }


def _text(path: Path) -> dict[str, Any]:
    """The text of a run, from its description at `path`; nothing if it cannot be read."""
    try:
        record = parse_json(read_regular(path, CONFIG_BYTES))["record"]
        return {
            "data": record["name"],
            "data_sha256": record["sha256"][:12],
            "special_tokens": record.get("special_tokens", "text"),
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _last_written(path: Path) -> float:
    files = [path / name for name in (METRICS, SAMPLES, RUN)]
    return max(file.stat().st_mtime for file in files if file.is_file())
