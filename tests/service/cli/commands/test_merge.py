"""`logitd merge` on the terminal. tests/model/checkpoint/test_adapter.py checks the weights."""

from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_gpt
from tests.service.cli.commands.adapters import save_tiny_adapter


@pytest.fixture(autouse=True)
def folders(elsewhere: None) -> None:
    save_tiny_checkpoint(Path("base"))
    save_tiny_adapter(Path("adapter"), Path("base"), tiny_gpt())


def test_merged_checkpoints_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["merge", "base", "adapter", "merged", "--save-dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    info = read_checkpoint(Path("merged"))
    assert info.weights_sha256 in out
    assert out.endswith("serve it:  logitd serve merged\n")
    assert err == ""
    assert run(["inspect", "merged"]) == 0
    assert "fine-tuned from: name" in capsys.readouterr().out


def test_wrong_bases_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_checkpoint(Path("other"), gpt=tiny_gpt(seed=1))
    assert run(["merge", "other", "adapter", "merged"]) == 1
    assert "logitd merge: the adapter adapter was trained on base" in capsys.readouterr().err
