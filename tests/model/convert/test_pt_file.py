"""Files of torch.save, old and new, intact and damaged, are read or refused, and none of their code
runs."""

import argparse
import collections
import contextlib
import enum
import os
import pickle
import re
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.convert.pt_file import read_plain_pickle, read_pt

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


@dataclass
class Inner:
    heads: int = 4


@dataclass
class OwnConfig:
    n_embd: int = 32
    inner: Inner = field(default_factory=Inner)
    names: tuple[str, ...] = ("x",)


@dataclass(frozen=True, slots=True)
class SlottedConfig:
    n_embd: int = 48


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    n_embd: int = 48
    cap: float = 15.0


class TupleConfig(NamedTuple):
    n_embd: int = 48
    cap: float = 15.0


class Box(dict[str, Any]):
    """A dictionary subclass, as in configuration libraries."""


class OwnModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Exploding:
    """A hostile object: unpickling it calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def saved(path: Path, value: Any, *, old: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not old)
    return path


def assert_is_state(tensors: Any) -> None:
    assert tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("old", [False, True])
def test_dictionaries_of_tensors_and_plain_values_are_read(old: bool, tmp_path: Path) -> None:
    """Files that were saved before torch 1.6 are not zip archives."""
    value = {"model": STATE, "step": 3, "nested": {"list": [1, "x", None], "flag": True}}
    loaded = read_pt(saved(tmp_path / "m.pt", value, old=old))
    assert_is_state(loaded.pop("model"))
    assert loaded == {"step": 3, "nested": {"list": [1, "x", None], "flag": True}}


class Activation(enum.Enum):
    GELU = "gelu"


def test_numbers_of_libraries_and_members_of_enums_are_read(tmp_path: Path) -> None:
    """Guards against settings that vanish because NumPy or a class of the owner created them."""
    settings = {
        "cap": np.float32(2.5),
        "window": np.int64(8),
        "causal": np.bool_(True),
        "scale": torch.tensor(0.5),
        "windows": (np.int64(8), None),
        "activation": Activation.GELU,
    }
    checkpoint = {"model": {**STATE, "gain": torch.ones(())}, "args": settings}
    loaded = read_pt(saved(tmp_path / "m.pt", checkpoint | {"loss": torch.tensor(2.0)}))
    assert loaded["args"] == {
        "cap": 2.5,
        "window": 8,
        "causal": True,
        "scale": 0.5,
        "windows": [8, None],
        "activation": "gelu",
    }
    assert type(loaded["args"]["cap"]) is float
    assert loaded["loss"] == 2.0
    assert isinstance(loaded["model"]["gain"], torch.Tensor)


def test_new_pickle_protocol_is_not_reported_as_code(tmp_path: Path) -> None:
    torch.save({"model": STATE}, tmp_path / "m.pt", pickle_protocol=3)
    assert_is_state(read_pt(tmp_path / "m.pt")["model"])
    torch.save({"model": STATE}, tmp_path / "m.pt", pickle_protocol=4)
    with pytest.raises(ConvertError, match=r"damaged, or .*protocol.* torch\.save\(") as refusal:
        read_pt(tmp_path / "m.pt")
    assert "code" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (OwnConfig(), {"n_embd": 32, "inner": {"heads": 4}, "names": ["x"]}),
        (argparse.Namespace(n_head=2, lr=0.1), {"n_head": 2, "lr": 0.1}),
        (types.SimpleNamespace(n_head=2), {"n_head": 2}),
        (collections.OrderedDict(n_head=2), {"n_head": 2}),
    ],
    ids=["dataclass", "Namespace", "SimpleNamespace", "OrderedDict"],
)
def test_configurations_of_any_class_are_read_as_their_values(
    config: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    loaded = read_pt(saved(tmp_path / "m.pt", {"model": STATE, "config": config}))
    assert loaded["config"] == values
    assert_is_state(loaded["model"])


@pytest.mark.parametrize("config", [FrozenConfig(), TupleConfig(), (FrozenConfig(),)])
def test_values_without_names_are_described(config: Any, tmp_path: Path) -> None:
    """They were dropped, or became a list like any other."""
    loaded = read_pt(saved(tmp_path / "m.pt", {"model": STATE, "config": config}))["config"]
    assert Unread.is_in(loaded)
    assert re.search(r"(Frozen|Tuple)Config\(48, 15\.0\) \(its values have no names", str(loaded))


def test_arrays_and_deep_attributes_are_read(tmp_path: Path) -> None:
    deep = argparse.Namespace(window=np.array([[8, 4]]), cap=np.float32(2.5), big=np.zeros(2**17))
    for _ in range(7):
        deep = argparse.Namespace(inner=deep)
    loaded = read_pt(saved(tmp_path / "m.pt", {"model": STATE, "args": deep}))["args"]
    for _ in range(7):
        loaded = loaded["inner"]
    assert loaded == {"window": [[8, 4]], "cap": 2.5, "big": {}}


def test_objects_that_refer_to_their_parents_are_read(tmp_path: Path) -> None:
    """A hundred objects that refer to their parent were visited more than 10 ** 10 times."""
    config = argparse.Namespace()
    vars(config).update({f"n{n}": argparse.Namespace(parent=config, n=n) for n in range(100)})
    loaded = read_pt(saved(tmp_path / "m.pt", {"model": STATE, "hparams": config}))["hparams"]
    assert loaded == {f"n{n}": {"parent": None, "n": n} for n in range(100)}


@pytest.mark.parametrize(
    "value",
    [Path("x/y"), np.float64(1.5), np.arange(3), SlottedConfig(), {1, 2}, complex(1, 2),
     torch.optim.lr_scheduler.LambdaLR],
    ids=["Path", "NumPy number", "NumPy array", "slots", "set", "complex", "class"],
)  # fmt: skip
def test_other_saved_objects_do_not_hide_weights(value: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"model": STATE, "best": value, "step": 5})
    loaded = read_pt(path)
    assert_is_state(loaded["model"])
    assert loaded["step"] == 5


@pytest.mark.parametrize("value", [Box(n_head=2), collections.defaultdict(int, n_head=2)])
def test_dictionaries_of_other_classes_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    """torch's weights-only reader fills only dict, OrderedDict and Counter."""
    path = saved(tmp_path / "m.pt", {"model": STATE, "config": value})
    name = f"{type(value).__module__}.{type(value).__name__}"
    with pytest.raises(ConvertError, match=rf"m\.pt holds {name}.* torch\.save\(model"):
        read_pt(path)


