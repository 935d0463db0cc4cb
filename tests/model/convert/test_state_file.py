"""Weights files of a training run: the state dict in any wrapping, the settings, and the choice of
a file in a folder."""

import argparse
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from logitd.model.convert.collected_settings import collect_settings
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.state_file import find_state_file, read_state_file

STATE: dict[str, Tensor] = {
    "emb.weight": torch.arange(12.0).view(4, 3),
    "h.0.a.weight": torch.ones(3, 3),
    "h.0.b.weight": torch.full((3, 3), 2.0),
    "h.0.b.bias": torch.zeros(3),
    "head.weight": torch.full((4, 3), 3.0),
}
OTHER = {name: tensor + 100 for name, tensor in STATE.items()}


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def assert_is_state(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor] = STATE) -> None:
    assert list(tensors) == list(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def optimizer_state() -> dict[str, Any]:
    """State of a real optimizer after one step: settings, and tensors keyed by parameter number."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in STATE.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    "key",
    ["", "model", "model_state", "model_state_dict", "state_dict", "net", "weights", "params",
     "gpt", "generator.weights", "checkpoint.model", "a.b.c"],
)  # fmt: skip
def test_state_dict_is_found_however_it_is_wrapped(key: str, tmp_path: Path) -> None:
    value: Any = STATE
    for part in reversed(key.split(".") if key else []):
        value = {part: value, "step": 7, "optimizer": optimizer_state()}
    file = read_state_file(saved(tmp_path / "m.pt", value))
    assert_is_state(file.tensors)
    assert file.state == (key or None)
    assert file.where == (f"{tmp_path / 'm.pt'} ({key})" if key else str(tmp_path / "m.pt"))
    assert file.settings.get("step") == (7 if key else None)


@pytest.mark.parametrize("beside", ["ema", "model_ema", "ema_model", "best", "average"])
def test_model_is_preferred_to_its_average(beside: str, tmp_path: Path) -> None:
    for value in ({beside: OTHER, "model": STATE}, {"model": STATE, beside: OTHER},
                  {beside: {"shadow": OTHER}, "state_dict": STATE}):  # fmt: skip
        assert_is_state(read_state_file(saved(tmp_path / "m.pt", value)).tensors)


def test_names_of_a_tensor_that_save_model_drops_are_restored(tmp_path: Path) -> None:
    """Only the head was left of a tied embedding, so the model had no token embedding."""
    model = nn.ModuleDict({"wte": nn.Embedding(5, 3), "lm_head": nn.Linear(3, 5, bias=False)})
    model.update({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["lm_head"].weight = model["wte"].weight
    save_model(model, str(tmp_path / "m.safetensors"), metadata={"format": "pt"})
    file = read_state_file(tmp_path / "m.safetensors")
    tensors = file.tensors
    assert file.settings == {"format": "pt"}
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[name], t) for name, t in model.state_dict().items())


def test_equally_likely_state_dicts_raise_a_question(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"student": STATE, "teacher": OTHER, "step": 1})
    with pytest.raises(ConvertError, match=r"holds 2 state dicts: student, teacher; name one in a "
                                           r"--map file"):  # fmt: skip
        read_state_file(path)
    assert_is_state(read_state_file(path, state="teacher").tensors, OTHER)
    assert read_state_file(path, state="teacher").state == "teacher"
    with pytest.raises(
        ConvertError, match="no state dict under 'pupil'; its state dicts are 'student', 'tea"
    ):
        read_state_file(path, state="pupil")


def test_key_is_named_with_dots(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"run": {"student": STATE, "teacher": OTHER}})
    assert_is_state(read_state_file(path, state="run.teacher").tensors, OTHER)


def test_file_without_a_state_dict_is_described(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"step": 3, "losses": [1.0], "x": torch.ones(2)})
    held = r"it contains step \(int\), losses \(list\), x \(Tensor\)"
    with pytest.raises(ConvertError, match=rf"no state dict .* {held}"):
        read_state_file(path)
    with pytest.raises(ConvertError, match=r"no state dict .*optimizer"):
        read_state_file(saved(tmp_path / "m.pt", {"optimizer": optimizer_state()}))


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.",
               "_forward_module._orig_mod."],
)  # fmt: skip
def test_prefixes_of_wrappers_are_removed(prefix: str, tmp_path: Path) -> None:
    wrapped = {prefix + name: tensor for name, tensor in STATE.items()}
    assert_is_state(read_state_file(saved(tmp_path / "m.pt", wrapped)).tensors)
    save_file(wrapped, tmp_path / "m.safetensors")
    assert set(read_state_file(tmp_path / "m.safetensors").tensors) == set(STATE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of torch's own compiler
def test_torchs_wrappers_use_these_names(tmp_path: Path) -> None:
    """The module is really compiled, and wrapped in a real DataParallel."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    state = nn.DataParallel(torch.compile(model)).state_dict()  # type: ignore[type-var]
    assert next(iter(state)).startswith("module._orig_mod.")
    file = read_state_file(saved(tmp_path / "m.pt", state))
    assert set(file.tensors) == set(model.state_dict())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", {"model": STATE, "lm_head": {"weight": torch.ones(4, 3)}}),
        ("model", {"model": STATE, "lm_head.weight": torch.ones(4, 3)}),
        ("run.model", {"run": {"model": STATE, "norm": {"weight": torch.ones(3)}}}),
        ("", STATE | {"lm_head": {"weight": torch.ones(4, 3)}}),
    ],
)
def test_weights_outside_the_state_dict_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    """They were dropped; without its head, a model became one with a tied head."""
    path = saved(tmp_path / "m.pt", value)
    with pytest.raises(ConvertError, match=r"m\.pt has weights outside .*(lm_head|norm)\.weight"):
        read_state_file(path)
    assert_is_state(read_state_file(path, state=key).tensors)


