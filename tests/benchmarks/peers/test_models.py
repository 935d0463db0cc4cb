"""The same model in every format, compared with the plain forward pass or the project's own
exporters.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from benchmarks.peers.comparison import expected_logprobs, make_weights, random_prompts
from benchmarks.peers.contract import disagreement
from benchmarks.peers.models import write_models
from benchmarks.peers.transformers_generate import logprobs
from benchmarks.peers.weights import HUGGINGFACE, LOGITD
from benchmarks.shapes import SMALL, SMALL_LLAMA, Shape
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.convert.exporting import export_model

TWO = pytest.mark.parametrize("shape", [SMALL, SMALL_LLAMA], ids=["gpt2", "llama"])


@pytest.fixture
def written(tmp_path: Path, shape: Shape) -> Path:
    write_models(tmp_path, shape, ["float32", "int8"])
    return tmp_path


@TWO
def test_all_formats_hold_the_same_model(written: Path, shape: Shape, tmp_path: Path) -> None:
    ids = random_prompts(1, 40, shape.vocab_size)[0]
    again = tmp_path / "again"
    again.mkdir()
    expected = expected_logprobs(make_weights(shape, again), ids)
    _, gpt = load_checkpoint(written / LOGITD, device=torch.device("cpu"), dtype=torch.float32)
    assert np.array_equal(expected_logprobs(gpt, ids), expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written / HUGGINGFACE).eval()
    assert disagreement(logprobs(theirs, ids), expected) < 1e-4
    assert not list(written.glob("*.npz")), "the source of the formats is removed"


@TWO
def test_gguf_equals_the_exporters(written: Path, shape: Shape, tmp_path: Path) -> None:
    """The tensors have the names and the order of channels that llama.cpp expects."""
    export_model(written / LOGITD, tmp_path / "ours.gguf", to="gguf", pre="gpt-2")
    theirs = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "ours.gguf").tensors}
    mine = {t.name: t.data for t in gguf.GGUFReader(written / "float32.gguf").tensors}
    assert mine.keys() == theirs.keys()
    for name, data in theirs.items():
        assert np.array_equal(mine[name], data), name
