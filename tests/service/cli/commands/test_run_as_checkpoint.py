"""Runs in place of checkpoints: every command that reads a checkpoint uses the run's best one."""

from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.llm import LLM
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_gpt, training_record
from tests.service.cli.commands.adapters import save_tiny_adapter

COMMANDS = (
    "generate a --checkpoint mine --max-tokens 1 --seed 1",
    "eval mine --data text.txt",
    "extract mine --data text.txt --out scored --logprobs",
    "export mine exported",
    "inspect mine --text a --json",
    "merge mine adapted merged",
    "train --from mine --data text.txt --out tuned --steps 1 --lora 2 --threads 1 --compile off",
)
BENCH = "bench mine"  # it measures the machine for seconds after reading the model


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A run whose best checkpoint is not its newest, next to a run that trained an adapter for that
    best checkpoint."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and looked at the dog.\n" * 100)
    for folder in ("mine", "adapted"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").write_text("{}")
        (tmp_path / folder / "best").symlink_to("step-1")
    for step in (1, 2):
        record = training_record(step=step)
        path = tmp_path / "mine" / f"step-{step}"
        save_tiny_checkpoint(path, tiny_gpt(seed=step), training=record)
    (tmp_path / "mine" / "latest").symlink_to("step-2")
    save_tiny_adapter(tmp_path / "adapted" / "step-1", Path("mine"), tiny_gpt(seed=1))
    return tmp_path / "mine"


@pytest.mark.parametrize("path", ["mine", "mine/best"])
def test_runs_mean_their_best_checkpoint(path: str, mine: Path) -> None:
    """The reported path is the checkpoint's folder, not the link `best`, which moves while the run
    trains."""
    info = read_checkpoint(Path(path))
    assert (info.path, info.name, info.training.step) == (Path("mine/step-1"), "mine", 1)
    (mine / "best").unlink()
    assert read_checkpoint(Path("mine")).training.step == 2
    with LLM("mine", threads=1) as llm:
        assert llm.checkpoint.training.step == 2


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.slow] * each.startswith("train")) for each in COMMANDS],
)
def test_commands_accept_a_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 0, capsys.readouterr().err
    if command.startswith("train"):
        assert '"from_checkpoint": "mine/step-1"' in Path("tuned/run.json").read_text()


@pytest.mark.parametrize("command", [*COMMANDS, BENCH])
def test_commands_refuse_runs_without_a_checkpoint(
    command: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "best").unlink()
    (mine / "latest").unlink()
    assert run(command.split()) == 1
    assert "the run mine has not saved a checkpoint" in capsys.readouterr().err


def test_import_refuses_a_run(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "mine", "imported"]) == 1
    assert "mine is already a checkpoint or run of logitd" in capsys.readouterr().err


@pytest.mark.usefixtures("mine")
def test_inspect_refuses_a_text_for_several_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "mine", "mine/step-1", "--text", "a"]) == 1
    assert "--text" in capsys.readouterr().err


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "command", ["eval mien", "inspect mien", "generate a --checkpoint mien", "export mien out"]
)
def test_mistyped_paths_get_suggestions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 1
    assert "mien does not exist; " in (err := capsys.readouterr().err)
    assert err.endswith("; did you mean mine?\n")


def test_missing_paths_are_named() -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_checkpoint(Path("nowhere"))