def test_class_of_a_configuration_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of the configuration's class exists, and would write a file if it were
    imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType("gone_project")
    config = type("GPTConfig", (), {"__module__": "gone_project", "__qualname__": "GPTConfig"})
    module.GPTConfig = config  # type: ignore[attr-defined]
    made = config()
    made.n_head = 8
    monkeypatch.setitem(sys.modules, "gone_project", module)
    saved(tmp_path / "m.pt", {"model": STATE, "config": made})
    monkeypatch.delitem(sys.modules, "gone_project")
    (tmp_path / "gone_project.py").write_text(
        "open('imported', 'w').close()\nclass GPTConfig: pass"
    )
    loaded = read_pt(tmp_path / "m.pt")
    assert loaded["config"] == {"n_head": 8}
    assert "gone_project" not in sys.modules
    assert not Path("imported").exists()


def test_reading_leaves_no_class_allowed(tmp_path: Path) -> None:
    read_pt(saved(tmp_path / "m.pt", {"model": STATE, "config": OwnConfig()}))
    allowed = torch.serialization.get_safe_globals()
    assert not [entry for entry in allowed if "Attributes" in repr(entry)]
    with pytest.raises(pickle.UnpicklingError, match="OwnConfig"):
        torch.load(tmp_path / "m.pt", weights_only=True)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        (exec, ("open('exploded', 'w').close()",)),
        (eval, ("open('exploded', 'w').close()",)),
        (os.mkdir, ("exploded",)),
        (os.system, ("touch exploded",)),
        (open, ("exploded", "w")),
        (Path.touch, (Path("exploded"),)),
        (Exploding, (), None, iter([Path("exploded").touch])),
        (getattr, (Path("exploded"), "touch")),
        (torch.save, ({}, "exploded")),
        (torch.hub.download_url_to_file, ("file:///etc/hostname", "exploded")),
    ],
    ids=["exec", "eval", "mkdir", "system", "open", "touch", "append", "getattr", "save", "hub"],
)
def test_no_code_of_a_hostile_file_runs(
    call: tuple[Any, ...], old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "m.pt", {"model": STATE, "config": Exploding(*call)}, old=old)
    pickled = tmp_path / "plain.pt"
    pickled.write_bytes(pickle.dumps(Exploding(*call)))
    for path in (tmp_path / "m.pt", pickled):
        with contextlib.suppress(ConvertError):
            assert_is_state(read_pt(path)["model"])
    assert not Path("exploded").exists()


def test_hostile_call_runs_without_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `weights_only`, the call runs and creates the folder. So the test above would fail if
    the call ran."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "m.pt", {"config": Exploding(os.mkdir, ("exploded",))})
    torch.load(tmp_path / "m.pt", weights_only=False)
    assert Path("exploded").is_dir()


@pytest.mark.parametrize("old", [False, True])
def test_pickled_module_is_refused_with_the_line_that_saves_its_weights(
    old: bool, tmp_path: Path
) -> None:
    saved(tmp_path / "whole.pt", OwnModule(), old=old)
    with pytest.raises(ConvertError) as refusal:
        read_pt(tmp_path / "whole.pt")
    message = str(refusal.value)
    assert "is a whole pickled module (" in message
    assert f"{__name__}.OwnModule" in message
    line = message.partition("save only the weights: ")[2]
    assert line == (
        "torch.save(torch.load('whole.pt', weights_only=False).state_dict(), 'whole-weights.pt')"
    )


