"""The names of classes and functions in a pickle are found without unpickling, for every protocol
and kind of file."""

import argparse
import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from logitd.model.convert.pickled_names import PickledNames, pickled_names


class Own:
    """A class that a pickle can name."""


class OtherOwn:
    """Another class that a pickle can name."""


HERE = __name__
STATE = {"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
PROTOCOLS = pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))


def names_of(raw: bytes, folder: Path) -> PickledNames:
    (folder / "x.pkl").write_bytes(raw)
    return pickled_names(folder / "x.pkl")


@PROTOCOLS
def test_classes_and_functions_are_named_in_the_order_of_the_file(
    protocol: int, tmp_path: Path
) -> None:
    raw = pickle.dumps([Own(), os.path.join, OtherOwn, Own()], protocol=protocol)
    names = names_of(raw, tmp_path)
    foreign = [name for name in names.foreign if not name.startswith(("copyreg", "copy_reg"))]
    foreign = [name for name in foreign if not name.startswith(("builtins", "__builtin__"))]
    assert foreign == [f"{HERE}.Own", "posixpath.join", f"{HERE}.OtherOwn"]
    assert names.complete
    assert not names.by_torch
    assert not names.holds_module


@PROTOCOLS
def test_plain_containers_name_nothing(protocol: int, tmp_path: Path) -> None:
    value = {"a": [1, 2.5, "text", None, True, b"bytes"], "b": ({}, ())}
    assert names_of(pickle.dumps(value, protocol=protocol), tmp_path).complete
    if protocol >= 3:  # earlier protocols make bytes by a function
        assert names_of(pickle.dumps(value, protocol=protocol), tmp_path).foreign == ()


@PROTOCOLS
def test_words_that_look_like_names_are_text(protocol: int, tmp_path: Path) -> None:
    """The pickle's memo holds many strings. The class at the end refers to one of them as its
    module name."""
    texts = [f"word {n}" for n in range(400)]
    value = [texts, HERE, "Own", texts, "os", "system", Own]
    names = names_of(pickle.dumps(value, protocol=protocol), tmp_path)
    assert names.foreign == (f"{HERE}.Own",)


@pytest.mark.parametrize("old", [False, True])
def test_tensors_are_harmless_and_the_file_is_torchs(old: bool, tmp_path: Path) -> None:
    value = {"model": collections.OrderedDict(STATE), "parameter": nn.Parameter(torch.ones(2)),
             "size": torch.Size([1]), "dtype": torch.float16,
             "device": torch.device("cpu")}  # fmt: skip
    torch.save(value, tmp_path / "m.pt", _use_new_zipfile_serialization=not old)
    assert pickled_names(tmp_path / "m.pt") == PickledNames((), False, True, True)


@pytest.mark.parametrize("old", [False, True])
def test_other_values_in_a_state_dict_are_named(old: bool, tmp_path: Path) -> None:
    value = {"model": STATE, "config": Own(), "args": argparse.Namespace(a=1)}
    torch.save(value, tmp_path / "m.pt", _use_new_zipfile_serialization=not old)
    names = pickled_names(tmp_path / "m.pt")
    assert set(names.foreign) - {"copy_reg._reconstructor", "__builtin__.object"} == {
        f"{HERE}.Own", "argparse.Namespace",
    }  # fmt: skip
    assert not names.holds_module


@pytest.mark.parametrize("how", ["torch", "torch, old", "pickle"])
def test_module_is_recognized_by_members_of_every_module(how: str, tmp_path: Path) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    path = tmp_path / "m.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(module))
    else:
        torch.save(module, path, _use_new_zipfile_serialization=how == "torch")
    names = pickled_names(path)
    assert names.holds_module
    assert names.by_torch is (how != "pickle")
    assert "torch.nn.modules.linear.Linear" in names.foreign


@pytest.mark.parametrize(
    "raw",
    [b"", b"junk", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"PK\x03\x04" + bytes(50),
     b"\x80\x02]q\x00(", b"\x80\xff."],
)  # fmt: skip
def test_other_files_have_no_names(raw: bytes, tmp_path: Path) -> None:
    names = names_of(raw, tmp_path)
    assert names.foreign == ()
    assert not names.holds_module


def test_names_before_a_damage_are_known(tmp_path: Path) -> None:
    raw = pickle.dumps([Own(), "x" * 5000], protocol=2)
    names = names_of(raw[:-2000], tmp_path)
    assert f"{HERE}.Own" in names.foreign
    assert not names.complete


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x80\x02", b"\x80\x04", b"c"]))
def test_no_bytes_break_the_walk(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes, begins: bytes
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    assert isinstance(names_of(begins + rest, folder), PickledNames)
