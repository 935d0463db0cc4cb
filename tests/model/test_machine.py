"""Machine: rates are computed from the measured times, and the fastest run determines the rate."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitd.model import machine
from logitd.model.device import choose_placement
from logitd.model.machine import matrix_rate, processor_name, read_bandwidth, surroundings

CPU = torch.device("cpu")


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make every timed run take half a second, and keep its result."""
    given: list[Any] = []

    def quickest(run: Callable[[], Any], device: torch.device) -> float:
        given.append(run())
        return 0.5

    monkeypatch.setattr(machine, "_quickest", quickest)
    return given


def test_bandwidth_is_all_bytes_over_the_time(half_a_second: list[Any]) -> None:
    assert read_bandwidth(CPU, nbytes=4096) == 8192
    assert half_a_second[0].item() == 1024, "every number was summed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_rate_counts_two_operations_per_product(
    half_a_second: list[Any], dtype: torch.dtype
) -> None:
    assert matrix_rate(CPU, dtype, width=8) == 2 * 8**3 / 0.5
    assert half_a_second[0].shape == (8, 8)
    assert half_a_second[0].dtype == dtype


def test_quickest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run advances the simulated clock."""
    now, pauses = [100.0], [0.5, 0.25, 0.125, 0.375, 0.5, 0.25, 0.25, 0.5]

    def run() -> None:
        now[0] += pauses.pop(0)

    monkeypatch.setattr("logitd.model.machine.time.perf_counter", lambda: now[0])
    assert machine._quickest(run, CPU) == 0.125
    assert pauses == []


def test_measurement_of_a_slow_machine_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENOUGH_SECONDS", 0.0)
    runs: list[None] = []
    machine._quickest(lambda: runs.append(None), CPU)
    assert len(runs) == 1


def test_real_rates_are_finite() -> None:
    assert 0 < read_bandwidth(CPU, nbytes=2**20) < math.inf
    assert 0 < matrix_rate(CPU, torch.float32, width=64) < math.inf


def test_surroundings_use_the_words_of_info() -> None:
    placement = choose_placement("cpu", "bfloat16", 1)
    said = surroundings(placement)
    assert (said.dtype, said.threads, said.torch) == ("bfloat16", 1, torch.__version__)
    assert said.device.startswith("cpu (")
    assert said.processor == processor_name() != ""
