"""The live view of a run, drawn from the events of a real training run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.events import Evaluated, Event, Progress, Sampled, duration
from logitd.model.training.trainer import train
from logitd.service.cli.commands.training_view import AXIS, BRAILLE, ROWS, TrainingView, curve_text
from logitd.service.cli.main import run
from tests.model.conftest import configuration, story

WIDTH = 100


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainingConfig:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(story(400))
    return configuration(folder / "text.txt", folder / "run", prompts=("the cat", "a \x1b[31mdog"))


def _drawn(config: TrainingConfig) -> tuple[list[Event], list[str]]:
    """The events of a run, and the drawing after each."""
    events, drawings = list[Event](), list[str]()
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=60)
    paper = Console(force_terminal=True, width=WIDTH)
    with TrainingView(console) as view:

        def report(event: Event) -> None:
            events.append(event)
            view(event)
            with paper.capture() as capture:
                paper.print(view.drawing())
            drawings.append(capture.get())

        train(config, report)
    return events, drawings


def test_view_shows_curve_figures_time_left_and_samples(config: TrainingConfig) -> None:
    events, drawings = _drawn(config)
    drawn = drawings[-1]
    progress = [event for event in events if isinstance(event, Progress)]
    middle, last = progress[-2], progress[-1]
    assert f"{duration(middle.seconds_left)} left" in drawings[events.index(middle)]
    assert " left" not in drawn
    evaluated = [event for event in events if isinstance(event, Evaluated)][-1]
    for shown in (
        f"step {last.step:,}",
        f"{last.figures.loss:.3f}",
        f"{last.figures.tokens_per_second:,.0f} tok/s",
        f"{evaluated.val_bits_per_byte:.4f} bits per byte",
        "the cat",
    ):
        assert shown in drawn, shown
    assert sum(isinstance(event, Sampled) for event in events) > 2
    assert drawn.count("the cat") == 1, "only the newest samples"
    assert "a \\x1b[31mdog" in drawn, "control characters are escaped"
    resumed, again = _drawn(TrainingConfig(out=config.out, resume=True, steps=14))
    assert min(event.step for event in resumed if isinstance(event, Progress)) > 12
    first = next(index for index, event in enumerate(resumed) if isinstance(event, Progress))
    before = [each for each in again[:first] if any(BRAILLE < ord(part) < 0x28FF for part in each)]
    assert before, "the curve includes the part before the interruption"


def test_curve_falls_from_its_highest_to_its_lowest_loss() -> None:
    training = {step: 4.0 - step / 100 for step in range(1, 201)}
    lines = curve_text(training, {0: 9.0, 100: 3.0}, 40).plain.split("\n")
    assert len(lines) == ROWS
    assert {len(row) for row in lines} == {AXIS + 40}
    assert [lines[0][:AXIS].strip(), lines[-1][:AXIS].strip()] == ["3.990", "2.000"]
    first = [min(at for at, cell in enumerate(row[AXIS:]) if ord(cell) > BRAILLE) for row in lines]
    assert first == sorted(first)
    assert first[0] == 0


def test_watching_needs_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "--watch", "--out", str(tmp_path / "run")]) == 2
    assert "--watch draws on a terminal" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