@pytest.mark.parametrize(
    "value",
    [
        STATE | {"config": {"softcap": 3.0}},
        {"model": STATE | {"softcap": 3.0}},
        {"model": STATE, "config": {"softcap": 3.0, "class_counts": torch.ones(4)}},
    ],
)
def test_settings_next_to_tensors_are_read(value: Any, tmp_path: Path) -> None:
    """A dictionary with a tensor counted as weights alone."""
    file = read_state_file(saved(tmp_path / "m.pt", value))
    assert_is_state(file.tensors)
    assert file.unknown == {"softcap": 3.0}


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_parts_of_wrapped_blocks_are_removed(wrapper: str, tmp_path: Path) -> None:
    wrapped = {name.replace("h.0.", f"h.0.{wrapper}."): tensor for name, tensor in STATE.items()}
    assert_is_state(read_state_file(saved(tmp_path / "m.pt", wrapped)).tensors)


def test_name_with_and_without_a_prefix_is_refused(tmp_path: Path) -> None:
    both = STATE | {"module.emb.weight": torch.ones(4, 3)}
    with pytest.raises(ConvertError, match=r"holds emb\.weight twice, with and without a prefix"):
        read_state_file(saved(tmp_path / "m.pt", both))


# Settings


def test_numbers_are_collected_from_all_sections(tmp_path: Path) -> None:
    value = {
        "model": STATE,
        "config": {"n_embd": 3, "train": {"lr": 0.1, "deep": {"flag": True}}, "act": "relu"},
        "iter_num": 9,
        "losses": [1.0, 2.0],
        "optimizer": optimizer_state(),
        "stoi": {"a": 0},
    }
    file = read_state_file(saved(tmp_path / "m.pt", value))
    wanted = {"n_embd": 3, "lr": 0.1, "flag": True, "act": "relu", "iter_num": 9}
    assert wanted.items() <= file.settings.items()
    assert not {"betas", "eps", "weight_decay", "losses"} & set(file.settings)
    assert set(file.contents) == {"config", "iter_num", "losses", "stoi"}


def test_values_of_all_types_are_collected(tmp_path: Path) -> None:
    """The configuration next to the weights, tensors and dictionaries are included; state dicts,
    the optimizer's section and dictionaries that are a configuration are not."""
    config = {"scales": torch.ones(2), "extra": {"window": 4}, "sizes": (4, 16), "cap": None}
    value = {"model": STATE, "optimizer": optimizer_state(), "hparams": config, "extra": 1}
    (tmp_path / "config.json").write_text('{"beside": [1], "sizes": [9], "n_head": 4}')
    values = dict(read_state_file(saved(tmp_path / "m.pt", value)).values)
    assert torch.equal(values.pop("scales"), torch.ones(2))
    assert values == {"extra": 1, "window": 4, "sizes": [4, 16], "cap": None, "beside": [1],
                      "n_head": 4}  # fmt: skip
    file = read_state_file(saved(tmp_path / "m.pt", {"a": {"kind": {"b": 1}}, "model": STATE} | {
        "model_args": {"kind": {"b": 2}}}))  # fmt: skip
    assert file.values["kind"] == {"b": 2}


