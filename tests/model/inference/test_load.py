"""Loading: every option reaches the code that it configures, and the shape is checked before the
weights are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.device import DeviceError
from logitd.model.inference.kernels.select import KernelError, choose_dtype
from logitd.model.inference.load import LoadedModel, load_model
from logitd.model.inference.options import ComputeOptions
from logitd.model.memory import Available
from tests.model.factories import random_ids, save_tiny_checkpoint, tiny_config, tiny_gpt


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the native decoder covers."""
    gpt = tiny_gpt(tiny_config(head_dim=16))
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "covered", gpt=gpt).path


def opened(path: Path, **options: Any) -> LoadedModel:
    usual: dict[str, Any] = {"device": "cpu", "threads": 1}
    compute = ComputeOptions(**(usual | options))
    return load_model(path, compute, log=lambda line: None)


def test_dtype_and_threads_follow_decoder_and_options(covered: Path) -> None:
    threads = torch.get_num_threads()
    model = opened(covered, threads=threads + 1)
    native = model.decode_path.name.startswith("native")
    config, device = model.checkpoint.config, torch.device("cpu")
    assert model.dtype == choose_dtype(config, device)
    assert native or model.dtype.name == "float32"
    assert model.placement.dtype_name == model.dtype.name
    assert model.gpt.token_embedding.weight.dtype == model.placement.dtype
    assert model.placement.threads == threads + 1
    assert torch.get_num_threads() == threads, "only the thread that computes sets them"


def test_plain_torch_computes_in_float32_by_default(covered: Path) -> None:
    model = opened(covered, kernels="torch")
    assert (model.dtype.name, model.decode_path.name) == ("float32", "torch")
    model = opened(covered, kernels="torch", dtype="float16")
    assert (model.dtype.name, model.dtype.why) == ("float16", "as requested")
    ids = random_ids(1, 4)
    assert torch.isfinite(model.gpt(ids).logits).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "abacus"}, DeviceError, "abacus"),
        ({"kernels": "native", "dtype": "float16"}, KernelError, "native.*float16"),
        ({"kernels": "torch", "quantize": "int8"}, KernelError, "quantize.*int8.*kernels"),
    ],
)
def test_load_refuses_impossible_options(
    covered: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        opened(covered, **options)


def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        opened(tmp_path / "nowhere")


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    covered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(device: torch.device) -> Available:
        return Available(str(device), 2**20, 2**10)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("logitd.model.inference.load.available", little)
    monkeypatch.setattr("logitd.model.inference.load.load_weights", never)
    with pytest.raises(DeviceError, match=r"weights.*cpu.*1\.0 KiB"):
        opened(covered)
