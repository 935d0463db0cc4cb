"""Adapter folders, and merging an adapter into its base checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.adapter import WEIGHTS, merge, read_adapter, save_adapter
from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.files import FileError
from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import LoraShape, trained_weights
from logitd.service.cli.main import run
from tests.model.factories import (
    random_ids,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
    training_record,
)
from tests.model.full_disk import files_of_at_most
from tests.model.transformer.test_lora import adapted

SHAPE = LoraShape(rank=2, alpha=4.0, targets=TARGETS)
CPU = torch.device("cpu")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "base", chat_template="{{ messages }}").path


@pytest.fixture
def gpt() -> GPT:
    return adapted(tiny_gpt(), SHAPE, b=0.05)


@pytest.fixture
def adapter(tmp_path: Path, base: Path, gpt: GPT) -> Path:
    path = tmp_path / "adapter"
    info = read_checkpoint(base)
    record = {"name": info.name, "weights_sha256": info.weights_sha256, "step": 7}
    training = training_record(step=20, base=record)
    save_adapter(
        path,
        weights=trained_weights(gpt),
        shape=SHAPE,
        training=training,
        card="# mine\n\nAbout it.\n",
    )
    return path


def test_saved_adapter_is_read_again(adapter: Path, gpt: GPT) -> None:
    found = read_adapter(adapter)
    assert found.shape == SHAPE
    assert (found.training.step, found.base["name"]) == (20, "base")
    for name, tensor in trained_weights(gpt).items():
        assert torch.equal(found.weights[name], tensor)
    assert sorted(path.name for path in adapter.iterdir()) == ["README.md", WEIGHTS, "config.json"]
    assert not list(adapter.parent.glob(".*"))


@torch.no_grad()
def test_merged_checkpoint_computes_like_base_and_adapter(
    base: Path, adapter: Path, gpt: GPT, tmp_path: Path
) -> None:
    info = merge(base, adapter, tmp_path / "merged", save_dtype="float32")
    _, merged = load_checkpoint(tmp_path / "merged", device=CPU, dtype=torch.float32)
    ids = random_ids(2, 16)
    found = gpt(ids).logits
    assert (merged(ids).logits - found).abs().max() / found.abs().max() < 1e-5
    assert info.training.step == 20
    assert info.training.base == read_adapter(adapter).base
    assert info.chat_template is not None, "the base's"
    card = (info.path / "README.md").read_text()
    assert card.startswith("# merged\n\nAn adapter of rank 2 (alpha 4, on qkv, ")
    assert "About it." in card


def test_merged_checkpoint_may_have_a_name_that_is_not_utf8(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    merged = merge(base, adapter, path, save_dtype="float32")
    assert (merged.path / "README.md").read_text().startswith("# ?\n")


def test_chat_template_of_the_adapter_replaces_that_of_the_base(
    base: Path, gpt: GPT, tmp_path: Path
) -> None:
    info = read_checkpoint(base)
    record = {"name": info.name, "weights_sha256": info.weights_sha256}
    save_adapter(
        tmp_path / "adapter",
        weights=trained_weights(gpt),
        shape=SHAPE,
        training=training_record(base=record),
        card="",
        chat_template="{{ messages[0].content }}",
    )
    merged = merge(base, tmp_path / "adapter", tmp_path / "merged", save_dtype="float32")
    assert merged.chat_template is not None
    assert merged.chat_template.source == "{{ messages[0].content }}"


def test_full_disk_is_explained_and_leaves_nothing(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(10_000):
        assert run(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path / 'merged'}" in message
    assert "File too large" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_merge_refuses_another_base_with_both_hashes(adapter: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint(tmp_path / "other", gpt=tiny_gpt(seed=1))
    with pytest.raises(CheckpointError, match=other.weights_sha256[:12]) as caught:
        merge(other.path, adapter, tmp_path / "merged", save_dtype="float32")
    assert read_adapter(adapter).base["weights_sha256"][:12] in str(caught.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("field", "value"), [("rope_theta", 5e5), ("norm_eps", 1e-3)])
def test_merge_refuses_a_base_that_computes_something_else(
    base: Path, adapter: Path, tmp_path: Path, field: str, value: float
) -> None:
    """The weights are the same. An older adapter does not say what its base computed."""
    model = read_checkpoint(base).config.to_dict()
    edit(base / "config.json", "model", {**model, field: value})
    merge(base, adapter, tmp_path / "older", save_dtype="float32")
    record = read_adapter(adapter).base
    edit(adapter / "config.json", "base", {**record, "model": {**model, "dropout": 0.5}})
    with pytest.raises(CheckpointError, match=rf"{field} was {model[field]} and is now {value}"):
        merge(base, adapter, tmp_path / "merged", save_dtype="float32")
    edit(base / "config.json", "model", model)
    merge(base, adapter, tmp_path / "merged", save_dtype="float32")


def edit(path: Path, section: str, values: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, section: values}), encoding="utf-8")


def test_adapter_and_checkpoint_are_not_confused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter.*logitd merge"):
        read_checkpoint(adapter)
    for path, file in ((base, "adapter.safetensors"), (base / "config.json", "config.json")):
        with pytest.raises(CheckpointError, match=f"not an adapter.*{file}: No[a-z ]* ") as caught:
            read_adapter(path)
        assert "Errno" not in str(caught.value)
    with pytest.raises(CheckpointError, match="adapter"):
        merge(adapter, adapter, tmp_path / "merged", save_dtype="float32")


def test_adapter_overwrites_nothing(base: Path, adapter: Path, gpt: GPT) -> None:
    with pytest.raises(FileError, match="already exists"):
        merge(base, adapter, base, save_dtype="float32")
    with pytest.raises(FileError, match="x cannot be written"):
        merge(base / "missing", adapter, base / "config.json" / "x", save_dtype="float32")
    with pytest.raises(CheckpointError, match="already exists"):
        save_adapter(
            adapter,
            weights=trained_weights(gpt),
            shape=SHAPE,
            training=training_record(base={}),
            card="",
        )


def test_damaged_weights_are_refused(adapter: Path) -> None:
    raw = bytearray((adapter / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (adapter / WEIGHTS).write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version 2.*1"),
        ({"kind": "model"}, "adapter"),
        ({"rank": 0}, "rank.*0"),
        ({"targets": None}, "config.json: targets is None"),
        ({"targets": ["head"]}, "config.json: targets.0 is 'head'"),
        ({"training": {"step": 1}}, "config.json: tokens is missing"),
        ({"base": {"weights_sha256": "0"}}, "config.json: base.name is missing"),
        ({"base": {"name": 5, "weights_sha256": "0"}}, "config.json: base.name is 5"),
        ({"rank": "2"}, "config.json: rank is '2'"),
        ({"alpha": [1]}, r"config.json: alpha is \[1\]"),
        ({"files": ["adapter.safetensors"]}, "config.json: files is"),
        ({"chat_template": 5}, "config.json: chat_template is 5"),
    ],
)
def test_invalid_description_is_refused(
    adapter: Path, change: dict[str, Any], message: str
) -> None:
    document = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(document | change))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(adapter)


def test_merge_that_overflows_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    document = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(document | {"alpha": 1e300}))
    with pytest.raises(CheckpointError, match=r"not finite after the merge \(alpha is 1e\+300\)"):
        merge(base, adapter, tmp_path / "out", save_dtype="float32")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_a_pipe_are_refused(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"not an adapter \(/.*is a pipe"):
        read_adapter(adapter)


def test_base_of_another_shape_is_refused(adapter: Path, tmp_path: Path) -> None:
    """The hash in the adapter is edited to match the base, so only the shape differs."""
    other = save_tiny_checkpoint(tmp_path / "other", gpt=tiny_gpt(tiny_config(n_layer=2)))
    document = json.loads((adapter / "config.json").read_text())
    document["base"]["weights_sha256"] = other.weights_sha256
    (adapter / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="target"):
        merge(other.path, adapter, tmp_path / "merged", save_dtype="float32")