def test_models_section_has_precedence() -> None:
    for contents in (
        {"train": {"dim": 1}, "model_args": {"dim": 2}},
        {"model_args": {"dim": 2}, "train": {"dim": 1}},
        {"dim": 1, "config": {"model": {"dim": 2}}},
    ):
        assert collect_settings(contents)["dim"] == 2


def test_vocabulary_is_not_read_as_settings(tmp_path: Path) -> None:
    """A vocabulary may contain words that are also names of settings."""
    stoi = {"n_head": 3, "dropout": 7} | {f"word {n}": n for n in range(300)}
    value = {"model": STATE, "stoi": stoi, "config": {"n_head": 4}}
    assert read_state_file(saved(tmp_path / "m.pt", value)).settings == {"n_head": 4}
    value = {"stoi": stoi, "model": STATE, "config": {"n_head": 4}}
    assert read_state_file(saved(tmp_path / "m.pt", value)).settings == {"n_head": 4}
    value = {"itos": {9: "3", 10: "a"}, "model": STATE, "config": {"n_head": 4}}
    assert read_state_file(saved(tmp_path / "m.pt", value)).settings == {"n_head": 4}


CONFIG = {"rope_theta": 5e5, "softcap": 15.0, "n_head": 4}


def deep_namespace(depth: int) -> argparse.Namespace:
    inner = argparse.Namespace(**CONFIG)
    return argparse.Namespace(part=deep_namespace(depth - 1)) if depth else inner


@pytest.mark.parametrize(
    "value",
    [
        *({"config": json.dumps(CONFIG)}, {"model_args": json.dumps(CONFIG).encode()}),
        *({"cfg": [CONFIG]}, {"hparams": (CONFIG,)}, {"config": (("a", CONFIG),)}),
        *({"config": [*CONFIG.items()]}, {"args": deep_namespace(6)}),
        *({key: argparse.Namespace(**CONFIG)} for key in ("opt", "model_opt", "train_opt")),
        {"model_args": {"n_head": 4}, "train_args": {"lr": 1e-3, "softcap": 15.0,
         "rope_theta": 5e5}},
        {"model_args": {"n_head": 4, "rope_theta": 5e5}, "training": {"softcap": 15.0}},
    ],
)  # fmt: skip
def test_settings_in_any_form_are_read(value: Any, tmp_path: Path) -> None:
    """The logit cap was dropped, and so were all settings of some forms."""
    file = read_state_file(saved(tmp_path / "m.pt", {"model": STATE, **value}))
    assert CONFIG.items() <= file.settings.items()
    assert CONFIG.items() <= file.values.items()
    assert file.unknown == {"softcap": 15.0}


@pytest.mark.parametrize(
    "metadata",
    [
        {"config": json.dumps(CONFIG)},
        {name: str(value) for name, value in CONFIG.items()} | {"tie": "True"},
    ],
)
def test_metadata_of_safetensors_are_read(metadata: dict[str, str], tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "m.safetensors", {"format": "pt", **metadata})
    file = read_state_file(tmp_path / "m.safetensors")
    assert CONFIG.items() <= file.settings.items()
    assert file.unknown == {"softcap": 15.0}
    assert file.settings.get("tie", True) is True


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    n_head: int = 4
    softcap: float = 15.0


@pytest.mark.parametrize(
    ("value", "description"),
    [
        ({"config": FrozenConfig()}, r"FrozenConfig\(4, 15\.0\)"),
        ({"config": [FrozenConfig()]}, r"FrozenConfig\(4, 15\.0\)"),
        ({"run": {"config": {"config": FrozenConfig()}}}, r"FrozenConfig\(4, 15\.0\)"),
        ({"config": str(argparse.Namespace(**CONFIG))}, "not JSON .*Namespace"),
        ({"config": [4, 15.0]}, r"\[4, 15\.0\]"),
        ({"config": deep_namespace(12)}, "levels of sections"),
    ],
)
def test_settings_that_cannot_be_read_are_unknown(
    value: Any, description: str, tmp_path: Path
) -> None:
    """They were dropped without a word."""
    file = read_state_file(saved(tmp_path / "m.pt", {"model": STATE, **value}))
    (unread,) = file.unknown.values()
    assert re.search(description, repr(unread))


def lightning_loops() -> dict[str, Any]:
    progress = {part: {"ready": 1200, "completed": 1200} for part in ("total", "current")}
    epoch_loop = {"epoch_loop.state_dict": {"_batches_that_stepped": 1200}, "progress": progress}
    return {"fit_loop": epoch_loop, "validate_loop": {"progress": progress}}


