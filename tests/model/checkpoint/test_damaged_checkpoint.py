"""Damaged and inconsistent checkpoints are refused with a message that names the file and the
numbers.

`test_any_damage.py` draws random damage.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    read_checkpoint,
)
from logitd.model.checkpoint.load import check_header
from logitd.model.device import DeviceError
from tests.model.checkpoint.files import edit_config, edit_weights, load, refuse, rehash
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt

Damage = Callable[[Path], object]


def section(name: str, **change: Any) -> Damage:
    """Change fields of a section of config.json."""
    return lambda path: edit_config(path, lambda document: document[name].update(change))


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda path: edit_weights(path, change)


def filled(number: float) -> Damage:
    return tensors(lambda weights: weights["blocks.2.mlp_up.weight"].fill_(number))


def version(value: object) -> Damage:
    return lambda path: edit_config(path, lambda document: document.update(format_version=value))


def without(name: str) -> Damage:
    """Leave a section of config.json out."""
    return lambda path: edit_config(path, lambda document: document.pop(name))


def removed(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def flipped(name: str) -> Damage:
    """Flip a bit, which safetensors does not notice."""

    def flip(path: Path) -> None:
        raw = bytearray((path / name).read_bytes())
        raw[-2] ^= 1
        (path / name).write_bytes(raw)

    return flip


def cut(size: int, *, hashed: bool) -> Damage:
    """Truncate the weights, before or after hashing."""

    def truncate(path: Path) -> None:
        os.truncate(path / WEIGHTS, size)
        if hashed:
            rehash(path)

    return truncate


def appended(name: str, raw: bytes) -> Damage:
    def append(path: Path) -> None:
        with (path / name).open("ab") as file:
            file.write(raw)
        rehash(path)

    return append


def replaced(name: str, by: Callable[[Path], object]) -> Damage:
    def replace(path: Path) -> None:
        (path / name).unlink()
        by(path / name)

    return replace


def config_text(raw: bytes) -> Damage:
    return lambda path: (path / CONFIG).write_bytes(raw)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (removed(CONFIG), "no config.json.*model.safetensors.*tokenizer.tiktoken"),
    "no weights": (removed(WEIGHTS), f"no {WEIGHTS}"),
    "no ranks": (removed(RANKS), f"no {RANKS}"),
    "weights are a pipe": (replaced(WEIGHTS, os.mkfifo), f"{WEIGHTS}.*pipe"),
    "config is a pipe": (replaced(CONFIG, os.mkfifo), f"{CONFIG}.*pipe"),
    "ranks are a device": (
        replaced(RANKS, lambda path: path.symlink_to("/dev/zero")),
        f"{RANKS}.*device",
    ),
    "flipped bit of weights": (flipped(WEIGHTS), f"{WEIGHTS}.*bytes.*sha256.*damaged"),
    "flipped bit of ranks": (flipped(RANKS), f"{RANKS}.*bytes.*sha256.*damaged"),
    "cut": (cut(1000, hashed=False), f"{WEIGHTS}.*1000 bytes.*sha256"),
    "cut to nothing": (cut(0, hashed=True), f"{WEIGHTS}.*0 bytes"),
    "cut in its length": (cut(4, hashed=True), f"{WEIGHTS}.*4 bytes"),
    "cut in its header": (cut(1000, hashed=True), f"{WEIGHTS}.*safetensors"),
    "more bytes": (appended(WEIGHTS, b"\0"), f"{WEIGHTS}.*tensors"),
    "a shape": (
        tensors(lambda weights: weights.update({"final_norm.weight": torch.ones(31)})),
        r"final_norm.weight.*\(31,\).*\(32,\)",
    ),
    "one tensor more": (
        tensors(lambda weights: weights.update(another=torch.ones(1))),
        "1 tensor .*another",
    ),
    "one tensor less": (
        tensors(lambda weights: weights.pop("blocks.1.qkv.bias")),
        "1 tensor;.*blocks.1.qkv.bias",
    ),
    **{
        f"{number} in a tensor": (filled(float(number)), "blocks.2.mlp_up.weight.*NaN")
        for number in ("nan", "inf", "-inf")
    },
    "integers": (
        tensors(lambda weights: weights.update({"final_norm.weight": torch.ones(32).long()})),
        "final_norm.weight.*torch.int64",
    ),
    **{
        f"version {value!r}": (version(value), f"format_version {value!r}.*1")
        for value in (0, 2, "1", None)
    },
    "empty config": (config_text(b""), f"{CONFIG}.*JSON"),
    "half a config": (config_text(b'{"format_version": 1'), f"{CONFIG}.*JSON"),
    "config in UTF-16": (config_text(b"\xff\xfe"), f"{CONFIG}.*JSON"),
    "config is a list": (config_text(b"[1]"), f"{CONFIG}.*object"),
    **{
        f"no {name}": (without(name), f"{CONFIG}.*'{name}'")
        for name in ("model", "tokenizer", "training", "files")
    },
    "unknown key": (section("model", n_embd=32), f"{CONFIG}.*n_embd"),
    "unknown norm": (section("model", norm="batchnorm"), f"{CONFIG}.*norm.*batchnorm"),
    "a larger vocabulary": (section("model", vocab_size=300), "257.*300"),
    "no width": (section("model", d_ff=0), f"{CONFIG}.*d_ff.*0"),
    "many layers": (section("model", n_layer=10**9), f"{WEIGHTS}.*1,000,000,000 blocks"),
    "much too wide": (section("model", d_ff=2**40), f"{WEIGHTS}.*elements"),
    "a little too wide": (section("model", d_ff=65), r"mlp_down.weight.*\(32, 65\)"),
    "more layers than fit into 64 bits": (section("model", n_layer=2**64), f"{CONFIG}.*64 bits"),
    "fewer special tokens": (section("tokenizer", special_tokens={}), "256.*257"),
    "special token of a byte": (
        section("tokenizer", special_tokens={"<|endoftext|>": 65}),
        "tokenizer.*65",
    ),
    "special tokens in a list": (section("tokenizer", special_tokens=["a"]), "special_tokens.*'a'"),
    "special id in a string": (
        section("tokenizer", special_tokens={"a": "1"}),
        "special_tokens.a.*'1'",
    ),
    "special id beyond all": (section("tokenizer", special_tokens={"a": 10**12}), "tokenizer"),
    "no pattern": (section("tokenizer", pattern=None), "pattern.*None"),
    "half a pattern": (section("tokenizer", pattern="("), r"tokenizer.*'\('"),
    "empty pattern": (section("tokenizer", pattern=""), "tokenizer.*pattern"),
    "pattern of nothing": (section("tokenizer", pattern="x?"), r"tokenizer.*'x\?'"),
    "template of a number": (section("tokenizer", chat_template=5), "chat_template"),
    "half a template": (section("tokenizer", chat_template="{% for %}"), f"{CONFIG}.*line 1"),
    "ranks of another line": (appended(RANKS, b"no rank\n"), f"line 257 of {RANKS}.*no rank"),
    "unknown record": (section("training", loss=1.0), f"{CONFIG}.*training"),
    "record without tokens": (
        lambda path: edit_config(path, lambda document: document["training"].pop("tokens")),
        f"{CONFIG}: tokens of the training record is missing$",
    ),
    "negative step": (section("training", step=-1), f"{CONFIG}.*step.*-1"),
    "step in a string": (section("training", step="abc"), "step.*abc"),
    "step is true": (section("training", step=True), "step.*True"),
    "loss in a list": (section("training", val_loss=[]), "val_loss"),
    "data is a number": (section("training", data=1), "data"),
    "endless step": (section("training", step=10**400), f"{CONFIG}.*JSON"),
    "infinite loss": (section("training", val_loss=float("inf")), f"{CONFIG}.*JSON"),
    "NaN in data": (section("training", data={"a": [[float("nan")]]}), f"{CONFIG}.*JSON"),
    "half a character": (section("training", created="\ud800"), f"{CONFIG}.*JSON"),
    "another hash": (section("files", **{RANKS: "0" * 64}), f"{RANKS}.*sha256.*000000000000"),
    "no hash": (section("files", **{WEIGHTS: None}), f"{CONFIG}.*{WEIGHTS}"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_refused(saved: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(saved)
    refuse(saved, message)


def test_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "none", "does not exist")
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", "not a directory")


@pytest.mark.parametrize("change", [{"n_layer": 10**9}, {"d_ff": 2**40}, {"d_ff": 65}])
def test_header_shows_sizes_of_another_model(saved: Path, change: dict[str, int]) -> None:
    section("model", **change)(saved)
    with pytest.raises(CheckpointError, match=r"another model|has shape"):
        check_header(read_checkpoint(saved))


def test_context_beyond_memory_is_refused_before_allocation(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES["modern"]))
    path = save_tiny_checkpoint(tmp_path / "saved", gpt).path
    section("model", context_length=2**40)(path)
    with pytest.raises(DeviceError, match="1,099,511,627,776 rotary"):
        load(path)


def test_sparse_file_is_refused_unread(saved: Path) -> None:
    """The file has the size that its header states, but the tensors do not fit the
    configuration."""
    header = {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    raw = json.dumps(header).encode()
    (saved / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(saved / WEIGHTS, 8 + len(raw) + 2**42)
    began = time.process_time()
    refuse(saved, f"{WEIGHTS}.*1 tensors.*3 blocks")
    assert time.process_time() - began < 5
