"""`logitd inspect RUN ...` shows one run in full, or compares several runs."""

import json
from pathlib import Path

import pytest

from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.run.summary import summarize
from logitd.model.training.trainer import train
from logitd.service.cli.main import run
from tests.model.conftest import story


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in a learning rate, in a window and in their texts."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name, rate, windows in ((1, "slow", 0.001, None), (2, "fast", 0.02, (None,))):
        (folder / name).with_suffix(".txt").write_text(story(300, seed))
        config = TrainingConfig(
            data=(f"{folder / name}.txt",), out=folder / name, matrix_lr=rate, vocab_size=300,
            n_layer=1, n_head=1, d_model=16, windows=windows, context_length=16, steps=4,
            batch_size=2, eval_every=100, eval_batches=1, checkpoint_every=100, sample_tokens=3,
            threads=1, dtype="float32", log_every=1,
        )  # fmt: skip
        train(config)
    return folder


@pytest.fixture(autouse=True)
def wide(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal, in a working directory without a .env."""
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "200")


def test_single_runs_are_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "slow"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = summarize(Path("slow"))
    for row in (
        ["preset", "tiny"],
        ["matrix_lr", "0.001", "(preset:", "0.035)"],
        ["d_model", "16", "(preset:", "128)"],
        ["parameters", f"{found.parameters:,}"],
        ["state", "finished"],
        ["step", "4", "of", "4"],
        ["tokens", "128"],
        ["bits", "per", "byte", f"{found.val_bits_per_byte:.4f}"],
        ["---", "sample", "at", "step", "4"],
    ):
        assert row in rows, row
    printed = "".join("".join(row) for row in rows)
    assert "".join(found.samples[-1].split()) in printed


def test_several_runs_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["inspect", "slow", "fast"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    rows = {name.strip(): [value.strip() for value in values] for name, *values in cells}
    assert rows["preset"] == ["tiny", "tiny"]
    assert rows["steps"] == ["4", "4"]
    assert rows["windows"] == ["-", "all"]
    assert rows["data_sha256"][0] != rows["data_sha256"][1]
    assert rows["tokens"] == ["128", "128"]
    best = [f"{summarize(Path(name)).best_bits_per_byte:.4f}" for name in ("slow", "fast")]
    assert rows["best bits/byte"] == best
    assert rows["state"] == ["finished", "finished"]
    assert rows["matrix_lr"] == ["0.001", "0.02"]


def test_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "slow", "fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in found] == ["slow", "fast"]
    assert run(["inspect", "fast", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["changes"]["matrix_lr"] == {"preset": 0.035, "run": 0.02}
    assert one["best_val_loss"] == summarize(Path("fast")).best_val_loss
    assert one["finished"] is True


def test_checkpoints_next_to_a_run_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "slow", "slow/best"]) == 1
    assert "slow/best is not a run directory" in capsys.readouterr().err
