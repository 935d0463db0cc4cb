"""Checkpoints that are damaged, incomplete or inconsistent: each is refused in a sentence."""

import os
from pathlib import Path

import pytest
import torch

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    read_checkpoint,
)
from tests.model.checkpoint.files import edit_config, edit_weights, refuse, rehash


def test_no_directory(tmp_path: Path) -> None:
    refuse(tmp_path / "none", "{path} does not exist; expected the directory of a checkpoint")
    (tmp_path / "file").write_text("")
    refuse(tmp_path / "file", "{path} is not a directory; expected the directory of a checkpoint")


@pytest.mark.parametrize("name", [WEIGHTS, RANKS])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refuse(saved, f"{{path}} has no {name}")


def test_a_missing_config(saved: Path) -> None:
    (saved / CONFIG).unlink()
    refuse(
        saved,
        "{path} has no config.json; "
        "a checkpoint has config.json, model.safetensors and tokenizer.tiktoken",
    )


@pytest.mark.parametrize("name", [WEIGHTS, RANKS])
def test_one_flipped_bit(saved: Path, name: str) -> None:
    """safetensors itself does not notice a changed number."""
    raw = bytearray((saved / name).read_bytes())
    raw[-2] ^= 1
    (saved / name).write_bytes(raw)
    refuse(
        saved,
        f"{{path}}/{name} ({len(raw)} bytes) has sha256 ..., config.json says ...: "
        "the file was changed, truncated or damaged after saving",
    )


def test_a_truncated_file(saved: Path) -> None:
    os.truncate(saved / WEIGHTS, 1000)
    refuse(
        saved,
        "{path}/model.safetensors (1000 bytes) has sha256 ..., config.json says ...: "
        "the file was changed, truncated or damaged after saving",
    )


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_file_truncated_before_it_was_hashed(saved: Path, size: int) -> None:
    os.truncate(saved / WEIGHTS, size)
    rehash(saved)
    refuse(saved, "{path}/model.safetensors is not a complete safetensors file: ...")


def test_bytes_behind_the_last_tensor(saved: Path) -> None:
    with (saved / WEIGHTS).open("ab") as file:
        file.write(b"\0")
    rehash(saved)
    refuse(
        saved,
        "{path}/model.safetensors is not a complete safetensors file: "
        "there is more behind the last of its tensors",
    )


def test_a_wrong_shape(saved: Path) -> None:
    edit_weights(saved, lambda weights: weights.update({"final_norm.weight": torch.ones(31)}))
    refuse(
        saved,
        "{path}/model.safetensors: final_norm.weight has shape (31,), the configuration says (32,)",
    )


def test_a_missing_and_an_extra_tensor(saved: Path) -> None:
    edit_weights(saved, lambda weights: weights.update(another=torch.ones(1)))
    refuse(
        saved,
        "{path}/model.safetensors has 1 tensors that the configuration does not know, "
        "the first is another",
    )
    edit_weights(saved, lambda weights: weights.pop("blocks.1.qkv.bias"))
    refuse(saved, "{path}/model.safetensors lacks 1 tensors, the first is blocks.1.qkv.bias")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none(saved: Path, number: float) -> None:
    edit_weights(saved, lambda weights: weights["blocks.2.mlp_up.weight"][3, 5].fill_(number))
    refuse(
        saved,
        "{path}/model.safetensors: blocks.2.mlp_up.weight has NaN or infinite elements; "
        "its training diverged, or the file was damaged before it was hashed",
    )


def test_integers_for_weights(saved: Path) -> None:
    whole = torch.ones(32, dtype=torch.int64)
    edit_weights(saved, lambda weights: weights.update({"final_norm.weight": whole}))
    refuse(
        saved,
        "{path}/model.safetensors: final_norm.weight has the dtype torch.int64; real numbers are "
        "needed",
    )


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_format_version(saved: Path, version: object) -> None:
    edit_config(saved, lambda document: document.update(format_version=version))
    refuse(saved, f"{{path}} has format_version {version!r}; this logitd reads 1")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "{path}/config.json is not valid JSON: ..."),
        (b'{"format_version": 1', "{path}/config.json is not valid JSON: ..."),
        (b"\xff\xfe", "{path}/config.json is not valid JSON: ..."),
        (b"[1]", "{path}/config.json is not a JSON object"),
    ],
)
def test_bad_json(saved: Path, text: bytes, sentence: str) -> None:
    (saved / CONFIG).write_bytes(text)
    refuse(saved, sentence)


