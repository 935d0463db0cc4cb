"""Held-out text from a file, a run, or Python itself."""

import gzip
import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.convert.vocabulary.words import word_tokenizer
from logitd.model.data.errors import DataError
from logitd.model.data.prepare import prepare_text, read_prepared
from logitd.model.data.sources.document import PIECE, text_document
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.split import sides, split_text
from logitd.model.data.windows import Windows
from logitd.model.evaluation import held_out as module
from logitd.model.evaluation.held_out import MIN_TOKENS, WINDOW_TOKENS, held_out_windows
from logitd.model.training.trainer import train
from tests.model.conftest import Configure, story
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record

BUNDLED = Path(__file__).parents[3] / "checkpoints" / "python-small"


@pytest.fixture(scope="module")
def checkpoint(checkpoint_path: Path) -> CheckpointInfo:
    return read_checkpoint(checkpoint_path)


def write(path: Path, size: int) -> Path:
    path.write_bytes(story(size)[:size].encode())
    return path


def texts(windows: Windows, checkpoint: CheckpointInfo) -> list[bytes]:
    """The text of each window, including the token that follows it."""
    ((inputs, targets),) = windows
    return [
        checkpoint.tokenizer.decode_bytes([*row.tolist(), int(last)])
        for row, last in zip(inputs, targets[:, -1], strict=True)
    ]


def test_windows_are_spread_over_a_named_text(checkpoint: CheckpointInfo, tmp_path: Path) -> None:
    path = write(tmp_path / "text.txt", 10_000)
    name, held_out = held_out_windows(checkpoint, path)
    assert name == str(path)
    content = path.read_bytes()
    windows = texts(held_out, checkpoint)
    assert [len(window) for window in windows] == [129] * 16
    places = [content.index(window) for window in windows]
    assert places[0] == 0
    assert places[-1] > 9000


