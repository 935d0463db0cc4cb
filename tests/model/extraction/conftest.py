"""Texts of every kind, and their extraction with the tiny checkpoint."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from logitd.model.extraction.run import Extracted, ExtractionRequest, extract
from logitd.model.inference.options import ComputeOptions
from tests.model.conftest import story

TORCH = ComputeOptions(device="cpu", dtype="float32", threads=1, kernels="torch")
Extract = Callable[..., Extracted]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six documents in four files; two are longer than the tiny model's context of 128 bytes."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text(story(8), encoding="utf-8")  # about 300 bytes
    lines = [{"text": "a short “line”"}, {"text": ""}, {"text": story(5, seed=1)}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    parquet.write_table(arrow.table({"text": ["x", "a row of words"]}), folder / "c.parquet")
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    return folder


def in_memory(texts: Path) -> list[tuple[str, str]]:
    """Name and text of each document, obtained without the code that reads files."""
    return [
        (f"{texts}/a.txt", story(8)),
        (f"{texts}/b.jsonl, line 1", "a short “line”"),
        (f"{texts}/b.jsonl, line 3", story(5, seed=1)),
        (f"{texts}/c.parquet, row 1", "x"),
        (f"{texts}/c.parquet, row 2", "a row of words"),
        (f"{texts}/d.txt.gz", "packed"),
    ]


@pytest.fixture
def extracting(checkpoint_path: Path, texts: Path, tmp_path: Path) -> Extract:
    """Extract into a folder; other keyword arguments are fields of `ExtractionRequest`."""

    def run(
        out: Path = tmp_path / "out",
        *,
        checkpoint: Path = checkpoint_path,
        data: tuple[str, ...] = (str(texts),),
        options: ComputeOptions = TORCH,
        tell: Callable[[Any], None] = lambda event: None,
        **asked: Any,
    ) -> Extracted:
        return extract(
            checkpoint, data, out, ExtractionRequest(**asked), options=options, tell=tell
        )

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
