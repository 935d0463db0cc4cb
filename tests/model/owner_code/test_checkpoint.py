"""Checkpoints with an owner's code: no code runs before it is allowed and verified."""

import json
from pathlib import Path
from typing import Any

import pytest

from logitd import LLM, LoadError
from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.checkpoint.load import read_sources
from logitd.model.convert.exporting import export_model
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.stages import stages_of
from tests.model.owner_code.imported import written

ENDS = "import os; os._exit(7)"
"""Code that ends the process that runs it."""


def test_configuration_is_stored_and_read(tmp_path: Path) -> None:
    stages = [{"name": "h.0", "shape": [4], "kind": "Block"}]
    lens: dict[str, Any] = {
        "lens": ["norm", "head"],
        "streams": ["h.0:input", "h.0"],
        "stages": stages,
    }
    path = written(tmp_path, order=[2, 0, 1], call="model(ids)[0]", **lens)
    config = read_checkpoint(path).shape
    assert isinstance(config, CodeConfig)
    assert CodeConfig.from_dict(config.to_dict()) == config
    assert (config.n_layer, config.code) == (1, "owner.py:Model")


def test_submodule_with_the_name_of_another_array_is_no_stage(tmp_path: Path) -> None:
    names = ("h.0", "positions", "token_ids", "logits")
    stages = [{"name": name, "shape": [4], "kind": "Block"} for name in names]
    config = read_checkpoint(written(tmp_path, stages=stages)).shape
    assert [stage.name for stage in stages_of(config)] == ["h.0", "logits"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("file", "../owner.py", "file of a model computed by code is '../owner.py'"),
        ("file", "/owner.py", "file of a model computed by code"),
        ("rows", "29", "rows of a model computed by code is '29'"),
        ("unknown", 1, "unknown of a model computed by code is unknown"),
    ],
)
def test_wrong_configuration_is_refused(
    name: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    document = json.loads((path / "config.json").read_text())
    document["model"][name] = value
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=sentence):
        read_checkpoint(path)


def test_code_runs_only_if_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ENDS)
    monkeypatch.delenv("LOGITD_RUN_CODE", raising=False)
    for allowed in (None, False):
        with pytest.raises(LoadError, match=r"owner\.py:Model.* \(run_code=True in .*_RUN_CODE=1"):
            LLM(path, run_code=allowed)
    monkeypatch.setenv("LOGITD_RUN_CODE", "1")
    with pytest.raises(LoadError, match="add --run-code"):
        LLM(path, run_code=False)


@pytest.mark.parametrize("name", ["code/owner.py", "model.safetensors"])
def test_damage_is_found_before_code_runs(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, ENDS)
    raw = bytearray((path / name).read_bytes())
    raw[-1] ^= 1
    (path / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{name} .* was changed, truncated or damaged"):
        read_sources(read_checkpoint(path))
    with pytest.raises(LoadError, match="was changed"):
        LLM(path, run_code=True)


def test_source_outside_its_folder_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    document = json.loads((path / "config.json").read_text())
    document["files"]["code/../owner.py"] = "0" * 64
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(
        CheckpointError, match=r"names 'code/\.\./owner\.py', which is not a source file"
    ):
        read_sources(read_checkpoint(path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16, .* set dtype to auto"),
        ({"quantize": "int8"}, "quantize is int8, .* set quantize to none"),
        ({"kernels": "native"}, "kernels is native"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8"),
    ],
)
def test_options_of_other_models_are_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=sentence):
        LLM(written(tmp_path, ENDS), run_code=True, **options)


def test_commands_that_need_a_gpt_refuse(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="computed by its owner's code"):
        export_model(written(tmp_path), tmp_path / "out", to="hf")
