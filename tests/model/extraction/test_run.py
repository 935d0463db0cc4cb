"""Extractions with a real checkpoint: values equal the values of `LLM` bit for bit, and some
requests are refused."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.data.errors import DataError
from logitd.model.device import DeviceError, available_processors
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.index import INDEX, LOCK
from logitd.model.extraction.run import Progress, Surveyed
from logitd.model.folder_lock import FolderLock
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.options import KernelChoice
from logitd.model.llm import LLM
from tests.model.extraction.conftest import TORCH, Extract, contents, in_memory
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt, training_record
from tests.model.full_disk import files_of_at_most

CONTEXT = 128


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Any:
    with LLM(checkpoint_path, device="cpu", dtype="float32", threads=1, kernels="torch") as opened:
        yield opened


def rows_of(out: Path) -> list[dict[str, Any]]:
    """All rows of the shards of a folder, in the order of the index."""
    index = json.loads((out / INDEX).read_text())
    tables = [parquet.read_table(out / shard["file"]) for shard in index["shards"]]
    assert [table.num_rows for table in tables] == [shard["rows"] for shard in index["shards"]]
    return [row for table in tables for row in table.to_pylist()]


def scored(llm: LLM, text: str, stride: int) -> list[float | None]:
    """Logprobs from LLM.score, window by window."""
    ids = list(text.encode())
    values: list[float | None] = [None, *llm.score(ids[:CONTEXT])[0].logprobs.tolist()]
    for start in range(stride, len(ids), stride):
        context = CONTEXT - stride
        if continuation := ids[start + context : start + CONTEXT]:
            (score,) = llm.score(ids[start : start + context], [continuation])
            values += score.logprobs.tolist()
    return values


@pytest.mark.parametrize("stride", [None, 50])
def test_logprobs_equal_score_to_the_bit(
    extracting: Extract, llm: LLM, texts: Path, stride: int | None
) -> None:
    result = extracting(stride=stride, shard_tokens=150)
    rows = rows_of(result.path)
    expected = [
        {
            "document": document,
            "source": source,
            "position": position,
            "token": token,
            "logprob": None if logprob is None else float(np.float32(logprob)),
        }
        for document, (source, text) in enumerate(in_memory(texts))
        for position, (token, logprob) in enumerate(
            zip(text.encode(), scored(llm, text, stride or CONTEXT - 1), strict=True)
        )
    ]
    assert rows == expected
    assert result.rows == result.tokens == len(rows)
    assert result.shards > 3


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_bytes_do_not_depend_on_positions_per_step(
    kernels: KernelChoice, extracting: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for chunk in (32, 1024):
        monkeypatch.setattr("logitd.model.extraction.compute.PREFILL_CHUNK", chunk)
        options = replace(TORCH, kernels=kernels)
        result = extracting(tmp_path / f"of {chunk}", shard_tokens=150, options=options)
        files.append([path.read_bytes() for path in sorted(result.path.glob("*.parquet"))])
    assert files[0] == files[1]
    assert len(files[0]) > 3


FLOATS, INTEGERS = "list<element: float>", "list<element: int32>"
PLACES = {
    "document": "int64",
    "source": "dictionary<values=string, indices=int32, ordered=0>",
    "position": "int32",
    "token": "int32",
}


@pytest.mark.parametrize(
    ("asked", "columns"),
    [
        ({"top_k": 2}, {"logprob": "float", "top_tokens": INTEGERS, "top_logprobs": FLOATS}),
        (
            {"lens": True},
            {
                "layer_logprobs": FLOATS,
                "layer_ranks": INTEGERS,
                "layer_entropies": FLOATS,
                "layer_divergences": FLOATS,
                "layer_top_tokens": f"list<element: {INTEGERS}>",
                "layer_top_logprobs": f"list<element: {FLOATS}>",
            },
        ),
    ],
)
def test_columns_have_the_documented_types(
    extracting: Extract, asked: dict[str, Any], columns: dict[str, str]
) -> None:
    schema = parquet.read_schema(extracting(**asked).path / "shard-000000.parquet")
    assert {field.name: str(field.type) for field in schema} == PLACES | columns


def test_likeliest_tokens_are_those_of_the_logits(
    extracting: Extract, llm: LLM, texts: Path
) -> None:
    rows = rows_of(extracting(top_k=3).path)
    text = in_memory(texts)[4][1]
    of_text = [row for row in rows if row["document"] == 4]
    logits = llm.logits(list(text.encode())).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert of_text[0]["top_tokens"] is of_text[0]["top_logprobs"] is None
    for row, values in zip(of_text[1:], logprobs[:-1], strict=True):
        order = np.argsort(-values, kind="stable")[:3]
        assert row["top_tokens"] == order.tolist()
        np.testing.assert_allclose(row["top_logprobs"], values[order], rtol=1e-6)


@pytest.mark.parametrize("stride", [None, 50])
def test_stages_equal_activations_to_the_bit(
    extracting: Extract, llm: LLM, texts: Path, stride: int | None
) -> None:
    patterns = ["embedding", "blocks.*.output", "blocks.1.attention.q"]
    result = extracting(stages=tuple(patterns), stride=stride, shard_tokens=200)
    shards = [load_file(path) for path in sorted(result.path.glob("shard-*.safetensors"))]
    found = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    step = stride or CONTEXT
    expected: dict[str, list[Any]] = {name: [] for name in found}
    for document, (_, text) in enumerate(in_memory(texts)):
        ids = list(text.encode())
        for start in range(0, len(ids), step):
            first = 0 if start == 0 else CONTEXT - step
            window = ids[start : start + CONTEXT]
            if len(window) <= first:
                continue
            for name, values in llm.activations(window, patterns).items():
                expected[name].append(values[first:])
            positions = np.arange(start + first, start + len(window), dtype=np.int32)
            expected["position"].append(positions)
            expected["document"].append(np.full(len(positions), document, dtype=np.int64))
            expected["token"].append(np.array(window[first:], dtype=np.int32))
    assert len(shards) > 2
    assert set(found) == {
        *("embedding", "blocks.0.output", "blocks.1.output", "blocks.2.output"),
        *("blocks.1.attention.q", "document", "position", "token"),
    }
    assert found["blocks.1.attention.q"].shape == (result.rows, 4, 8)
    for name, parts in expected.items():
        whole = np.concatenate(parts)
        assert found[name].dtype == whole.dtype, name
        assert np.array_equal(found[name], whole), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sample_is_rows_of_the_whole_in_the_stored_dtype(
    extracting: Extract, tmp_path: Path, dtype: Any
) -> None:
    """The same tokens are sampled even if the windows and shards have different sizes."""
    stage = "blocks.1.output"

    def tokens(name: str, **asked: Any) -> dict[tuple[int, int], Any]:
        result = extracting(tmp_path / name, stages=(stage,), **asked)
        shards = [load_torch(path) for path in sorted(result.path.glob("shard-*.safetensors"))]
        whole = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
        assert len(whole[stage]) == result.rows
        places = zip(whole["document"].tolist(), whole["position"].tolist(), strict=True)
        return dict(zip(places, zip(whole["token"], whole[stage], strict=True), strict=True))

    sampled = {"sample": 0.25, "sample_seed": 7, "stored_dtype": dtype}
    every, some = tokens("every"), tokens("some", shard_tokens=99, **sampled)
    assert 0.15 < len(some) / len(every) < 0.35
    for place, (token, values) in some.items():
        assert token == every[place][0]
        assert torch.equal(values, every[place][1].to(getattr(torch, dtype)))
    assert tokens("windows", stride=50, **sampled).keys() == some.keys()
    assert tokens("seed", **{**sampled, "sample_seed": 8}).keys() != some.keys()
    index = json.loads((tmp_path / "some" / "index.json").read_text())
    assert (index["settings"]["sample"], index["settings"]["sample_seed"]) == (0.25, 7)
    for changes, sentence in (
        ({"sample": 0.5}, r"settings\.sample was 0.25 and is 0.5"),
        ({"sample": 1.0}, r"settings\.sample was 0.25 and is null; .*sample_seed was 7 and is"),
        ({"stored_dtype": "float32"}, r"settings\.stored_dtype was .* and is null"),
    ):
        if sampled | changes != sampled:
            with pytest.raises(ExtractionError, match=sentence):
                tokens("some", shard_tokens=99, **{**sampled, **changes})


def test_values_that_a_dtype_cannot_hold_are_refused(extracting: Extract, tmp_path: Path) -> None:
    gpt = tiny_gpt()
    gpt.token_embedding.weight.data *= 1e7
    large = save_tiny_checkpoint(tmp_path / "large", gpt).path
    asked = {"checkpoint": large, "stages": ("embedding",)}
    with pytest.raises(ExtractionError, match=r"embedding .*float16 cannot hold.*--stored-dtype"):
        extracting(**asked, stored_dtype="float16")
    assert extracting(tmp_path / "wide", **asked, stored_dtype="bfloat16").rows


def test_finished_extraction_is_unchanged(extracting: Extract, texts: Path) -> None:
    first = extracting(shard_tokens=200)
    before = contents(first.path)
    events: list[Any] = []
    again = extracting(shard_tokens=200, tell=events.append)
    assert contents(first.path) == before
    assert (again.rows, again.tokens) == (first.rows, 0)
    assert [(event.shards, event.rows) for event in events] == [(first.shards, first.rows)]
    assert set(before) == {INDEX, *(f"shard-{i:06d}.parquet" for i in range(first.shards))}


def test_progress_ends_with_everything(
    extracting: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logitd.model.extraction.run.SECONDS_BETWEEN", 0.0)
    events: list[Any] = []
    result = extracting(shard_tokens=100, tell=events.append)
    assert isinstance(events[0], Surveyed)
    progress = [event for event in events if isinstance(event, Progress)]
    tokens = [event.tokens for event in progress]
    assert tokens == sorted(tokens)
    assert (tokens[-1], progress[-1].share) == (result.rows, 1.0)
    assert all(0 < event.share <= 1 and event.tokens_per_second > 0 for event in progress)


def _interrupted(extracting: Extract, out: Path, **asked: Any) -> Path:
    """A folder with two shards, after an interrupt."""

    def interrupt(event: Any) -> None:
        if isinstance(event, Progress) and event.shards == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitd.model.extraction.run.SECONDS_BETWEEN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            extracting(out, tell=interrupt, **asked)
    assert sorted(contents(out)) == [
        LOCK, INDEX, "shard-000000.parquet", "shard-000001.parquet",
    ]  # fmt: skip
    return out


ASKED: Mapping[str, Any] = {"shard_tokens": 100}


@pytest.mark.parametrize("lens", [False, True])
def test_interrupted_extraction_continues_to_the_same_bytes(
    extracting: Extract, tmp_path: Path, lens: bool
) -> None:
    asked = {**ASKED, "lens": lens}
    out = _interrupted(extracting, tmp_path / "out", **asked)
    (out / ".shard-000002.parquet.part").write_bytes(b"half")
    (out / ".shard-000099.parquet.part").write_bytes(b"of a larger attempt")
    (out / ".index.json.part").write_bytes(b"half")
    (out / "shard-000002.parquet").write_bytes(b"not listed yet")
    resumed = extracting(**asked)
    assert 0 < resumed.tokens < resumed.rows
    straight = extracting(tmp_path / "straight", **asked)
    assert contents(out) == contents(straight.path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 1}, r"settings\.top_k was 0 and is 1"),
        ({"lens": True}, r'settings\.kind was "logprobs" and is "lens"; settings\.top_k was 0 and'),
        ({"stride": 5}, r"settings\.stride was 127 and is 5"),
        ({"shard_tokens": 99}, r"settings\.shard_tokens was 100 and is 99"),
        (
            {"stages": ("embedding",)},
            r'settings\.kind was "logprobs" and is "stages".*settings\.stages was null',
        ),
        ({"options": replace(TORCH, dtype="bfloat16")}, r'dtype was "float32" and is "bfloat16"'),
        pytest.param(
            {"options": replace(TORCH, threads=2)},
            r"computation\.threads was 1 and is 2\. .*--threads 1",
            marks=pytest.mark.skipif(available_processors() < 2, reason="one processor"),
        ),
    ],
)
def test_other_settings_are_refused(
    extracting: Extract, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    out = _interrupted(extracting, tmp_path / "out", **ASKED)
    before = contents(out)
    with pytest.raises(ExtractionError, match=message):
        extracting(**{**ASKED, **changed})
    assert set(contents(out)) == set(before)
    assert {**contents(out), LOCK: b""} == {**before, LOCK: b""}


def test_other_model_with_equal_weights_is_refused(extracting: Extract, tmp_path: Path) -> None:
    """The norms' eps and the encoding of special tokens are in the configuration alone."""
    _interrupted(extracting, tmp_path / "out", **ASKED)
    record = training_record()
    for name, change, message in (
        ("eps", {"config": tiny_config(norm_eps=0.1)}, r"checkpoint\.model_sha256 was"),
        (
            "special",
            {"training": replace(record, data={**record.data, "special_tokens": "ids"})},
            r'checkpoint\.special_tokens was "text" and is "ids"',
        ),
    ):
        other = save_tiny_checkpoint(tmp_path / name, **change).path
        with pytest.raises(ExtractionError, match=message):
            extracting(checkpoint=other, **ASKED)
    info = read_checkpoint(other)
    with_code = replace(info, files={**info.files, "code/model.py": "0"})
    assert with_code.model_sha256 != info.model_sha256