@pytest.mark.filterwarnings("ignore")  # the line does not close its file
def test_suggested_line_saves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = OwnModule()
    (tmp_path / "gpt.pkl").write_bytes(pickle.dumps(module))
    with pytest.raises(ConvertError, match="is a whole pickled module") as refusal:
        read_pt(tmp_path / "gpt.pkl")
    line = str(refusal.value).partition("save only the weights: ")[2]
    exec(line, {"torch": torch, "pickle": pickle})
    loaded = read_pt(tmp_path / "gpt-weights.pt")
    assert torch.equal(loaded["linear.weight"], module.linear.weight)


def test_module_next_to_the_weights_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "both.pt", {"state": STATE, "model": OwnModule()})
    with pytest.raises(ConvertError, match=r"OwnModule.*torch\.save\("):
        read_pt(path)


def test_file_without_a_dictionary_is_refused(tmp_path: Path) -> None:
    for value, kind in (([1, 2], "list"), (torch.ones(3), "Tensor"), (3, "int")):
        path = saved(tmp_path / "m.pt", value)
        with pytest.raises(ConvertError, match=f"m.pt holds a {kind}, not a dictionary of tensors"):
            read_pt(path)


def halved(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


DAMAGED: dict[str, tuple[bool, Callable[[bytes], bytes], str]] = {
    "half a zip": (False, halved, r"\(\d[\d,]* bytes\) is a truncated or damaged zip archive"),
    "a zip without its end": (
        False, lambda raw: raw[:-30], "is a truncated or damaged zip archive: copy it again"
    ),
    "a zip with other bytes": (
        False, lambda raw: raw[:40] + bytes(60) + raw[100:], "zip archive|damaged"
    ),
    "half an old file": (True, halved, "did not write or complete|truncated or damaged"),
    "an old file without its last bytes": (
        True, lambda raw: raw[:-4], "did not write or complete|truncated or damaged"
    ),
    "nothing": (False, lambda raw: b"", r"\(0 bytes\) is not a file of torch\.save"),
    "junk": (False, lambda raw: b"\x00\xffjunk" * 99, r"is not a file of torch\.save"),
    "a web page": (False, lambda raw: b"<!DOCTYPE html><html>" * 9, r"begins with b'<!DO'"),
    # llama.cpp's files were once reported as damaged files of torch.save.
    "a GGUF file": (
        False, lambda raw: b"GGUF\x03\0\0\0" + raw, r"can be exported but not imported: import"
    ),
    "a pointer": (
        False, lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
        r"is a pointer of Git LFS, not the file",
    ),
    "a text": (
        False, lambda raw: b"checkpoint of a small model\ntrained in May\nand never again\n",
        r"is not a file of torch\.save: it begins with b'chec', and is a text\. Expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "damage", "sentence"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_have_distinct_errors(
    old: bool, damage: Callable[[bytes], bytes], sentence: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "m.pt", {"model": STATE, "step": 3}, old=old)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConvertError, match=rf"m\.pt .*({sentence})"):
        read_pt(path)


def test_plain_pickle_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(pickle.dumps({"stoi": {"a": 0}}))
    with pytest.raises(ConvertError, match=r"is a pickle that torch\.save did not write.*"
                                           r"model.*, 'm-weights\.pt'\)"):  # fmt: skip
        read_pt(path)


def test_other_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("readme.txt", "no model")
    with pytest.raises(ConvertError, match=r"m\.pt"):
        read_pt(tmp_path / "m.pt")


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.pt", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(ConvertError, match=f"{path} {problem}"):
            read_pt(path)


# Meta files.


def test_only_plain_pickles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "meta.pkl"
    value: dict[str, Any] = {
        "stoi": {"a": 0},
        "list": [1, 2.5, None, True, b"x", ("t",)],
        "set": {3},
    }
    path.write_bytes(pickle.dumps(value))
    value["list"] = [1, 2.5, None, True, b"x", ["t"]]
    assert read_plain_pickle(path) == value
    for hostile in (Exploding(os.mkdir, ("exploded",)), Exploding(exec, ("open('exploded','w')",))):
        path.write_bytes(pickle.dumps({"stoi": {}, "x": hostile}))
        with pytest.raises(ConvertError, match=r"it refers to .*; creating that would run code"):
            read_plain_pickle(path)
    assert not Path("exploded").exists()


def test_archive_with_a_broken_list_is_not_passed_to_torch(tmp_path: Path) -> None:
    """The unpacked size of such an archive is unknown, and torch may read archives that Python
    cannot."""
    path = tmp_path / "ckpt.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))
    with pytest.raises(ConvertError, match="truncated or damaged zip archive") as caught:
        read_pt(path)
    assert isinstance(caught.value.__cause__, zipfile.BadZipFile)