@pytest.mark.parametrize(
    "value",
    [
        *({"opt": optimizer_state()}, {"opt_state": [optimizer_state()]}),
        {"any": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(
            [nn.Parameter(torch.ones(1))], 0.1), 7).state_dict()},
        {"MixedPrecision": torch.amp.GradScaler("cpu").state_dict() | {"growth_interval": 9}},
        {"loops": lightning_loops()},
        {"log": [{"step": 1, "train": 5.1, "gain": 2.0}, {"step": 2, "train": 4.1}]},
        {"curve": [{"epoch": 1, "gain": 2.0}]},
        {"rng": {"python": random.getstate(), "numpy": np.random.get_state()}},
        {"numpy_random": np.random.get_state(), "n_layer": 1, "started": datetime.now()},
        {"tokenizer": json.dumps({"added_tokens": [{"id": 3, "lstrip": False}],
                                  "model": {"vocab": {"a": 0}, "fuse_unk": False}})},
        {"itos": ["a", "{", "[1]"], "config": "configs/small.yaml", "args": Path("a/b")},
        {"training_state": {"cursor": 3}, "code": "n_head = 4", "note": '{"a": 1'},
    ],
)  # fmt: skip
def test_states_of_a_training_are_not_asked_about(value: Any, tmp_path: Path) -> None:
    assert read_state_file(saved(tmp_path / "m.pt", {"model": STATE, **value})).unknown == {}


def test_all_settings_files_next_to_the_weights_are_read(tmp_path: Path) -> None:
    """Only the first was read."""
    save_file(STATE, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    (tmp_path / "args.json").write_text('{"softcap": 15.0, "n_head": 4}')
    (tmp_path / "m.json").write_text('{"dim": 8}')
    file = read_state_file(tmp_path / "m.safetensors")
    assert file.settings == {"n_head": 4, "dim": 8, "softcap": 15.0}
    assert file.unknown == {"softcap": 15.0}


@pytest.mark.parametrize("name", ["config.json", "model_config.json", "args.json", "params.json"])
def test_settings_next_to_the_file_are_read(name: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(json.dumps({"n_head": 4, "model": {"dim": 8}}))
    assert read_state_file(tmp_path / "model.safetensors").settings == {"n_head": 4, "dim": 8}


def test_settings_in_the_file_override_neighboring_ones(tmp_path: Path) -> None:
    saved(tmp_path / "m.pt", {"model": STATE, "config": {"n_head": 4, "lr": 1.0}})
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4, "lr": 2.0, "n_layer": 1}))
    assert read_state_file(tmp_path / "m.pt").settings == {"n_head": 4, "lr": 1.0, "n_layer": 1}


def test_neighboring_settings_that_contradict_the_file_are_not_read(tmp_path: Path) -> None:
    """The file's value was taken without a word."""
    saved(tmp_path / "m.pt", {"model": STATE, "config": {"rope_theta": 1e4, "softcap": 0.0}})
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 5e5}))
    file = read_state_file(tmp_path / "m.pt")
    assert repr(file.settings["rope_theta"]) == "10000.0 in the file, 500000.0 next to it"
    assert file.values["rope_theta"] == file.settings["rope_theta"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": '])
def test_broken_file_next_to_the_weights_is_named(text: str, tmp_path: Path) -> None:
    saved(tmp_path / "m.pt", STATE)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConvertError, match=r"config\.json is not JSON: .* \(next to the weights\)"):
        read_state_file(tmp_path / "m.pt")


def test_list_next_to_the_weights_is_unknown(tmp_path: Path) -> None:
    saved(tmp_path / "m.pt", STATE)
    (tmp_path / "config.json").write_text("[1, 2]")
    assert read_state_file(tmp_path / "m.pt").unknown == {"config.json": [1, 2]}


SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=2)
SECTIONS = st.recursive(
    st.dictionaries(st.text(min_size=1, max_size=3), SCALARS, max_size=4),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=3), SCALARS | inner, max_size=3),
    max_leaves=6,
)


