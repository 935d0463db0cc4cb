"""What is decided before Ray computes anything: how many workers of how many threads, which
addresses are refused, and which shards are held for workers. No Ray is needed here; real workers
are in tests/e2e/test_ray.py."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitd.model.extraction.compute import Group, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.on_ray import Node, Workers, choose_workers, joined
from logitd.model.extraction.plan import Unit
from logitd.model.extraction.ray_worker import GREETING, Feed
from logitd.model.extraction.wanted import Logprobs
from tests.model.extraction.conftest import TORCH

SMALL, LARGE, GPUS = Node(8, 0), Node(64, 0), Node(32, 4)


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "count", "expected"),
    [
        ([SMALL], "auto", 0, None, Workers(1, "cpu", 8, 1)),
        ([SMALL, SMALL], "cpu", 0, None, Workers(2, "cpu", 8, 2)),
        ([SMALL, LARGE], "cpu", 0, None, Workers(9, "cpu", 8, 9)),
        ([SMALL], "cpu", 3, None, Workers(2, "cpu", 3, 2)),
        ([SMALL], "cpu", 0, 4, Workers(4, "cpu", 2, 4)),
        ([SMALL, SMALL], "cpu", 0, 3, Workers(3, "cpu", 4, 4)),
        ([SMALL], "cpu", 8, 3, Workers(3, "cpu", 8, 1)),
        ([GPUS, SMALL], "auto", 0, None, Workers(4, "cuda", 8, 4)),
        ([GPUS, SMALL], "cpu", 0, None, Workers(5, "cpu", 8, 5)),
        ([GPUS, GPUS], "cuda", 0, 4, Workers(4, "cuda", 16, 4)),
        ([GPUS], "cuda", 16, None, Workers(2, "cuda", 16, 2)),
    ],
)
def test_workers_fill_the_machines(
    nodes: list[Node], device: str, threads: int, count: int | None, expected: Workers
) -> None:
    assert choose_workers(nodes, device, threads, count) == expected


@pytest.mark.parametrize(
    ("nodes", "device", "threads", "message"),
    [
        ([SMALL], "cuda", 0, "no machine of the cluster has a GPU .* 8 processors and 0 GPUs"),
        ([Node(0, 0)], "cpu", 0, "no machine of the cluster has processors"),
        ([], "auto", 0, "no machine .* Ray has 0 machines"),
        ([SMALL], "cpu", 9, "of 9 threads fits no machine .* Give --threads 8 or fewer"),
        ([GPUS], "cuda:1", 0, "--device cuda:1 names one device"),
    ],
)
def test_a_cluster_that_holds_no_worker_is_refused(
    nodes: list[Node], device: str, threads: int, message: str
) -> None:
    with pytest.raises(ExtractionError, match=message):
        choose_workers(nodes, device, threads, None)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "does not work through Ray's client. .* --ray auto"),
        ("head", "is not an address: give host:port"),
        ("head:port", "is not an address"),
        ("127.0.0.1:{closed}", "nothing answers there .*ray start --head"),
        ("127.0.0.1:99999", "nothing answers there"),
    ],
)
def test_addresses_that_cannot_be_joined_are_refused(address: str, message: str) -> None:
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # held, and not listened at
        named = address.format(closed=unused.getsockname()[1])
        with pytest.raises(ExtractionError, match=message), joined(named):
            pass


def test_shards_are_held_until_their_answer_has_arrived() -> None:
    feed, group = Feed(), [Unit(0, "a", 0, (1, 2, 3), 0)]
    first = GREETING + 1
    assert (feed.has(GREETING), feed.has(first)) == (True, None)
    feed.give(first, group)
    assert [feed.group(first) for _ in range(2)] == [(group, 0), (group, 1)]
    feed.forget(first)
    assert feed.has(first), "Ray may count the tickets again from the first on"
    assert feed.has(first + 1) is None
    feed.end()
    assert feed.has(first + 1) is False
    with pytest.raises(KeyError):
        feed.group(first)


def test_the_first_worker_says_how_all_compute() -> None:
    feed = Feed()
    assert feed.agree({"threads": 1}) == feed.agree({"threads": 2}) == {"threads": 1}


def test_in_one_process_a_shard_is_planned_when_the_last_is_taken(checkpoint_path: Path) -> None:
    """Memory holds one: nothing is planned ahead."""
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
