"""Device, dtype and threads: the values of options are converted to torch's objects, or are
refused."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from logitd.model.device import (
    DeviceError,
    Placement,
    available_processors,
    choose_placement,
    describe,
    unproven,
)

CUDA_DEVICES = torch.cuda.device_count()


def test_card_is_unproven_until_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unproven(describe(torch.device("cpu"))) is None
    assert "benchmarks.gpu" in (unproven("cuda:0 (NVIDIA A100-SXM4-80GB)") or "")
    monkeypatch.setattr("logitd.model.device.CARDS_RUN", ("NVIDIA A100",))
    assert unproven("cuda:0 (NVIDIA A100-SXM4-80GB)") is None
    assert unproven("cuda:0 (NVIDIA L4)") is not None


def test_auto_placement_is_the_best_of_the_machine() -> None:
    placement = choose_placement()
    assert placement.device.type == ("cuda" if CUDA_DEVICES else "cpu")
    assert placement.dtype_name == "float32"
    assert placement.threads == available_processors()


def test_placement_computes_in_float32_by_default() -> None:
    assert choose_placement("cpu", threads=1) == Placement(torch.device("cpu"), torch.float32, 1)
    for name in ("float32", "bfloat16", "float16"):
        placement = choose_placement("cpu", name)
        assert placement.dtype == getattr(torch, name)
        assert placement.dtype_name == name


@pytest.mark.skipif(CUDA_DEVICES == 0, reason="needs a CUDA device")
def test_cuda_device_is_described_with_its_model() -> None:
    assert choose_placement("cuda:0", "bfloat16").dtype == torch.bfloat16
    assert re.fullmatch(r"cuda:0 \(.+\)", describe(torch.device("cuda:0")))


NO_CUDA = pytest.mark.skipif(CUDA_DEVICES > 0, reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "auto.*cpu.*cuda:0") for name in ("", "gpu", "CPU", "cuda:x", "cuda:-1", "cuda:")),
        *((name, "cpu.*cuda") for name in ("mps", "meta", "xpu:0")),
        *(pytest.param(name, "no CUDA", marks=NO_CUDA) for name in ("cuda", "cuda:0")),
    ],
)
def test_placement_refuses_other_devices(name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=f"{re.escape(repr(name))}.*{message}"):
        choose_placement(name)


@pytest.mark.skipif(CUDA_DEVICES == 0, reason="needs a CUDA device")
def test_placement_refuses_a_missing_cuda_device() -> None:
    with pytest.raises(DeviceError, match=f"cuda:99.*{CUDA_DEVICES}"):
        choose_placement("cuda:99")


def test_device_is_described() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    assert describe(torch.device("cpu")) == f"cpu ({capability})"
    assert describe(torch.device("meta")) == "meta"


@pytest.mark.parametrize("more", [1, 1000])
def test_more_threads_than_processors_are_refused(more: int) -> None:
    processors = available_processors()
    assert choose_placement("cpu", threads=processors).threads == processors
    with pytest.raises(DeviceError, match=f"threads.*{processors + more}.*{processors}.*0"):
        choose_placement("cpu", threads=processors + more)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "100001 100000\n"}, 2),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "20000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        ({}, None),
    ],
)
def test_time_limit_of_a_group_limits_processors(
    tmp_path: Path, files: dict[str, str], most: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    unlimited = available_processors([])
    expected = unlimited if most is None else min(unlimited, most)
    assert available_processors([tmp_path / "none", tmp_path]) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_available_processors_are_the_share_of_the_process() -> None:
    """In a container with one processor of a large machine, a thread for each processor of the
    machine would be too many: all would compete for one processor."""

    def confined() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # only this thread
        return available_processors()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(confined).result() == 1
    assert available_processors([]) == len(os.sched_getaffinity(0))
