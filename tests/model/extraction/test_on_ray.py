"""Decisions before Ray starts: the number of workers that fit, and refused addresses. Needs no Ray;
real workers are in tests/e2e/test_ray.py."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from logitd.model.extraction.compute import Group, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.on_ray import choose_workers
from logitd.model.extraction.plan import Unit
from logitd.model.extraction.quantities import Logprobs
from logitd.model.extraction.ray_cluster import connected
from logitd.model.inference.options import ComputeOptions
from tests.model.extraction.conftest import TORCH

SMALL, LARGE, GPUS = {"CPU": 8.0}, {"CPU": 64.0}, {"CPU": 32.0, "GPU": 4.0}
Nodes = list[Mapping[str, float]]


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "count", "expected"),
    [
        ([SMALL], "auto", 0, None, (1, "cpu", 8, 1)),
        ([SMALL, SMALL], "cpu", 0, None, (2, "cpu", 8, 2)),
        ([SMALL, LARGE], "cpu", 0, None, (9, "cpu", 8, 9)),
        ([SMALL], "cpu", 3, None, (2, "cpu", 3, 2)),
        ([SMALL], "cpu", 0, 4, (4, "cpu", 2, 4)),
        ([SMALL, SMALL], "cpu", 0, 3, (3, "cpu", 4, 4)),
        ([SMALL], "cpu", 8, 3, (3, "cpu", 8, 1)),
        ([GPUS, SMALL], "auto", 0, None, (4, "cuda", 8, 4)),
        ([GPUS, SMALL], "cpu", 0, None, (5, "cpu", 8, 5)),
        ([GPUS, GPUS], "cuda", 0, 4, (4, "cuda", 16, 4)),
        ([GPUS], "cuda", 16, None, (2, "cuda", 16, 2)),
    ],
)
def test_workers_fill_the_machines(
    nodes: Nodes, device: str, threads: int, count: int | None, expected: tuple[int, str, int, int]
) -> None:
    asked = ComputeOptions(device=device, threads=threads, kernels="torch")
    chosen, fit, placed = choose_workers(nodes, asked, count)
    assert (chosen, placed.device, placed.threads, fit) == expected
    assert replace(placed, device=device, threads=threads) == asked


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "message"),
    [
        ([SMALL], "cuda", 0, "GPU"),
        ([{"CPU": 0.0}], "cpu", 0, "no machine"),
        ([], "auto", 0, "no machine"),
        ([SMALL], "cpu", 9, "--threads 9.*8"),
        ([GPUS], "cuda:1", 0, "--device is cuda:1"),
    ],
)
def test_cluster_without_room_is_refused(
    nodes: Nodes, device: str, threads: int, message: str
) -> None:
    with pytest.raises(ExtractionError, match=message):
        choose_workers(nodes, ComputeOptions(device=device, threads=threads), None)


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head", "head:port", "127.0.0.1:{closed}", "127.0.0.1:99999"]
)
def test_unreachable_address_is_refused(address: str) -> None:
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening
        named = address.format(closed=unused.getsockname()[1])
        with (
            pytest.raises(ExtractionError, match=f"--ray is {named}.*host:port.*local"),
            connected(named, print),
        ):
            pass


def test_one_process_plans_one_shard_at_a_time(checkpoint_path: Path) -> None:
    planned: list[int] = []

    def groups() -> Iterator[Group]:
        for number in range(3):
            planned.append(number)
            yield [Unit(number, "a", 0, tuple(range(5 + number)), 0)]

    computer = open_computer(checkpoint_path, Logprobs(), TORCH, lambda line: None)
    counted: list[int] = []
    with contextlib.closing(computer):
        for number, (group, content) in enumerate(computer.shards(groups(), counted.append)):
            assert planned == list(range(number + 1))
            assert (group[0].document, content) == (number, computer.shard(group))
    assert counted == [5, 6, 7]