@given(SECTIONS)
def test_settings_are_the_values_of_all_sections(contents: dict[str, Any]) -> None:
    """Sections that disagree leave a list: two thetas by type of layer were imported as the first
    one."""
    stated: dict[str, list[Any]] = {}

    def walk(values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                walk(value)
            elif value not in (found := stated.setdefault(key, [])):
                found.append(value)

    walk(contents)
    for key, value in collect_settings(contents).items():
        assert value == (stated[key] if len(stated[key]) > 1 else stated[key][0])


def test_tensors_outside_the_state_dict_are_named(tmp_path: Path) -> None:
    outside = {
        "prompt": torch.ones(3, 5),
        "averages": STATE,
        "rng": torch.ones(9).byte(),
    }
    file = read_state_file(saved(tmp_path / "m.pt", {"model": STATE, **outside}))
    (left_out,) = file.left_out
    assert left_out.endswith(f"averages ({len(STATE)} tensors), prompt [3, 5]")
    adapter = {f"{name}.lora_A": torch.ones(2, 7) for name in STATE}
    with pytest.raises(ConvertError, match="contains an adapter"):
        read_state_file(saved(tmp_path / "m.pt", {"model": STATE, "lora": adapter}))


# Files and folders


@pytest.mark.parametrize("damage", [lambda raw: raw[:-8], lambda raw: b"", lambda raw: b"x" * 99])
def test_damaged_safetensors_are_named(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(STATE, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConvertError, match=r"m\.safetensors is not a complete safetensors file"):
        read_state_file(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for name in ("m.safetensors", "m.pt"):
        with pytest.raises(ConvertError, match=f"{name} does not exist"):
            read_state_file(tmp_path / name)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".safetensors"])
@pytest.mark.parametrize("below", ["", "out", "a/b"])
def test_only_file_of_weights_in_a_folder_is_found(suffix: str, below: str, tmp_path: Path) -> None:
    path = tmp_path / below / f"model{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder.pt").mkdir()
    assert find_state_file(tmp_path) == path


def test_nearest_file_has_precedence(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.pt").touch()
    (tmp_path / "model.pt").touch()
    assert find_state_file(tmp_path) == tmp_path / "model.pt"


def test_several_files_raise_a_question(tmp_path: Path) -> None:
    (tmp_path / "b.pt").touch()
    (tmp_path / "a.ckpt").touch()
    with pytest.raises(ConvertError, match=r"has 2 weight files: a\.ckpt, b\.pt; import one"):
        find_state_file(tmp_path)


def test_folder_without_weights_is_described(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"no weight file \(\.pt, .*\); it holds nothing"):
        find_state_file(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(ConvertError, match=r"it holds train\.py"):
        find_state_file(tmp_path)


def save_shards(folder: Path, **metadata: str) -> Path:
    """Save STATE in two shards; returns the index."""
    folder.mkdir()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    homes = {name: files[name > "h.0.a.weight"] for name in STATE}
    for file in files:
        part = {name: tensor for name, tensor in STATE.items() if homes[name] == file}
        save_file(part, folder / file, metadata or None)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}))
    return index


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    index = save_shards(tmp_path / "model", rope_theta="5e5")
    assert find_state_file(index.parent) == find_state_file(tmp_path) == index
    file = read_state_file(index)
    assert_is_state(dict(sorted(file.tensors.items())), dict(sorted(STATE.items())))
    assert file.settings == {"rope_theta": 5e5}


def test_shard_alone_is_refused(tmp_path: Path) -> None:
    index = save_shards(tmp_path / "model")
    shard = index.with_name("model-00001-of-00002.safetensors")
    with pytest.raises(ConvertError, match=r"00002\.safetensors has only a part.*Import the index"):
        read_state_file(shard)
    index.unlink()
    for found in (lambda: find_state_file(index.parent), lambda: read_state_file(shard)):
        with pytest.raises(ConvertError, match=r"has only a part .* no index"):
            found()


@pytest.mark.parametrize("name", ["consolidated.0{}.pth", "mp_rank_0{}_model_states.pt"])
def test_numbered_shards_are_refused_but_not_a_single_file(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / name.format(0), STATE)
    assert_is_state(read_state_file(path).tensors)
    saved(tmp_path / name.format(1), STATE)
    for found in (lambda: find_state_file(tmp_path), lambda: read_state_file(path)):
        with pytest.raises(ConvertError, match=r"has only a part .* no index"):
            found()


@pytest.mark.parametrize(
    ("contents", "step"),
    [
        ({"model": STATE, "epoch": 2, "args": {"steps": 10_000, "iters": 500}}, 0),
        ({"model": STATE, "iteration": 700, "args": {"step": 5, "steps": 10_000}}, 700),
        ({"step": 9, "state": {"model": STATE, "global_step": 8}}, 8),
        ({"iter_num": 7, "state": {"model": STATE}}, 7),
        (STATE, 0),
    ],
)
def test_step_is_that_of_the_weights_not_a_plan(
    contents: dict[str, Any], step: int, tmp_path: Path
) -> None:
    assert read_state_file(saved(tmp_path / "m.pt", contents)).step == step