def test_short_context_has_shorter_windows(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(context_length=16))
    info = save_tiny_checkpoint(tmp_path / "classroom", gpt=gpt)
    (batch,) = held_out_windows(info, write(tmp_path / "text.txt", 10_000))[1]
    assert batch[0].shape == (WINDOW_TOKENS // 16, 16)


def test_text_is_read_up_to_a_whole_word(checkpoint: CheckpointInfo, tmp_path: Path) -> None:
    """The last word was cut at the limit. A vocabulary of words has no such word, or another."""
    tokenizer, _ = word_tokenizer({0: "north", 1: "northern"}, "here")
    path = tmp_path / "text.txt"
    path.write_text("northern\n" * (module.READ_BYTES // 8))
    _, windows = held_out_windows(replace(checkpoint, tokenizer=tokenizer), path)
    assert all((inputs == 1).all() and (targets == 1).all() for inputs, targets in windows)


@pytest.mark.parametrize(("enough", "pieces"), [(1, 1), (2 * PIECE, 1), (2 * PIECE + 1, 2)])
def test_no_more_than_enough_is_read(checkpoint: CheckpointInfo, enough: int, pieces: int) -> None:
    document = text_document("long", "é" * 4 * PIECE)
    shard = module._tokenized([document.pieces()], checkpoint, enough)
    assert shard.text_bytes == pieces * 2 * PIECE


def test_named_text_may_be_compressed_or_json_lines(
    checkpoint: CheckpointInfo, tmp_path: Path
) -> None:
    content = story(200)
    (tmp_path / "a.txt").write_text(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": content}) + "\n")
    expected = texts(held_out_windows(checkpoint, tmp_path / "a.txt")[1], checkpoint)
    for name in ("a.gz", "a.jsonl"):
        assert texts(held_out_windows(checkpoint, tmp_path / name)[1], checkpoint) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"x" * (MIN_TOKENS - 1),
            "text.txt has 1,024 tokens; measuring a loss needs more than 1,024",
        ),
        (b"x\xff" * MIN_TOKENS, r"text.txt is not UTF-8 \(byte 0xff"),
        (b"", "its files are empty"),
        (None, "text.txt is not a file"),
    ],
)
def test_unusable_named_text_is_refused(
    checkpoint: CheckpointInfo, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        held_out_windows(checkpoint, path)


def test_text_with_just_enough_tokens_is_accepted(
    checkpoint: CheckpointInfo, tmp_path: Path
) -> None:
    (batch,) = held_out_windows(checkpoint, write(tmp_path / "text.txt", MIN_TOKENS))[1]
    assert batch[0].numel() == MIN_TOKENS


def test_run_has_its_own_held_out_text(configure: Configure, tmp_path: Path) -> None:
    data = tmp_path / "story.txt"
    data.write_text(story(800), encoding="utf-8")
    config = configure(data=(str(data),), val_fraction=0.3, steps=6, keep_every=3)
    train(config)
    assert config.out is not None
    for place in ("latest", "best", "history/step-000003"):
        info = read_checkpoint(config.out / place)
        name, windows = held_out_windows(info)
        assert name == "the run's validation text"
        val = read_prepared(config.out / "data").val.tokens
        (batch,) = windows
        assert np.array_equal(batch[0][0].numpy(), val[: batch[0].shape[1]])
    other = replace(info, tokenizer=read_checkpoint(BUNDLED).tokenizer)
    with pytest.raises(DataError, match="another tokenizer"):
        held_out_windows(other)
    (config.out / "data" / "val.tokens").unlink()
    with pytest.raises(DataError, match="missing"):
        held_out_windows(info)


def test_checkpoint_of_unknown_text_has_no_held_out_text(checkpoint: CheckpointInfo) -> None:
    with pytest.raises(DataError, match="not in a run directory and was not trained on Python"):
        held_out_windows(checkpoint)


def documents(val_fraction: float) -> list[bytes]:
    """The part of each document of the built-in text that the trainer holds out."""
    text = python_text(Path(sysconfig.get_path("stdlib")))
    split = split_text(text.documents, val_fraction)
    sorted_out = [
        [p.encode() for side, p in sides(document, split) if side == "val"]
        for document in text.documents
    ]
    return [b"".join(pieces) for pieces in sorted_out]


@pytest.mark.parametrize("val_fraction", [0.001, 0.02, 0.1])
def test_held_out_part_of_pythons_text_is_the_trainers(tmp_path: Path, val_fraction: float) -> None:
    """A small share includes ends of documents that were trained on."""
    try:
        expected = documents(val_fraction)
    except DataError as reason:
        pytest.skip(str(reason))
    size = sum(map(len, expected))
    data: dict[str, Any] = {
        "name": "x",
        "licence": "y",
        "built_in": True,
        "val_fraction": val_fraction,
    }
    info = save_tiny_checkpoint(tmp_path / "python", training=training_record(data=data))
    name, windows = held_out_windows(info)
    assert name == "the validation part of Python's own text"
    whole = b"<|endoftext|>".join(expected)
    for window in texts(windows, info):
        for piece in window.split(b"<|endoftext|>"):
            assert piece in whole
    shard = module.held_out_text(info, module.READ_BYTES)[1]
    assert shard.text_bytes >= min(size, module.READ_BYTES)


@pytest.mark.parametrize("val_fraction", [0.03, 0.3])
def test_held_out_part_of_pythons_text_is_found_beside_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, val_fraction: float
) -> None:
    """A split of Python's own text alone would hold out other documents. With the small share the
    largest of them is divided."""
    library, other = tmp_path / "library", tmp_path / "other"
    for folder, sizes in ((library, [20_000, *range(200, 1400, 30)]), (other, range(100, 900, 20))):
        folder.mkdir()
        for number, size in enumerate(sizes):
            (folder / f"m{number:02}.py").write_text(f"# {number}\n{story(size, number)[:size]}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    prepared = prepare_text(
        open_text(("builtin:python", str(other))),
        tmp_path / "data",
        vocab_size=259,
        val_fraction=val_fraction,
    )
    data = {**prepared.record, "name": "x"}
    info = save_tiny_checkpoint(tmp_path / "moved", training=training_record(data=data))
    end = "<|endoftext|>"
    decode = prepared.tokenizer.decode
    found = info.tokenizer.decode(module.held_out_text(info)[1].tokens.tolist()).split(end)
    trained = [Path(file).read_text() for file in other.iterdir()]
    held_out = decode(prepared.val.tokens.tolist()).split(end)
    assert sorted(found) == sorted(text for text in held_out if text not in trained)
    assert len(found) > 1
    alone = dict(data, built_in=True)
    del alone["python_split"]
    older = save_tiny_checkpoint(tmp_path / "older", training=training_record(data=alone))
    assert module.held_out_text(older)[1].count != module.held_out_text(info)[1].count


@pytest.mark.parametrize("split", [{}, {"below": 1, "divided": []}, {"below": "x", "divided": []}])
def test_unreadable_record_of_the_split_is_refused(tmp_path: Path, split: Any) -> None:
    data: dict[str, Any] = {"name": "x", "licence": "y", "val_fraction": 0.1, "python_split": split}
    info = save_tiny_checkpoint(tmp_path / "python", training=training_record(data=data))
    with pytest.raises(DataError, match="python_split cannot be read"):
        held_out_windows(info)


def test_record_without_a_share_is_refused(tmp_path: Path) -> None:
    data: dict[str, Any] = {"name": "x", "licence": "y", "built_in": True}
    info = save_tiny_checkpoint(tmp_path / "python", training=training_record(data=data))
    with pytest.raises(DataError, match="does not record which share of Python's own text"):
        held_out_windows(info)
