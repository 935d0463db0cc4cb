"""The run directory's bookkeeping."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from logitd.model.checkpoint.card_and_curve import read_samples
from logitd.model.files import folder_aside
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.finetune import Base
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.metrics_log import NUMBERS
from tests.model.factories import tiny_config

TRAINING = ResolvedTraining(
    config=TrainingConfig(steps=20, data=("a.txt",)),
    recipe=PRESETS["tiny"].recipe,
    model=tiny_config(),
    base=Base({"name": "base", "weights_sha256": "0"}, None),
)


def train_record(step: int) -> dict[str, Any]:
    numbers = dict.fromkeys(NUMBERS["train"], 1.0)
    return {"kind": "train", "step": step, **numbers}


def eval_record(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "seconds": 1.0, "val_loss": loss,
            "val_bits_per_byte": loss}  # fmt: skip


def _run(path: Path, losses: dict[int, float]) -> RunDirectory:
    run = RunDirectory.create(path)
    run.write_training(TRAINING)
    for step, loss in losses.items():
        run.checkpoint(step).mkdir()
        run.append(train_record(step))
        run.append(eval_record(step, loss))
    run.link_newest_and_best()
    return run


def test_links_are_relative_and_lead_to_the_newest_and_the_best(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0, 10: 2.0, 15: 2.5})
    assert run.latest.readlink() == Path("step-000015")
    assert run.best.readlink() == Path("step-000010")
    moved = tmp_path / "moved"
    run.path.rename(moved)
    assert RunDirectory.open(moved).linked_step(moved / "best") == 10


def test_folder_in_place_of_a_link_is_explained(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0, 10: 2.0})
    copy = RunDirectory(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)  # follows links
    with pytest.raises(TrainingError, match=r"latest is a folder .* best and latest"):
        copy.link_newest_and_best()
    for link in (copy.best, copy.latest):
        link.rmdir()
    copy.link_newest_and_best()
    assert copy.linked_step(copy.best) == 10


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0, 10: 2.0, 15: 2.5, 20: 2.6, 25: 2.7})
    run.prune(keep=2, state_step=15)
    assert list(run.checkpoints()) == [10, 15, 20, 25]
    run.prune(keep=2, state_step=25)
    assert list(run.checkpoints()) == [10, 20, 25]


def test_rewinding_removes_later_records(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0, 10: 2.0, 15: 1.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # cut by a kill
    run.rewind(10)
    assert list(run.checkpoints()) == [5, 10]
    assert [record["step"] for record in run.metrics()] == [5, 5, 10, 10]
    assert (run.linked_step(run.latest), run.linked_step(run.best)) == (10, 10)
    run.rewind(0)
    assert not run.latest.is_symlink()
    assert not run.best.is_symlink()


DAMAGED = (
    b"\0\0\0\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b"[1]\n",
    b'{"kind": ["train"]}\n',
    b'{"kind": "train", "step": 1}\n',
    *(
        json.dumps(train_record(1) | {name: value}).encode() + b"\n"
        for name, value in (
            ("step", "1"),
            ("step", True),
            ("seconds", "x"),
            ("loss", [1.0]),
            ("learning_rate", float("nan")),
            ("tokens_per_second", None),
            ("done", "half"),
            ("tokens", 10**400),
        )
    ),
    json.dumps(eval_record(1, float("nan"))).encode() + b"\n",
)


def test_rewinding_drops_damaged_lines_with_a_note(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0, 10: 2.0})
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    for line in DAMAGED:
        path.write_bytes(line + whole)
        notes = run.rewind(10)
        assert notes == ("skipped 1 damaged line of metrics.jsonl: 1",), line[:80]
        assert path.read_bytes() == whole
        assert run.linked_step(run.best) == 10


def test_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0})
    path = run.path / "metrics.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl is a pipe"):
        run.rewind(5)


def test_rewinding_keeps_samples_that_are_not_text(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {5: 3.0})
    path, endless = run.path / "samples.txt", b"=== step " + b"9" * 5000 + b"\n"
    path.write_bytes(b"=== step 5\n\xff\n\n" + endless + b"=== step 6\nlater\n\n")
    run.rewind(5)
    assert path.read_bytes() == b"=== step 5\n\xff\n\n" + endless
    assert read_samples(run.path)[0] == 5


def test_rewinding_removes_unfinished_files(tmp_path: Path) -> None:
    """The temporary folder of a checkpoint matches two patterns. It was once removed twice, so a
    run that was killed while saving could not be resumed."""
    run = _run(tmp_path / "run", {5: 3.0})
    run.state.parent.mkdir()
    half_written = (run.state.with_name(".state.pt.0.part"), run.path / ".run.json.part")
    left = (folder_aside(run.checkpoint(10)), *half_written)
    for path in (left[0] / "weights", *half_written):
        path.touch()
    run.rewind(5)
    assert not any(path.exists() for path in left)
    assert list(run.checkpoints()) == [5]


def test_existing_run_is_not_overwritten_and_a_missing_one_not_resumed(tmp_path: Path) -> None:
    _run(tmp_path / "run", {}).release()
    with pytest.raises(TrainingError, match="already exists: resume it with --resume"):
        RunDirectory.create(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"has no run\.json"):
        RunDirectory.open(tmp_path / "elsewhere")
    RunDirectory.create(tmp_path / "a" / "b")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(TrainingError, match=r"run\.json cannot be read"):
        RunDirectory.open(tmp_path / "run").read_training()


def test_description_is_read_back_as_written(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {})
    assert run.read_training() == TRAINING
    assert json.loads((run.path / "run.json").read_text())["config"] == {
        "steps": 20,
        "data": ["a.txt"],
    }
    (run.path / "run.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"run\.json .*: config is missing$"):
        run.read_training()
    (run.path / "run.json").write_text('{"config": {"stepz": 1}, "recipe": {}, "model": {}}')
    with pytest.raises(TrainingError, match=r"run\.json .*stepz"):
        run.read_training()


@pytest.mark.parametrize(
    ("section", "change", "reason"),
    [
        ("recipe", {"batch_size": "x"}, "recipe.batch_size is 'x'"),
        ("recipe", {"dtype": 7}, "recipe.dtype is 7"),
        ("recipe", {"seed": None}, "recipe.seed is None"),
        ("recipe", {"speed": 7}, "recipe.speed is unknown"),
        ("model", {"d_ff": "x"}, "d_ff is 'x'"),
        ("base", {"record": {}}, "base.record.name is missing"),
        ("config", {"data": 7}, "config.data is 7"),
    ],
)
def test_invalid_description_is_refused(
    tmp_path: Path, section: str, change: dict[str, Any], reason: str
) -> None:
    run = _run(tmp_path / "run", {})
    document = json.loads((run.path / "run.json").read_text())
    document[section] |= change
    contents: list[Any] = [document, [], 7]
    for written in contents:
        (run.path / "run.json").write_text(json.dumps(written))
        sentence = reason if isinstance(written, dict) else "the document is"
        with pytest.raises(TrainingError, match=f"run.json is not a valid .*: {sentence}"):
            run.read_training()


def test_linked_folder_of_a_failed_run_is_left_empty(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    run = RunDirectory.create(tmp_path / "run")
    run.data.mkdir()
    run.discard()
    assert list((tmp_path / "disk").iterdir()) == []
    RunDirectory.create(tmp_path / "run").release()


def test_mount_point_of_a_failed_run_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a container may be mounted at --out. Only its contents can be removed."""

    def busy(path: object, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    run = RunDirectory.create(tmp_path / "run")
    run.data.mkdir()
    (run.data / "train.tokens").touch()
    with monkeypatch.context() as patch:
        remove = os.rmdir
        patch.setattr(
            os, "rmdir", lambda path, **to: (busy if path == run.path else remove)(path, **to)
        )
        run.discard()
    assert list(run.path.iterdir()) == []
    RunDirectory.create(run.path).release()
