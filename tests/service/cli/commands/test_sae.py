"""`logitd sae train`, from a text to a folder that a server reads."""

import json
import re
import shutil
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.data.sources.open_text import open_text
from logitd.model.sae.files import read_autoencoder
from logitd.model.sae.training import activations, fit, measure
from logitd.model.sae.training import run as training
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt

WIDTH = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gpt = tiny_gpt(tiny_config(d_model=WIDTH, n_layer=2))
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", gpt=gpt).path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i * i} of a text\n" for i in range(600)), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a text of a few thousand tokens."""
    monkeypatch.setattr(activations, "SHUFFLED_POSITIONS", 512)
    monkeypatch.setattr(training, "BATCH", 256)
    monkeypatch.setattr(fit, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(measure, "FACTS_TOKENS", 4000)


def arguments(checkpoint: Path, text: Path, out: Path, *more: str) -> list[str]:
    flags = ["--stage", "blocks.0.output", "--data", str(text), "--out", str(out)]
    sizes = ["--features", "64", "-k", "4", "--tokens", "2048", "--threads", "1"]
    return ["sae", "train", str(checkpoint), *flags, *sizes, "--device", "cpu", *more]


def test_training_writes_a_folder_and_its_figures(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(checkpoint, text, tmp_path / "mine", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stage"] == "blocks.0.output"
    assert facts["tokens"] == 2048
    figures = facts["figures"]
    assert 0.2 < figures["explained_variance"] < 1
    assert 0 < figures["active"] <= 4
    assert figures["loss"] < figures["loss_zero"]
    stored = read_autoencoder(tmp_path / "mine")
    assert stored.hook == "blocks.0.hook_resid_post"
    assert stored.record["figures"]["loss_recovered"] == figures["loss_recovered"]
    assert stored.facts is not None
    assert stored.facts.density.sum() == pytest.approx(figures["active"], rel=0.2)
    assert (stored.facts.density == 0).mean() == pytest.approx(figures["dead"])
    arrays = sum(path.stat().st_size for path in (tmp_path / "mine").glob("*.safetensors"))
    assert arrays == pytest.approx(measure.stored_bytes(64, WIDTH), abs=2000)  # and two headers
    assert run(arguments(checkpoint, text, tmp_path / "again")) == 0
    out = capsys.readouterr().out
    assert f"--sae again={tmp_path / 'again'}" in out.replace("\\\n", "")
    for name in ("sae_weights.safetensors", "features.safetensors"):
        first, second = ((tmp_path / run / name).read_bytes() for run in ("mine", "again"))
        assert first == second, f"{name} must be determined by the seed"


def test_minutes_that_end_before_the_first_batch_are_refused(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--stage", "blocks.0.output", "--data", str(text), "--out", str(tmp_path / "mine")]
    sizes = ["--features", "64", "-k", "4", "--minutes", "0.00001", "--threads", "1"]
    assert run(["sae", "train", str(checkpoint), *flags, *sizes, "--device", "cpu"]) == 1
    assert re.search(r"minutes is 1e-05.*--minutes.*--tokens", capsys.readouterr().err, re.DOTALL)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--stage", "blocks.0.attention.q"), r"blocks\.0\.attention\.q.*one axis"),
        (("--stage", "blocks.*.output"), r"blocks\.\*\.output.*single stage"),
        (("--stage", "nothing"), "nothing"),
        (("--features", "3"), "k is 4.*3 features"),
    ],
)
def test_impossible_autoencoders_are_refused(
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    expected: str,
) -> None:
    assert run(arguments(checkpoint, text, tmp_path / "mine", *more)) == 1
    assert re.search(expected, capsys.readouterr().err)
    assert not (tmp_path / "mine").exists()


def test_windows_of_a_long_context_are_short(
    checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "LONGEST", 16)
    units = list(activations._windows(read_checkpoint(checkpoint), open_text([str(text)])))
    assert {len(unit.token_ids) for unit in units[:-1]} == {16}


def test_full_disk_is_noticed_before_the_training(
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**17))
    assert run(arguments(checkpoint, text, tmp_path / "no" / "mine")) == 1
    assert re.search(r"mine would take 1 MiB, but its disk has only 0 MiB", capsys.readouterr().err)


def test_existing_folders_and_short_texts_are_refused(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(checkpoint, text, tmp_path)) == 1
    assert "already exists" in capsys.readouterr().err
    assert run(arguments(tmp_path / "missing", text, text / "mine")) == 1
    assert "mine cannot be written: Not a directory" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("short")
    assert run(arguments(checkpoint, short, tmp_path / "mine")) == 1
    assert "0 windows" in capsys.readouterr().err