@pytest.mark.parametrize("section", ["model", "tokenizer", "training", "files"])
def test_a_missing_section(saved: Path, section: str) -> None:
    edit_config(saved, lambda document: document.pop(section))
    refuse(saved, f"{{path}}/config.json has no section '{section}'")


@pytest.mark.parametrize(
    ("section", "change", "sentence"),
    [
        ("model", {"n_embd": 32}, "{path}/config.json: unknown model keys ['n_embd']; ..."),
        (
            "model",
            {"norm": "batchnorm"},
            "{path}/config.json: norm is 'batchnorm'; it must be one of ['layernorm', 'rmsnorm']",
        ),
        (
            "model",
            {"vocab_size": 300},
            "{path}: the tokenizer has 257 ids, the model 300",
        ),
        (
            "tokenizer",
            {"special_tokens": {}},
            "{path}: the tokenizer has 256 ids, the model 257",
        ),
        (
            "tokenizer",
            {"special_tokens": {"<|endoftext|>": 65}},
            "the tokenizer of {path} cannot be read: special tokens ...",
        ),
        (
            "tokenizer",
            {"special_tokens": ["<|endoftext|>"]},
            "{path}/config.json: the tokenizer needs a 'pattern' (a string) and 'special_tokens' "
            "(an object of names and integer ids)",
        ),
        (
            "tokenizer",
            {"special_tokens": {"<|endoftext|>": "256"}},
            "{path}/config.json: the tokenizer needs a 'pattern' (a string) and 'special_tokens' "
            "(an object of names and integer ids)",
        ),
        (
            "tokenizer",
            {"pattern": None},
            "{path}/config.json: the tokenizer needs a 'pattern' (a string) and 'special_tokens' "
            "(an object of names and integer ids)",
        ),
        (
            "tokenizer",
            {"pattern": "("},
            "the tokenizer of {path} cannot be read: "
            "the split pattern '(' is not a regular expression: ...",
        ),
        (
            "tokenizer",
            {"chat_template": 5},
            "{path}/config.json: chat_template is not a string",
        ),
        (
            "tokenizer",
            {"chat_template": "{% for %}"},
            "{path}/config.json: line 1 of the chat template: ...",
        ),
        (
            "training",
            {"loss": 1.0},
            "{path}/config.json: the training record has ..., expected ...",
        ),
        (
            "files",
            {RANKS: "0" * 64},
            "{path}/tokenizer.tiktoken (...) has sha256 ..., config.json says 000000000000...: ...",
        ),
        (
            "files",
            {WEIGHTS: None},
            "{path}/config.json does not give the sha256 of model.safetensors",
        ),
    ],
)
def test_a_wrong_config(
    saved: Path, section: str, change: dict[str, object], sentence: str
) -> None:
    edit_config(saved, lambda document: document[section].update(change))
    refuse(saved, sentence)


def test_bad_ranks(saved: Path) -> None:
    with (saved / RANKS).open("ab") as file:
        file.write(b"no rank\n")
    rehash(saved)
    refuse(
        saved,
        "the tokenizer of {path} cannot be read: line 257 of tokenizer.tiktoken is b'no rank'; "
        "expected a base64 token, a space and its rank",
    )


@pytest.mark.parametrize(
    ("name", "value"), [("step", "abc"), ("step", True), ("val_loss", []), ("data", 1)]
)
def test_a_training_record_of_wrong_kinds_is_refused(saved: Path, name: str, value: object) -> None:
    """A step that is not a number used to load, and broke whatever printed it later."""
    edit_config(saved, lambda document: document["training"].update({name: value}))
    with pytest.raises(CheckpointError, match=f"{name} of the training record"):
        read_checkpoint(saved)
