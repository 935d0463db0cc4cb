"""Summaries of finished, interrupted, damaged and new runs."""

import json
import shutil
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.run_folder import is_run
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.summary import differences, summarize
from logitd.model.training.trainer import train
from tests.model.conftest import configuration
from tests.model.training.test_trainer import _train_until


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, story_file: Path) -> Path:
    """A finished run, and one that was ended by Ctrl-C."""
    folder = tmp_path_factory.mktemp("runs")
    shape = {"n_layer": 1, "n_head": 1, "checkpoint_every": 12, "sample_every": None}
    train(configuration(story_file, folder / "whole", **shape))
    shape |= {"d_model": 16, "log_every": 1, "checkpoint_every": 100}
    _train_until(7, configuration(story_file, folder / "broken", **shape))
    return folder


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "whole", tmp_path / "copy", symlinks=True))


def test_summary_of_a_finished_run(runs: Path) -> None:
    found = summarize(runs / "whole")
    metrics = RunDirectory(runs / "whole").metrics()
    evals = [each for each in metrics if each["kind"] == "eval"]
    best = min(evals, key=lambda each: each["val_loss"])
    info = read_checkpoint(runs / "whole" / "best")
    assert (found.finished, found.step, found.steps, found.tokens) == (True, 12, 12, 12 * 4 * 32)
    assert (found.best_step, found.best_bits_per_byte) == (best["step"], best["val_bits_per_byte"])
    assert found.val_loss == evals[-1]["val_loss"]
    assert found.best_val_loss == info.training.val_loss
    assert found.preset == "tiny"
    assert found.changes["vocab_size"] == (1024, 320)
    assert found.changes["d_model"] == (128, 32)
    assert "matrix_lr" not in found.changes
    assert found.sampled_at == 12
    assert len(found.samples) == 3
    assert found.notes == ()
    assert f"A GPT of {found.parameters:,} parameters" in (info.path / "README.md").read_text()
    assert is_run(runs / "whole")
    assert not is_run(runs)


def test_interrupted_run_is_unfinished(runs: Path) -> None:
    found = summarize(runs / "broken")
    assert (found.finished, found.step, found.steps) == (False, 7, 12)
    assert 0 <= found.idle_seconds < 600


def test_run_whose_last_step_is_not_evaluated_is_unfinished(copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"kind": "eval"' in lines[-1]
    (copy / "metrics.jsonl").write_text("".join(lines[:-1]))
    found = summarize(copy)
    assert (found.finished, found.step) == (False, 12)


def test_differences_between_runs(runs: Path) -> None:
    found = differences([summarize(runs / "whole"), summarize(runs / "broken")])
    assert found["d_model"] == (32, 16)
    assert found["checkpoint_every"] == (12, 100)
    assert set(found) == {"d_model", "d_ff", "head_dim", "rotary_dim", "checkpoint_every"}


def test_clock_ends_a_run_without_steps(copy: Path) -> None:
    """The steps of the preset were shown as the run's, although they do not end it."""
    document = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    del document["config"]["steps"]
    document["config"]["minutes"] = 5.0
    (copy / "run.json").write_text(json.dumps(document), encoding="utf-8")
    found = summarize(copy)
    assert (found.steps, found.settings["steps"]) == (None, None)
    assert (found.minutes, found.settings["minutes"]) == (5.0, 5.0)
    assert "steps" not in found.changes


def test_summary_of_a_run_without_metrics(copy: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    (copy / "samples.txt").unlink()
    found = summarize(copy)
    assert (found.finished, found.step, found.loss, found.val_loss) == (False, 0, None, None)
    assert (found.best_step, found.samples, found.notes) == (None, (), ())


def test_cut_off_last_line_is_noted(copy: Path) -> None:
    before = summarize(copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1')
    found = summarize(copy)
    lines = len(RunDirectory(copy).metrics())
    assert found.notes == (
        f"the last line of metrics.jsonl is cut off: {lines} complete lines were read",
    )
    assert (found.step, found.val_loss) == (before.step, before.val_loss)


def test_damaged_lines_are_noted(copy: Path) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1], lines[3] = "\0\0\0\n", '["train"]\n'
    path.write_text("".join(lines))
    assert summarize(copy).notes == ("skipped 2 damaged lines of metrics.jsonl: 2, 4",)


def test_folder_that_is_no_run_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"is not a run directory: it has no run\.json"):
        summarize(tmp_path / "nowhere")
    (copy / "run.json").write_text('{"config": {}, "recipe": {}}')
    with pytest.raises(TrainingError, match="is not a valid description of a run"):
        summarize(copy)


@pytest.mark.parametrize("damaged", ["{", "[]", '{"record": {"name": "a", "sha256": 7}}'])
def test_text_whose_description_is_damaged_is_left_out(copy: Path, damaged: str) -> None:
    assert summarize(copy).settings["special_tokens"] == "text"
    (copy / "data" / "data.json").write_text(damaged)
    assert "data" not in summarize(copy).settings
