"""`logitd eval` on the terminal and as JSON, and beside the numbers that are served."""

import json
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.evaluation.text_loss import text_loss
from logitd.service.cli.main import run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without somebody's .env."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a text of some words, “quoted”")
    return path


def test_json_is_what_was_measured(
    checkpoint_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(text), "--dtype", "float32", "--threads", "1", "--stride", "8"]
    assert run(["eval", str(checkpoint_path), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = text_loss(checkpoint_path, [str(text)], dtype="float32", threads=1, stride=8)
    info = read_checkpoint(checkpoint_path)
    assert found.pop("seconds") > 0
    assert found.pop("tokens_per_second") > 0
    assert found == {
        "checkpoint": str(checkpoint_path),
        "name": "tiny",
        "step": 7,
        "weights_sha256": info.weights_sha256,
        "text": str(text),
        "tokens": len(text.read_bytes()),
        "bytes": len(text.read_bytes()) - 1,
        "loss": measured.evaluation.loss,
        "perplexity": measured.evaluation.perplexity,
        "bits_per_byte": measured.evaluation.bits_per_byte,
        "window": len(text.read_bytes()),
        "stride": 8,
        "dtype": "float32",
        "quantize": "none",
        "kv_cache_dtype": "auto",
        "device": "cpu",
        "threads": 1,
    }


def test_a_person_reads_the_same(
    checkpoint_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(text), "--dtype", "float32", "--threads", "1"]
    assert run(["eval", str(checkpoint_path), *flags]) == 0
    printed = capsys.readouterr().out
    evaluation = text_loss(checkpoint_path, [str(text)], dtype="float32", threads=1).evaluation
    for part in (
        "tiny, step 7",
        str(text),
        f"{evaluation.tokens} tokens, each once, for {evaluation.text_bytes} bytes",
        f"{evaluation.loss:.4f} nats per token",
        f"{evaluation.perplexity:.2f}",
        f"{evaluation.bits_per_byte:.4f} bits per byte",
        "(float32, cpu, threads: 1)",
    ):
        assert part in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; expected the directory of a checkpoint"),
        (["CHECKPOINT", "--data", "nowhere.txt"], "nowhere.txt is not a file"),
        (["CHECKPOINT"], "lies in no run directory"),
        (["CHECKPOINT", "--device", "tpu"], "is not a device"),
    ],
)
def test_what_cannot_be_measured_exits_1(
    checkpoint_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(checkpoint_path) if word == "CHECKPOINT" else word for word in arguments]
    assert run(["eval", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("logitd eval: ")
    assert message in err
