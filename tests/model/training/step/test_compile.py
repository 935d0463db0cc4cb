"""Compiling: when a run is compiled, that it computes the same, and what happens where it fails."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import Compile
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.step.compile import CompiledLoss, choose_loss, compiles
from logitd.model.training.step.forward import Forward
from logitd.model.training.trainer import train
from tests.model.conftest import Configure
from tests.model.training.step.test_forward import EXACT, _small
from tests.model.training.test_trainer import _losses, _state, _train_until


def _resolved(speed: float = 0.0, **given: Any) -> str:
    training = resolve(TrainingConfig(**given))
    recipe = training.recipe
    vocab_size = 50_257 if recipe.tokenizer == "gpt2" else recipe.vocab_size
    return training.with_vocabulary(vocab_size, speed).config.compile


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"preset": "tiny"}, "auto"),
        ({"preset": "small"}, "on"),
        ({"preset": "gpt2-124m"}, "on"),
        ({"preset": "small", "compile": "off"}, "off"),
        ({"preset": "tiny", "compile": "on"}, "on"),
        ({"preset": "small", "steps": 500}, "auto"),
        ({"preset": "small", "minutes": 5}, "auto"),
        ({"preset": "small", "minutes": 5, "steps": 3000}, "auto"),
        ({"preset": "tiny", "minutes": 15, "speed": 20_000}, "on"),
        ({"preset": "tiny", "minutes": 15, "speed": 5_000}, "auto"),
        ({"preset": "tiny", "minutes": 60, "speed": 5_000}, "on"),
        ({"preset": "tiny", "minutes": 14, "speed": 500_000}, "auto"),
        ({"preset": "tiny", "minutes": 60, "steps": 10}, "auto"),
    ],
)
def test_auto_is_on_where_a_run_is_long_enough_to_earn_it_back(
    given: dict[str, Any], expected: str
) -> None:
    assert _resolved(**given) == expected


@pytest.mark.parametrize(
    ("device", "option", "minutes", "expected"),
    [
        ("cpu", "auto", None, False),
        ("cpu", "off", None, False),
        ("cpu", "on", 1, True),
        ("cuda", "auto", None, True),
        ("cuda", "auto", 5, True),
        ("cuda", "auto", 2, False),
        ("cuda", "on", 2, True),
        ("cuda", "off", None, False),
    ],
)
def test_what_stays_auto_compiles_on_cuda_alone(
    device: str, option: Compile, minutes: float | None, expected: bool
) -> None:
    compiled = compiles(option, torch.device(device), minutes)
    assert compiled == expected
    forward = Forward(_small()[0], EXACT, dropout=0.0)
    loss = choose_loss(forward, lambda notice: None, compiled=compiled)
    assert isinstance(loss, CompiledLoss) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compilers_graph_computes_the_same_and_draws_nothing_for_its_trial() -> None:
    """torch's own tracing, without the C compiler behind it."""
    gpt, ids, targets = _small(dropout=0.1)
    gpt.train()
    forward = Forward(gpt, EXACT, dropout=0.1)
    notices: list[str] = []
    compiled = CompiledLoss(forward, notices.append, backend="aot_eager")
    torch.manual_seed(3)
    expected = torch.autograd.grad(forward.loss(ids, targets), forward.parameters())
    torch.manual_seed(3)
    found = torch.autograd.grad(compiled(ids, targets), forward.parameters())
    assert len(notices) == 1
    assert notices[0].startswith("compiling")
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_compiling_fails_training_goes_on_eager_with_one_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found")
        raise RuntimeError("no C compiler here\nand many lines more")

    gpt, ids, targets = _small()
    forward = Forward(gpt, EXACT, dropout=0.0)
    notices: list[str] = []
    compiled = CompiledLoss(forward, notices.append, backend=broken)
    for _ in range(2):
        assert torch.equal(compiled(ids, targets), forward.loss(ids, targets))
    assert len(notices) == 2
    assert notices[0].startswith("compiling")
    assert notices[1].startswith("not compiled")
    assert "no C compiler here" in notices[1]
    assert "\n" not in notices[1]
    assert "No CUDA runtime" not in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile wants a C++ compiler")
def test_a_compiled_run_that_is_stopped_and_resumed_ends_in_the_same_bits(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own compiler, and with what `auto` was resolved to: the second half would compute
    in other bits if it were decided anew."""
    monkeypatch.setattr("logitd.model.training.configuration.resolve.LONG_OPERATIONS", 1.0)
    options: dict[str, Any] = {
        "dropout": 0.1, "steps": 8, "eval_every": 4, "checkpoint_every": 4, "n_layer": 1,
    }  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(configure(out=whole, **options))
    _train_until(4, configure(out=halves, **options))
    assert RunDirectory(halves).read_training().config.compile == "on"
    monkeypatch.undo()
    notices: list[str] = []
    train(
        TrainingConfig(out=halves, resume=True),
        lambda event: notices.append(getattr(event, "message", "")),
    )
    assert any(each.startswith("compiling") for each in notices)
    assert _state(halves) == _state(whole)
    assert _losses(halves) == _losses(whole)
