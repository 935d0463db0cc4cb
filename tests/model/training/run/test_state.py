"""The trainer's own state on disk."""

import os
from pathlib import Path

import pytest
import torch

from logitd.model.device import Placement
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.optim.average import Average
from logitd.model.training.optim.optimizers import Optimizers
from logitd.model.training.run.state import (
    differences,
    environment,
    load_state,
    read_state,
    save_state,
)
from logitd.model.training.stopping.length import Counters
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import gpt2_shape

HERE = environment(Placement(torch.device("cpu"), torch.float32, 2))


def _model() -> tuple[GPT, Optimizers, Average]:
    torch.manual_seed(0)
    gpt = GPT(gpt2_shape(vocab_size=20, context_length=8, n_layer=1, n_head=1, d_model=8))
    return gpt, Optimizers(gpt, PRESETS["tiny"].recipe), Average(gpt, 0.05)


def _save(path: Path, steps: int = 0) -> None:
    gpt, optimizers, average = _model()
    for _ in range(steps):
        gpt(torch.zeros(1, 8, dtype=torch.long)).logits.square().mean().backward()
        optimizers.step(0.1)
    save_state(
        path,
        gpt=gpt,
        optimizers=optimizers,
        average=average,
        counters=Counters(step=7, tokens=70, seconds=1.5),
        environment=HERE,
        reports={"steps": 2, "loss": torch.tensor(5.0)},
    )


def test_counters_environment_and_unreported_steps_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "state" / "state.pt"
    _save(path)
    gpt, optimizers, average = _model()
    counters, before, reports = load_state(path, gpt=gpt, optimizers=optimizers, average=average)
    assert counters == Counters(step=7, tokens=70, seconds=1.5)
    assert before == HERE
    assert reports == {"steps": 2, "loss": torch.tensor(5.0)}
    assert [file.name for file in path.parent.iterdir()] == ["state.pt"]


def test_failed_save_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"
    _save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_missing_damaged_and_foreign_states_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with pytest.raises(TrainingError, match="there is nothing to resume"):
        read_state(path)
    _save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"garbage"):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match="is not a complete training state"):
            read_state(path)
    path.write_bytes(whole)
    weight = next(iter(read_state(path).weights.values())).numpy().tobytes()
    path.write_bytes(whole.replace(weight, weight[:-1] + b"\x7f"))
    with pytest.raises(TrainingError, match=r"is damaged: the checksum of .* is wrong"):
        read_state(path)
    torch.save({"version": 99}, path)
    with pytest.raises(TrainingError, match="has version 99"):
        read_state(path)


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "state.pt")
    gpt = GPT(gpt2_shape(vocab_size=20, context_length=8, n_layer=2, n_head=1, d_model=8))
    optimizers = Optimizers(gpt, PRESETS["tiny"].recipe)
    with pytest.raises(TrainingError, match="does not fit the run's model"):
        load_state(
            tmp_path / "state.pt", gpt=gpt, optimizers=optimizers, average=Average(gpt, 0.05)
        )


def test_differences_of_environments_are_named() -> None:
    other = {"trainer": 1, "torch": "2.0", "device": "another", "dtype": "bfloat16", "threads": 4}
    assert differences(HERE, HERE) == ""
    assert differences(HERE, {**HERE, **other, "processes": 2}) == (
        f"trainer {HERE['trainer']}, was 1, torch {HERE['torch']}, was 2.0, device "
        f"{HERE['device']}, was another, dtype float32, was bfloat16, threads "
        "2, was 4, processes 1, was 2"
    )


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("counters", None, "counters is None"),
        ("counters", {"step": "x"}, "counters.step is 'x'"),
        ("counters", {"seconds": [1]}, r"counters.seconds is \[1\]"),
        ("average", [1], r"average is \[1\]"),
        ("average", {"pending": "x"}, "does not fit"),
        ("average", {"pending": 0.0, "averages": []}, "the average has 0 tensors"),
        ("optimizers", 7, "optimizers is 7"),
        ("optimizers", {"muon": {}}, "does not fit"),
        ("weights", {"a": 1}, "weights.a is 1"),
        ("weights", {"a": torch.ones(1)}, "does not fit"),
        ("environment", 7, "environment is 7"),
        ("version", torch.ones(2), "has version tensor"),
    ],
)
def test_damaged_section_is_refused(
    tmp_path: Path, section: str, value: object, reason: str
) -> None:
    path = tmp_path / "state.pt"
    _save(path)
    torch.save(torch.load(path) | {section: value}, path)
    gpt, optimizers, average = _model()
    with pytest.raises(TrainingError, match=f"state.pt.*{reason}"):
        load_state(path, gpt=gpt, optimizers=optimizers, average=average)


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("value", [7, torch.ones(1), torch.ones(2, 2), None])
def test_damaged_moments_are_refused(tmp_path: Path, name: str, value: object) -> None:
    """torch's fused kernels once wrote beyond a tensor that was too small."""
    path = tmp_path / "state.pt"
    _save(path, steps=1)
    document = torch.load(path)
    moments = document["optimizers"][name]["state"][0]
    moments["momentum_buffer" if name == "muon" else "exp_avg"] = value
    torch.save(document, path)
    gpt, optimizers, average = _model()
    with pytest.raises(TrainingError, match=f"does not fit the run's model: {name} has"):
        load_state(path, gpt=gpt, optimizers=optimizers, average=average)


def test_average_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save(path)
    document = torch.load(path)
    document["average"]["averages"][0] = torch.ones(1)
    torch.save(document, path)
    gpt, optimizers, average = _model()
    with pytest.raises(TrainingError, match=r"an average has shape \[1\], not"):
        load_state(path, gpt=gpt, optimizers=optimizers, average=average)


def test_learning_rates_and_decay_come_from_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save(path, steps=1)
    assert [*torch.load(path)["optimizers"]["muon"]] == ["state"]
    gpt, optimizers, average = _model()
    load_state(path, gpt=gpt, optimizers=optimizers, average=average)
    groups = _model()[1].all["muon"].state_dict()["param_groups"]
    assert optimizers.all["muon"].state_dict()["param_groups"] == groups