def test_other_checkpoint_and_data_are_refused(
    extracting: Extract, texts: Path, tmp_path: Path
) -> None:
    _interrupted(extracting, tmp_path / "out", **ASKED)
    other = save_tiny_checkpoint(tmp_path / "other", tiny_gpt(seed=1)).path
    with pytest.raises(ExtractionError, match=r"checkpoint\.weights_sha256 was .* and is"):
        extracting(checkpoint=other, **ASKED)
    with pytest.raises(ExtractionError, match=r"data\.sha256 was .*data\.documents was 6 and is 1"):
        extracting(data=(str(texts / "a.txt"),), **ASKED)


def test_damaged_or_missing_shard_is_named(extracting: Extract, tmp_path: Path) -> None:
    out = _interrupted(extracting, tmp_path / "out", **ASKED)
    shard = out / "shard-000001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ExtractionError, match=r"shard-000001\.parquet .*sha256"):
        extracting(**ASKED)
    shard.unlink()
    with pytest.raises(ExtractionError, match=r"shard-000001\.parquet .*index\.json"):
        extracting(**ASKED)


@pytest.mark.parametrize(
    "name", ["letter.txt", "shard-000000.parquet", ".shard-0.part", "shard-000001.parquet.part"]
)
def test_folder_with_other_files_is_refused(extracting: Extract, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("text")
    with pytest.raises(ExtractionError, match=f"{name}.*--out"):
        extracting()
    assert contents(out) == {name: b"text"}


def test_new_file_of_another_program_is_named(extracting: Extract, tmp_path: Path) -> None:
    out = _interrupted(extracting, tmp_path / "out", **ASKED)
    for name in ("letter.txt", "shard-000003.parquet"):
        (out / name).write_text("text")
        with pytest.raises(ExtractionError, match=f"{name}.*--out"):
            extracting(**ASKED)
        assert (out / name).read_text() == "text"
        (out / name).unlink()


SHARD = {"file": "shard-000000.parquet", "rows": 1, "bytes": 1, "sha256": "0", "document": 0}
OUTSIDE = SHARD | {"file": "../shard-000000.parquet", "position": 1}


@pytest.mark.parametrize(
    "index",
    [
        *("", "{}", "[]", '{"shards": [{}]}', '{"shards": [], "data_name": ""}'),
        '{"shards": [], "data_name": "", "computation": []}',
        json.dumps({"shards": [SHARD], "data_name": ""}),
        json.dumps({"shards": [OUTSIDE], "data_name": ""}),
    ],
)
def test_foreign_index_is_refused(extracting: Extract, tmp_path: Path, index: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / INDEX).write_text(index)
    with pytest.raises(ExtractionError, match=r"index|checkpoint.* was null"):
        extracting()
    assert (tmp_path / "out" / INDEX).read_text() == index


def test_folder_in_the_data_is_refused(extracting: Extract, tmp_path: Path) -> None:
    """The repeated command once read its own index and shards as data, so it could not continue."""
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(ExtractionError, match=r"out is in the data folder .* --out outside"):
        extracting(data=(str(tmp_path),))
    assert not (tmp_path / "out").exists()


def test_one_process_writes_a_folder(extracting: Extract, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lock = FolderLock(tmp_path / "out" / LOCK)
    with pytest.raises(ExtractionError, match=f"process {os.getpid()} .*--out"):
        extracting()
    lock.release()
    assert extracting().rows


def test_replaced_folder_is_left_to_its_new_process(extracting: Extract, tmp_path: Path) -> None:
    """The folder is moved, and a new one of its name is locked, after the extraction began. The
    extraction once wrote its shards into the new folder and removed its lock."""
    out, locks = tmp_path / "out", []

    def replace_folder(event: object) -> None:
        if isinstance(event, Surveyed):
            out.rename(tmp_path / "moved")
            out.mkdir()
            locks.append(FolderLock(out / LOCK))

    with pytest.raises(ExtractionError, match=r"moved .* another process .*--out"):
        extracting(tell=replace_folder)
    assert [path.name for path in out.iterdir()] == [LOCK]


def test_removed_folder_is_explained(extracting: Extract, tmp_path: Path) -> None:
    def remove(event: object) -> None:
        if isinstance(event, Surveyed):
            shutil.rmtree(tmp_path / "out")

    with pytest.raises(ExtractionError, match="out cannot be written: No such file"):
        extracting(tell=remove)


def test_full_disk_is_explained_and_shards_stay(extracting: Extract, tmp_path: Path) -> None:
    """The file size limit is one byte too small for the largest file, so writing it fails."""
    straight = contents(extracting(tmp_path / "straight", top_k=20, **ASKED).path)
    largest = max(map(len, straight.values()))
    refusal = pytest.raises(ExtractionError, match=r"out .*--out.* repeat the command to continue")
    with files_of_at_most(largest - 1), refusal:
        extracting(top_k=20, **ASKED)
    assert not list((tmp_path / "out").glob(".*"))
    assert extracting(top_k=20, **ASKED).tokens > 0
    assert contents(tmp_path / "out") == straight


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("blocks.*.attention.probs",), r"attention\.probs.*128.*attention\.q"),
        (("blocks.0.attention.scores",), r"attention\.scores.*--stages"),
        (("logits",), "logits.*257.*--top-k K"),
        (("*",), "--stages"),
        (("nothing",), "no stage matches 'nothing'"),
    ],
)
def test_stages_that_are_too_large_are_refused(
    extracting: Extract, tmp_path: Path, stages: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ExtractionError, InvalidRequest), match=message):
        extracting(stages=stages)
    assert not (tmp_path / "out").exists()


