"""`logitd train` on the terminal. The trainer's tests and tests/e2e cover training itself."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.training.events import Event, Noticed, Progress, Saved, line
from logitd.model.training.run.step_log import Figures
from logitd.service.cli.commands.train import TerminalReporter
from logitd.service.cli.main import run
from tests.service.cli.test_terminal import Terminal

FIGURES = Figures(
    loss=3.0,
    learning_rate=1.0,
    gradient_norm=0.5,
    tokens_per_second=1000.0,
    matrix_share=0.25,
    seconds_per_step=0.1,
)
PROGRESS = Progress(step=10, share=0.1, figures=FIGURES, seconds_left=9.0)
EVENTS: list[Event] = [
    Noticed("it begins"),
    PROGRESS,
    replace(PROGRESS, step=20),
    Saved(20, Path("run/step-000020")),
    Noticed("it ends"),
]


def test_file_has_a_line_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    report = TerminalReporter()
    for event in EVENTS:
        report(event)
    assert capsys.readouterr().out.splitlines() == [line(event) for event in EVENTS]


def test_terminal_redraws_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    report = TerminalReporter()
    for event in EVENTS:
        report(event)
    begins, progress, again, saved, ends = map(line, EVENTS)
    assert terminal.getvalue() == (
        f"{begins}\n\r\x1b[K{progress}\r\x1b[K{again}\n{saved}\n{ends}\n"
    )


def test_terminal_redraws_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    report = TerminalReporter()
    url, path = "https://host/a.txt", Path("cache/a.txt")
    report(Downloading(url, 1_000_000, 4_000_000))
    report(Downloading(url, 2_000_000, None))
    report(Downloaded(url, 4_000_000, path, from_cache=False, sha256="00"))
    assert terminal.getvalue() == (
        f"\r\x1b[Kdownloading {url}: 1.0 of 4.0 MB, 25%\r\x1b[Kdownloading {url}: 2.0 MB\n"
        f"{url}: 4,000,000 bytes, downloaded to {path}\n"
    )


def test_impossible_training_exits_1_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--data", "nowhere.txt", "--out", "run"]) == 1
    out, err = capsys.readouterr()
    assert "serve it" not in out
    assert err.startswith("logitd train: ")
    assert "nowhere.txt" in err
    assert len(err.splitlines()) == 1
