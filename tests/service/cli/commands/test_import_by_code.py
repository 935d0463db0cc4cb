"""`logitd import --code` and `logitd serve --code`: when they keep the owner's code in the
checkpoint, and their messages."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.owner_code.config import CodeConfig
from logitd.service.cli.commands import import_model
from logitd.service.cli.commands.import_model import for_serving
from logitd.service.cli.commands.servable import NotServable
from logitd.service.cli.main import run
from tests.model.owner_code.classes import CONTEXT, VOCABULARY, made
from tests.model.owner_code.imported import LETTERS, imported, source, written


def test_non_gpt_is_refused_with_the_flag_for_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, code = source("ResidualAttention", tmp_path)
    assert run(["import", path.name, "out", "--code", code]) == 1
    error = capsys.readouterr().err
    assert "tensors without a known role in a GPT: choose.0" in error
    assert f"logitd import {path.name} out --code {code} --run-code" in error
    with pytest.raises(NotServable) as refusal:
        for_serving(path, may_import=True, code=code)
    assert f"logitd serve {path} --code {code} --run-code" in str(refusal.value)


def test_question_that_a_flag_answers_does_not_suggest_to_run_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asking(*arguments: Any, **options: Any) -> None:
        raise OpenQuestions("--norm-eps 1e-06|1e-08", ["norm_eps"])

    monkeypatch.setattr(import_model, "import_model", asking)
    path, code = source("ResidualAttention", tmp_path)
    assert run(["import", str(path), "out", "--code", code]) == 1
    error = capsys.readouterr().err
    assert "--norm-eps 1e-06|1e-08" in error
    assert "--run-code" not in error


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run-code"], "add --code"),
        (["--code-call", "model(ids)"], "add --code"),
        (["--code", "x.py:X", "--lens-norm", "norm"], "add --run-code"),
        (["--code", "x.py:X", "--run-code", "--check", "x.txt"], "logitd eval"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", "model.pt", "out", *flags]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--code-call", "model(ids)"], "add --code"),
        (["--tokenizer", "none"], "add --import or --code"),
        (["--import", "--tokenizer", "none"], "is a checkpoint, .*remove --tokenizer"),
    ],
)
def test_flags_that_would_have_no_effect_on_a_server_are_refused(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(written(tmp_path)), *flags]) != 0
    assert re.search(sentence, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "0 1", "--checkpoint"],
        ["bench"],
        ["eval", "--data", "text.txt", "--checkpoint"],
        ["inspect"],
        ["extract", "--data", "text.txt", "--out", "out", "--logprobs", "--checkpoint"],
        ["train", "--data", "text.txt", "--out", "out", "--from"],
    ],
)
def test_commands_say_in_one_line_that_code_is_not_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat saw the dog. " * 20)
    path = written(tmp_path, "import os; os._exit(7)")
    words = [str(tmp_path / word) if word in ("text.txt", "out") else word for word in arguments]
    assert run([*words, str(path)]) == 1
    error = capsys.readouterr().err
    assert "owner's code (owner.py:Model)" in error or "no vocabulary" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_serving_a_foreign_file_imports_it_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, code = source("Mixture", tmp_path)
    made = for_serving(path, may_import=True, code=code, run_code=True)
    config = read_checkpoint(made).shape
    assert isinstance(config, CodeConfig)
    assert config.file == "owner.py"
    assert for_serving(path, may_import=True, code=code, run_code=True) == made
    file = Path(code.partition(":")[0])
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(NotServable, match=r"was not imported from .* with this --code"):
        for_serving(path, may_import=True, code=code, run_code=True)
    assert "computed by its owner's code: owner.py" in capsys.readouterr().out


@pytest.mark.slow
def test_serving_a_foreign_file_with_its_call_and_a_vocabulary(tmp_path: Path) -> None:
    _, code = source("Masked", tmp_path)
    torch.save(made("Masked").state_dict(), tmp_path / "bare.pt")
    code = code.replace(":Masked", f":Masked({VOCABULARY})")
    serve = partial(for_serving, tmp_path / "bare.pt", may_import=True, run_code=True)
    flags: dict[str, Any] = {"code": code, "code_call": "model(ids, mask=torch.ones_like(ids))"}
    with pytest.raises(NotServable, match=r"import .*bare\.pt .*--code-call .*--run-code"):
        serve(**flags)  # the file has no vocabulary
    config = read_checkpoint(serve(**flags, tokenizer="none")).shape
    assert isinstance(config, CodeConfig)
    assert config.call == flags["code_call"]
    assert serve(**flags) == serve(**flags, tokenizer="none")
    with pytest.raises(NotServable, match=r"was not imported from .* with --tokenizer ascii"):
        serve(**flags, tokenizer="ascii")
    with pytest.raises(NotServable, match=r"was not imported from .* with this --code"):
        serve(code=code)


@pytest.mark.slow
def test_commands_compute_with_code_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(imported("Mixture", tmp_path))
    text = ("the cat saw a dog. " * 20)[: 7 * CONTEXT + 1]  # whole windows
    (tmp_path / "text.txt").write_text(text)
    data = ["--data", str(tmp_path / "text.txt"), "--run-code"]
    capsys.readouterr()
    assert run(["eval", path, *data, "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    ids = torch.tensor([LETTERS.index(letter) for letter in text])
    model, nats = made("Mixture"), 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits, _ = model(window[None, :-1])
        nats += float(F.cross_entropy(logits[0], window[1:], reduction="sum"))
    assert loss == pytest.approx(nats / (len(ids) - 1), abs=1e-5)
    for quantity in (["--top-k", "2"], ["--stages", "h.*.mlp"]):
        out = str(tmp_path / f"out{quantity[0]}")
        assert run(["extract", path, *data, "--out", out, *quantity]) == 0
    capsys.readouterr()
    assert run(["bench", path, "--run-code", "--batches", "1", "--tokens", "12"]) == 0
    assert "owner.py:Mixture (each token computes the sequence again" in capsys.readouterr().out
