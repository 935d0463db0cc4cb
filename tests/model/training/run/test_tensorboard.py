"""TensorBoard's files have the contents of metrics.jsonl and samples.txt."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.trainer import train
from tests.model.conftest import Configure
from tests.model.training.test_trainer import _train_until


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    yield
    sys.modules.pop("torch.utils.tensorboard", None)


@pytest.mark.usefixtures("missing")
def test_run_without_the_package_is_refused(configure: Configure) -> None:
    config = configure(tensorboard=True)
    with pytest.raises(TrainingError, match=r"-m pip install 'tensorboard>=2\.20'"):
        train(config)
    assert config.out is not None
    assert not config.out.exists()


def written(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_have_the_curves_and_samples_of_the_run(configure: Configure) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    config = configure(tensorboard=True, log_every=1, sample_every=6)
    _train_until(4, config)
    assert config.out is not None
    train(TrainingConfig(out=config.out, resume=True))
    found, metrics = written(config.out / "tensorboard"), RunDirectory(config.out).metrics()
    for tag, kind, name in (
        ("loss/train", "train", "loss"),
        ("learning_rate/share_of_peak", "train", "learning_rate"),
        ("gradient_norm", "train", "gradient_norm"),
        ("tokens_per_second", "train", "tokens_per_second"),
        ("loss/validation", "eval", "val_loss"),
        ("bits_per_byte/validation", "eval", "val_bits_per_byte"),
    ):
        expected = [(each["step"], each[name]) for each in metrics if each["kind"] == kind]
        scalars = [(each.step, each.value) for each in found.Scalars(tag)]
        assert [step for step, _ in scalars] == [step for step, _ in expected], tag
        values = [value for _, value in expected]
        assert [value for _, value in scalars] == pytest.approx(values, rel=1e-6), tag
    samples = [found.Tensors(f"sample/{number}/text_summary") for number in (1, 2, 3)]
    assert [each.step for each in samples[0]] == [0, 1, 2, 4, 6, 12]
    text = samples[2][-1].tensor_proto.string_val[0].decode()
    kept = (config.out / "samples.txt").read_text().rpartition("=== step 12\n")[2]
    assert "".join(line.removeprefix("    ") for line in text.splitlines(keepends=True)) in kept