def test_impossible_device_is_refused_before_the_data_is_read(
    extracting: Extract, tmp_path: Path
) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"x" * 2**20 + b"\xff")  # reading the end would fail
    with pytest.raises(DeviceError, match="threads is 10000"):
        extracting(data=(str(binary),), options=replace(TORCH, threads=10_000))
    assert not (tmp_path / "out").exists()


def test_refused_extraction_leaves_no_folder(extracting: Extract, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"text\xff")
    for data, error, message in (
        ((str(empty),), DataError, "empty"),
        ((str(binary),), DataError, "UTF-8"),
        ((), ExtractionError, "--data"),
    ):
        with pytest.raises(error, match=message):
            extracting(data=data)
    with pytest.raises(ExtractionError, match=r"top_k.*258.*257"):
        extracting(top_k=258)
    assert not (tmp_path / "out").exists()


def test_context_of_one_token_predicts_nothing(extracting: Extract, tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(context_length=1))
    short = save_tiny_checkpoint(tmp_path / "short", gpt).path
    with pytest.raises(ExtractionError, match=r"context is 1 .*--stages"):
        extracting(checkpoint=short)
    assert extracting(checkpoint=short, stages=("embedding",)).rows


def test_text_that_changes_while_it_is_read_is_refused(
    extracting: Extract, texts: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(texts, copied)

    def change(event: Any) -> None:
        if isinstance(event, Surveyed):
            (copied / "a.txt").write_text("another")

    with pytest.raises(ExtractionError, match=r"bytes.*sha256.*--out"):
        extracting(data=(str(copied),), tell=change)


def test_token_ids_of_a_run_are_refused(extracting: Extract, straight: Path) -> None:
    with pytest.raises(ExtractionError, match="token ids"):
        extracting(data=(str(straight / "data"),))
