"""`logitd inspect RUN ...`: shows one training run, or compares several."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from logitd.model.training.configuration.command_line import written
from logitd.model.training.events import duration
from logitd.model.training.run.summary import RunSummary, differences
from logitd.service.cli.terminal import finite, visible


def show_runs(runs: Sequence[RunSummary], *, as_json: bool) -> None:
    """Print one run in full, or a table of several runs and the settings in which they differ."""
    if as_json:
        summaries = [_document(run) for run in runs]
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, allow_nan=False))
        return
    console = Console(highlight=False)
    if len(runs) == 1:
        _show_one(console, runs[0])
        return
    console.print(_comparison(runs))
    if different := differences(runs):
        console.print(_settings(runs, different))
    for run in runs:
        for note in run.notes:
            console.print(Text(visible(f"{run.path}: {note}"), "bold"))


def _show_one(console: Console, run: RunSummary) -> None:
    console.print(facts_table(*_rows(run)))
    for sample in run.samples:
        console.print(Text(f"\n--- sample at step {run.sampled_at:,}", "bold"))
        console.print(Text(visible(sample)))


def facts_table(*rows: tuple[str, str]) -> Table:
    """A table of names and values. On a narrow terminal, long values wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(visible(name), "bold"), Text(visible(value)))
    return table


def folding_table(title: str, *names: str) -> Table:
    """A table with these columns. On a narrow terminal, long cells wrap instead of being cut."""
    return Table(*(Column(Text(visible(name)), overflow="fold") for name in names), title=title)


def _rows(run: RunSummary) -> list[tuple[str, str]]:
    rows = [("run", str(run.path)), ("preset", run.preset)]
    if run.base is not None:
        rows.append(("fine-tuned from", f"{run.base['name']}, step {run.base['step']:,}"))
    rows += [
        (f"  {name}", f"{_value(value)} (preset: {_value(was)})")
        for name, (was, value) in run.changes.items()
    ]
    rows += [
        ("parameters", f"{run.parameters:,}"),
        ("state", _state(run)),
        ("step", f"{run.step:,}" + ("" if run.steps is None else f" of {run.steps:,}")),
        ("tokens", f"{run.tokens:,}"),
        ("time", duration(run.seconds) + _of(run.minutes)),
        ("tokens/s", _number(run.tokens_per_second, ",.0f")),
        ("training loss", _number(run.loss, ".4f")),
        ("validation loss", _number(run.val_loss, ".4f")),
        ("bits per byte", _number(run.val_bits_per_byte, ".4f")),
        ("best", "not yet evaluated" if run.best_step is None else
         f"{run.best_bits_per_byte:.4f} bits per byte at step {run.best_step:,}"),
        *(("note", note) for note in run.notes),
    ]  # fmt: skip
    return rows


def _of(minutes: float | None) -> str:
    return "" if minutes is None else f" of {duration(60 * minutes)}"


def _comparison(runs: Sequence[RunSummary]) -> Table:
    """A table with a column for each run, so that two runs fit into a narrow terminal."""
    table = folding_table("runs", "", *_names(runs))
    columns = [
        {
            "preset": run.preset,
            "parameters": f"{run.parameters:,}",
            "steps": f"{run.step:,}",
            "tokens": f"{run.tokens:,}",
            "minutes": f"{run.seconds / 60:.1f}",
            "best bits/byte": _number(run.best_bits_per_byte, ".4f"),
            "tokens/s": _number(run.tokens_per_second, ",.0f"),
            "state": "finished" if run.finished else "unfinished",
        }
        for run in runs
    ]
    for name in columns[0]:
        table.add_row(name, *(Text(visible(column[name])) for column in columns))
    return table


def _settings(runs: Sequence[RunSummary], different: dict[str, tuple[Any, ...]]) -> Table:
    table = folding_table("differences", "setting", *_names(runs))
    for name, values in different.items():
        table.add_row(name, *(Text(visible(_value(value))) for value in values))
    return table


def _state(run: RunSummary) -> str:
    """The state of a run. The files do not show whether an unfinished run was killed or is still
    training, so the text says when the run last wrote a file."""
    if run.finished:
        return "finished"
    return f"unfinished; last written {duration(run.idle_seconds)} ago"


def _names(runs: Sequence[RunSummary]) -> list[str]:
    """The names of the runs' directories, or their whole paths if two names are the same."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _value(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(written, value))
        case _:
            return written(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _document(run: RunSummary) -> dict[str, Any]:
    """A run's summary as a JSON object."""
    changes = {name: {"preset": was, "run": value} for name, (was, value) in run.changes.items()}
    return finite(asdict(run) | {"path": str(run.path), "changes": changes})
