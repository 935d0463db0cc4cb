"""`logitd merge` on the terminal. tests/model/checkpoint/test_adapter.py checks the weights."""

from pathlib import Path

import pytest

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.lora import LoraShape, trained_weights
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_gpt, training_record
from tests.model.transformer.test_lora import adapted

SHAPE = LoraShape(rank=2, alpha=4.0, targets=TARGETS)


@pytest.fixture(autouse=True)
def folders(elsewhere: None) -> None:
    info = save_tiny_checkpoint(Path("base"))
    record = {"name": "base", "weights_sha256": info.weights_sha256, "step": 7}
    gpt = adapted(tiny_gpt(), SHAPE, b=0.05)
    training = training_record(base=record)
    weights = trained_weights(gpt)
    save_adapter(Path("adapter"), weights=weights, shape=SHAPE, training=training, card="# a\n")


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
