"""`logitd inspect`: facts about a checkpoint, and the stages of a forward pass with their
shapes."""

from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.trace import trace
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record


def inspect(capsys: pytest.CaptureFixture[str], checkpoint: Path, *flags: str) -> str:
    assert run(["inspect", str(checkpoint), *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def unfolded(text: str) -> str:
    """A table without the line breaks of a narrow terminal."""
    return "".join(text.split())


def test_facts_are_complete(checkpoint_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint: CheckpointInfo = read_checkpoint(checkpoint_path)
    printed = unfolded(inspect(capsys, checkpoint_path))
    for name, value in {
        "checkpoint": checkpoint_path,
        "weights sha256": checkpoint.weights_sha256,
        "step": 7,
        "validation loss": "2.5000 nats per token",
        "data: licence": "MIT",
        "model: n_layer": 3,
        "model: positions": "learned",
    }.items():
        assert unfolded(f"{name}{value}") in printed, name


@pytest.mark.parametrize("columns", ["200", "80", "40"])
def test_stages_have_their_shapes(
    checkpoint_path: Path, gpt: GPT, columns: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", columns)
    printed = inspect(capsys, checkpoint_path, "--text", "five!")
    assert "5 tokens: 'f' 'i' 'v' 'e' '!'" in printed
    figures, meanings = printed.split("meanings of the stages")
    rows = [line.split("│") for line in figures.splitlines() if line.startswith("│")]
    names = unfolded("".join(row[1] for row in rows))
    shapes = unfolded("".join(row[2] for row in rows))
    stages = trace(gpt, list(b"five!"))
    assert names == unfolded("".join(stage.name for stage in stages))
    assert shapes == unfolded("".join(" x ".join(map(str, stage.shape)) for stage in stages))
    assert {(5, 257), (5, 4, 5), (5, 32)} < {stage.shape for stage in stages}
    assert unfolded("blocks.N.attention.q") in unfolded(
        "".join(line.split("│")[1] for line in meanings.splitlines() if line.startswith("│"))
    )


def test_unusual_names_are_shown_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square brackets are markup in the library that draws the table."""
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "[red]odd[bold]"
    save_tiny_checkpoint(
        path,
        training=training_record(val_loss=None, val_bits_per_byte=None,
                                 data={"files": "[/notes] and [link]", "[b]": 1}),
    )  # fmt: skip
    printed = inspect(capsys, path, "--text", "[red]a[/]")
    for text in (str(path), "[/notes] and [link]", "data: [b]", "never evaluated"):
        assert text in printed
    assert "'[' 'r' 'e' 'd' ']' 'a' '[' '/' ']'" in printed


def test_families_have_their_own_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt = tiny_gpt(tiny_config(norm_position="post", n_kv_head=2, n_layer=1))
    path = save_tiny_checkpoint(tmp_path / "post", gpt=gpt).path
    printed = inspect(capsys, path, "--text", "ab")
    assert "│ final_norm" not in printed
    assert "2 x 2 x 8" in printed  # keys of two heads


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "--text has 0 tokens; give 1 to 128"),
     ("x" * 129, "--text has 129 tokens; give 1 to 128")],
)  # fmt: skip
def test_texts_that_do_not_fit_exit_1(
    checkpoint_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(checkpoint_path), "--text", text]) == 1
    assert capsys.readouterr() == ("", f"logitd inspect: {message}\n")
