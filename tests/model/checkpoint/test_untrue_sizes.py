"""Sizes that are not true, and files that are none: refused before anything is made of them."""

import json
import os
import time
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    check_header,
    read_checkpoint,
)
from logitd.model.device import DeviceError
from tests.model.checkpoint.files import edit_config, load, refuse
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"n_layer": 10**9},
            "{path}/model.safetensors has ... tensors, and the configuration says 1,000,000,000 "
            "blocks, each of which has several: one of the two is another model's",
        ),
        (
            {"d_ff": 2**40},
            "{path}/model.safetensors has ... elements, and a model of the configuration's shape "
            "...: one of the two is another model's",
        ),
        (
            {"d_ff": 65},
            "{path}/model.safetensors: blocks.0.mlp_down.weight has shape ..., the "
            "configuration says (32, 65)",
        ),
        ({"n_layer": 2**64}, "{path}/config.json is not valid JSON: ... does not fit into 64 bits"),
        ({"d_ff": 0}, "{path}/config.json: d_ff is 0; it must be at least 1"),
    ],
)
def test_sizes_that_the_weights_do_not_bear_out(
    saved: Path, change: dict[str, int], sentence: str
) -> None:
    edit_config(saved, lambda document: document["model"].update(change))
    refuse(saved, sentence)
    if "valid" not in sentence and "at least" not in sentence:
        with pytest.raises(CheckpointError, match=r"another model's|has shape"):
            check_header(read_checkpoint(saved))


def test_a_context_that_does_not_fit_is_refused_before_its_tables_are_made(
    tmp_path: Path,
) -> None:
    path = save_tiny_checkpoint(
        tmp_path / "saved", tiny_gpt(tiny_config(**FAMILIES["modern"]))
    ).path
    edit_config(path, lambda document: document["model"].update(context_length=2**40))
    with pytest.raises(DeviceError, match="tables for a context of 1,099,511,627,776 rotary"):
        load(path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, RANKS])
def test_what_is_not_a_regular_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    refuse(saved, f"{{path}}/{name} is a pipe (FIFO); expected a regular file")
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    refuse(saved, f"{{path}}/{name} is a device; expected a regular file")


@pytest.mark.parametrize(
    ("section", "change", "sentence"),
    [
        ("training", {"step": 10**400}, "{path}/config.json is not valid JSON: ..."),
        ("training", {"step": -1}, "{path}/config.json: step of the training record is -1; ..."),
        ("training", {"val_loss": float("inf")}, "{path}/config.json is not valid JSON: ..."),
        (
            "training",
            {"data": {"a": [[float("nan")]]}},
            "{path}/config.json is not valid JSON: ...",
        ),
        ("training", {"created": "\ud800"}, "{path}/config.json is not valid JSON: ..."),
        (
            "tokenizer",
            {"pattern": ""},
            "the tokenizer of {path} cannot be read: the split pattern is empty, ...",
        ),
        (
            "tokenizer",
            {"pattern": "x?"},
            "the tokenizer of {path} cannot be read: the split pattern 'x?' does not cut this ...",
        ),
        (
            "tokenizer",
            {"special_tokens": {"<|endoftext|>": 10**12}},
            "the tokenizer of {path} cannot be read: the vocabulary goes up to ...",
        ),
    ],
)
def test_what_would_fail_in_a_reply_fails_here(
    saved: Path, section: str, change: dict[str, object], sentence: str
) -> None:
    edit_config(saved, lambda document: document[section].update(change))
    refuse(saved, sentence)


def test_a_file_as_large_as_its_header_says_takes_no_time_to_refuse(saved: Path) -> None:
    """A sparse file: its header is right about its size, and the configuration is another's."""
    header = {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    raw = json.dumps(header).encode()
    (saved / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(saved / WEIGHTS, 8 + len(raw) + 2**42)
    began = time.monotonic()
    refuse(
        saved, "{path}/model.safetensors has 1 tensors, and the configuration says 3 blocks, ..."
    )
    assert time.monotonic() - began < 5
