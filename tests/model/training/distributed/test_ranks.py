"""The rank of a process among several; whole runs are tested in tests/e2e/test_torchrun.py."""

import os
import socket
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from logitd.model.device import DeviceError, available_processors
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.distributed import ranks as ranks_module
from logitd.model.training.distributed.ranks import Ranks, process_group, read_ranks

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_ranks_are_read_from_torchruns_variables() -> None:
    assert read_ranks(TORCHRUN) == Ranks(rank=5, size=8, local_rank=1, local_size=4)
    assert not read_ranks(TORCHRUN).is_main
    assert read_ranks({}) == read_ranks({**TORCHRUN, "WORLD_SIZE": "1"}) == Ranks()
    one_machine = {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    assert read_ranks(one_machine).local_size == 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
        ({"RANK": "8"}, "RANK 8 of WORLD_SIZE 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4 of LOCAL_WORLD_SIZE 4"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set: start several processes with torchrun"),
    ],
)
def test_incomplete_environment_is_refused(changes: dict[str, str | None], sentence: str) -> None:
    environment = {k: v for k, v in (TORCHRUN | changes).items() if v is not None}
    with pytest.raises(TrainingError, match=sentence):
        read_ranks(environment)


def test_processes_share_the_processors_of_their_machine() -> None:
    processors = available_processors()
    assert Ranks().threads(0) == processors
    assert Ranks(size=2, local_size=2).threads(0) == max(1, processors // 2)
    assert Ranks(size=2, local_size=1).threads(0) == processors, "two machines"
    assert Ranks(size=2, local_size=10_000).threads(0) == 1
    assert Ranks(size=2, local_size=2).threads(3) == 3


def test_each_process_has_its_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Ranks(rank=3, size=4, local_rank=1, local_size=2)
    assert second.device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="'cuda:0' is a single device, but there are 4 processes"):
        second.device("cuda:0")
    monkeypatch.setattr(ranks_module, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert second.device("auto") == second.device("cuda") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match=r"3 processes .* as many CUDA devices; it has 2"):
        Ranks(size=3, local_size=3).device("cuda")


def test_one_process_needs_no_rendezvous() -> None:
    with process_group({}) as ranks:
        assert not dist.is_initialized()
        gradient = torch.ones(3)
        ranks.all_reduce_sum([gradient])
        ranks.barrier()
        assert gradient.tolist() == [1, 1, 1]
        assert ranks.all_reduce_cpu(torch.ones(2)).tolist() == [1, 1]
        assert ranks.all_reduce_max([2.0, -1.0]) == [2, -1]


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables of one process on this machine. torch reads them too."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return dict(os.environ)


def _start(context: ForkServerContext, target: Any, size: int, folder: Path) -> None:
    """Run `target(rank, port, folder)` in `size` processes, and wait for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    started = [context.Process(target=target, args=(rank, port, folder)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * size


def _meet(rank: int, port: int, results: Path) -> None:
    """Compute sums and maxima across two processes; then process 1 exits while the other waits for
    it."""
    environment = _environment(rank, 2, port)
    ranks_module.BUCKET = 4  # several messages
    found: dict[str, Any] = {}
    try:
        with process_group(environment) as ranks:
            gradients = [torch.full((2, 2), 1.0 + rank), torch.arange(5.0), torch.tensor(1.0)]
            ranks.all_reduce_sum(gradients)
            found["gradients"] = gradients
            found["total"] = ranks.all_reduce_cpu(torch.tensor([rank, 10], dtype=torch.float64))
            found["highest"] = ranks.all_reduce_max([float(rank), -float(rank)])
            torch.save(found, results / f"{rank}.pt")
            ranks.barrier()
            if rank == 1:
                os._exit(0)
            ranks.barrier()
    except TrainingError as error:
        (results / "sentence").write_text(str(error))


def test_processes_add_up_and_notice_one_that_leaves(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    _start(processes, _meet, 2, tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        square, line, scalar = found["gradients"]
        assert square.tolist() == [[3, 3], [3, 3]]
        assert line.tolist() == [0, 2, 4, 6, 8]
        assert float(scalar) == 2
        assert found["total"].tolist() == [1, 20]
        assert found["highest"] == [1, 0]
    sentence = (tmp_path / "sentence").read_text()
    assert sentence.startswith("process 0 of 2 stops: another process of the run has ended")
