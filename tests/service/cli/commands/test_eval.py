"""`logitd eval`: its output on the terminal and as JSON."""

import json
import re
from pathlib import Path

import pytest
import torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.evaluation.text_loss import text_loss
from logitd.service.cli.main import run
from tests.model.factories import (
    CHAT_TEMPLATE,
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a text of some words, “quoted”")
    return path


def test_json_has_the_measured_values(
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


def test_terminal_shows_the_measured_values(
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
    ("scale", "content", "infinite", "printed"),
    [
        (1e5, "a text of some words", {"perplexity"}, r"perplexity +inf\n"),
        # Only the end of the document is predicted, which has no bytes.
        (1.0, "a", {"bits_per_byte"}, "no bits per byte: the counted tokens have no bytes"),
    ],
)
def test_infinite_number_is_null_in_json(
    scale: float,
    content: str,
    infinite: set[str],
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpt = tiny_gpt()
    with torch.no_grad():
        gpt.get_parameter("final_norm.weight").mul_(scale)
    path = save_tiny_checkpoint(tmp_path / "tiny", gpt=gpt).path
    Path("t.txt").write_text(content)
    flags = ["--data", "t.txt", "--dtype", "float32", "--threads", "1"]
    assert run(["eval", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert re.search(printed, out)
    assert ("inf" in out) == (scale > 1)
    assert run(["eval", str(path), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["loss"] > 709) == (scale > 1)
    assert {name for name, value in found.items() if value is None} == infinite


@pytest.mark.parametrize("command", ["eval", "extract"])
@pytest.mark.parametrize(
    ("template", "record", "ids"),
    [
        (None, {}, False),
        (CHAT_TEMPLATE, {}, True),
        (CHAT_TEMPLATE, {"special_tokens": "text"}, False),
        (None, {"special_tokens": "ids"}, True),
    ],
)
def test_special_token_names_are_encoded_as_in_training(
    command: str,
    template: str | None,
    record: dict[str, str],
    ids: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = save_tiny_checkpoint(
        tmp_path / "tiny",
        gpt=tiny_gpt(tiny_config(vocab_size=259)),
        tokenizer=chat_tokenizer(),
        chat_template=template,
        training=training_record(data=record),
    ).path
    Path("t.txt").write_text("<|im_start|>user<|im_end|>")
    arguments = [command, str(path), "--data", "t.txt", "--threads", "1", "--json"]
    if command == "extract":
        arguments += ["--out", "out", "--stages", "embedding"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == (6 if ids else 26)


@pytest.mark.parametrize("command", ["eval", "extract"])
def test_text_is_read_with_the_flags_of_training(
    command: str, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.csv").write_text("id,body\n1,one--two\n")
    arguments = [command, str(checkpoint_path), "--data", "a.csv", "--threads", "1", "--json"]
    if command == "extract":
        arguments += ["--out", "out", "--stages", "embedding"]
    assert run(arguments) == 1
    assert re.search(r"no column 'text'.*'body'.*--text-field", capsys.readouterr().err)
    assert run([*arguments, "--text-field", "body", "--split-at", "--"]) == 0
    ends = {"eval": 1, "extract": 0}[command]  # of two documents; the first token is not predicted
    assert json.loads(capsys.readouterr().out)["tokens"] == len("onetwo") + ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; expected the directory of a checkpoint or of a run"),
        (["CHECKPOINT", "--data", "nowhere.txt"], "nowhere.txt is not a file"),
        (["CHECKPOINT"], "no held-out text"),
        (["CHECKPOINT", "--device", "tpu"], "is not a device"),
    ],
)
def test_eval_of_an_impossible_request_exits_1(
    checkpoint_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint_path) if word == "CHECKPOINT" else word for word in arguments]
    assert run(["eval", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("logitd eval: ")
    assert message in err
