"""Compiling: which runs are compiled, equal results, and a failing compiler.

tests/e2e/test_torchrun.py runs torch's C++ compiler, which takes a minute.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.training import trainer
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import Compile
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.step.compile import CompiledLoss, compiles
from logitd.model.training.step.forward import Forward
from logitd.model.training.trainer import train
from tests.model.conftest import Configure
from tests.model.training.step.test_forward import EXACT, _small
from tests.model.training.test_trainer import _losses, _state, _train_until


def _resolved(speed: float = 0.0, **given: Any) -> str:
    training = resolve(TrainingConfig(**given))
    recipe = training.recipe
    vocab_size = 50_257 if recipe.tokenizer == "gpt2" else recipe.vocab_size
    return training.with_vocabulary(vocab_size, lambda _: speed).config.compile


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
        ({"preset": "tiny", "minutes": 15, "speed": 30_000}, "on"),
        ({"preset": "tiny", "minutes": 15, "speed": 5_000}, "auto"),
        ({"preset": "tiny", "minutes": 60, "speed": 7_000}, "on"),
        ({"preset": "tiny", "minutes": 14, "speed": 500_000}, "auto"),
        ({"preset": "tiny", "minutes": 60, "steps": 10}, "auto"),
    ],
)
def test_auto_becomes_on_in_a_run_that_earns_compiling_back(
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
        ("cuda", "auto", 1.5, False),
        ("cuda", "on", 2, True),
        ("cuda", "off", None, False),
    ],
)
def test_auto_compiles_only_on_cuda(
    device: str, option: Compile, minutes: float | None, expected: bool
) -> None:
    assert compiles(option, torch.device(device), minutes) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_graph_computes_the_same_without_drawing() -> None:
    """Only torch's tracing runs, without the C compiler. The loss is compiled for each length of
    the windows."""
    gpt, ids, targets = _small(dropout=0.1)
    gpt.train()
    forward = Forward(gpt, EXACT, dropout=0.1)
    notices: list[str] = []
    compiled = CompiledLoss(forward, notices.append, backend="aot_eager")
    for length, compilations in ((4, 1), (16, 2), (4, 2)):
        window, its_targets = ids[:, :length], targets[:, :length]
        torch.manual_seed(3)
        expected = torch.autograd.grad(forward.loss(window, its_targets), forward.parameters())
        torch.manual_seed(3)
        found = torch.autograd.grad(compiled(window, its_targets), forward.parameters())
        assert len(notices) == compilations
        assert all(notice.startswith("compiling") for notice in notices)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_failed_compiler_leaves_training_eager_with_one_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found")
        raise RuntimeError("no C compiler here\nand many lines more")

    gpt, ids, targets = _small()
    forward = Forward(gpt, EXACT, dropout=0.0)
    notices: list[str] = []
    compiled = CompiledLoss(forward, notices.append, backend=broken)
    for length in (4, 4, 16):
        window, its_targets = ids[:, :length], targets[:, :length]
        assert torch.equal(compiled(window, its_targets), forward.loss(window, its_targets))
    assert len(notices) == 2
    assert notices[0].startswith("compiling")
    assert notices[1].startswith("not compiled")
    assert "no C compiler here" in notices[1]
    assert "\n" not in notices[1]
    assert "No CUDA runtime" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("fails_here", [False, True])
def test_compiler_that_fails_in_one_process_leaves_all_eager(
    fails_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two processes could not compile, it once continued eagerly, and both waited for
    each other forever."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C compiler here")

    told: list[list[float]] = []

    def any_fails(ranks: Ranks, numbers: Sequence[float]) -> list[float]:
        told.append(list(numbers))
        return [1.0]

    monkeypatch.setattr(Ranks, "all_reduce_max", any_fails)
    gpt, ids, targets = _small()
    forward = Forward(gpt, EXACT, dropout=0.0)
    notices: list[str] = []
    compiled = CompiledLoss(
        forward, notices.append, backend=broken if fails_here else "eager", peers=Ranks(size=2)
    )
    assert torch.equal(compiled(ids, targets), forward.loss(ids, targets))
    assert told == [[fails_here]]
    reason = "no C compiler here" if fails_here else "another process cannot compile"
    assert notices[-1].startswith("not compiled")
    assert reason in notices[-1]


def test_resumed_run_keeps_the_decision_to_compile(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the resumed half decided again whether to compile, it would run eagerly and its bits would
    differ. A backend that doubles the loss replaces the compiler, to make the difference large."""

    def doubled(forward: Forward, notice: Any, peers: Any) -> Any:
        return lambda ids, targets: 2 * forward.loss(ids, targets)

    monkeypatch.setattr(trainer, "CompiledLoss", doubled)
    options: dict[str, Any] = {"dropout": 0.1, "steps": 8, "eval_every": 4, "checkpoint_every": 4}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with monkeypatch.context() as patch:
        patch.setattr("logitd.model.training.configuration.resolve.LONG_OPERATIONS", 1.0)
        train(configure(out=whole, **options))
        _train_until(4, configure(out=halves, **options))
    assert RunDirectory(halves).read_training().config.compile == "on"
    train(TrainingConfig(out=halves, resume=True))
    assert _state(halves) == _state(whole)
    assert _losses(halves) == _losses(whole)
