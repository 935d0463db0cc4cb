"""Training processes that are killed at any moment: a resumed run ends with the same bits, and the
files on disk can always be served.

Processes are killed at two kinds of moments: before a change to the run directory (a file opened
for writing, a rename, a link, a removal), counted by an audit hook in the process that is killed;
and while a file is being written, found by watching the directory.
"""

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.trainer import train
from tests.conftest import MATPLOTLIB
from tests.model.conftest import Configure
from tests.model.training.test_trainer import _losses, _state

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod")


def _kind(event: str, path: str) -> str:
    """The event and path of a change, without the step or the unique part of a temporary name."""
    return f"{event} {re.sub(r'[0-9]+(?:[.][^/.]+)?|(?<=state.pt)[.].*', '*', path)}"


def _train_and_die(config: TrainingConfig, change: int, record: Path | None) -> None:
    """Train in a child process, which sends SIGKILL to itself before change number `change`,
    counted from 1. The kind of each change is appended to the file `record`."""
    sys.modules[MATPLOTLIB] = None  # type: ignore[assignment]
    seen: list[str] = []
    root = str(config.out)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES:
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        inside = str(arguments[0]).startswith(root) or arguments[-1] != -1  # by its folder
        if not inside or (event == "open" and not str(arguments[0]).startswith(root)):
            return
        seen.append(_kind(event, str(arguments[0]).removeprefix(root)))
        if len(seen) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train(config)
    if record is not None:
        record.write_text("\n".join(seen))


def _with_saves(configure: Configure, out: Path, **given: Any) -> TrainingConfig:
    """A run that saves, samples and prunes within a second."""
    values: dict[str, Any] = {
        "out": out,
        "dropout": 0.1,
        "steps": 6,
        "checkpoint_every": 2,
        "eval_every": 3,
        "sample_every": 4,
        "sample_tokens": 2,
        "keep": 1,
        "log_every": 1,
    }
    return configure(**{**values, **given})


def _contents(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def _check_links(run: Path) -> None:
    """Check that the checkpoints linked as `latest` and `best` can be loaded."""
    for link in (run / "latest", run / "best"):
        if link.exists():
            load_checkpoint(link, device=torch.device("cpu"), dtype=torch.float32)
        else:
            assert not link.is_symlink(), "a link leads nowhere"


def _resume_and_compare(killed: Path, straight: Path) -> None:
    _check_links(killed)
    train(TrainingConfig(out=killed, resume=True))
    _check_links(killed)
    assert _state(killed) == _state(straight)
    assert _losses(killed) == _losses(straight)
    assert (killed / "samples.txt").read_bytes() == (straight / "samples.txt").read_bytes()
    assert _contents(killed) == _contents(straight), "nothing is left over"
    weights = [read_checkpoint(run / "best").weights_sha256 for run in (killed, straight)]
    assert weights[0] == weights[1]


Kill = Callable[[int], tuple[Path, Path]]


@pytest.fixture
def kill_at(
    configure: Configure, tmp_path: Path, processes: ForkServerContext
) -> tuple[list[str], Kill]:
    """The kinds of the changes that a run makes, and a function that starts such a run and kills it
    before a given change."""
    straight = tmp_path / "straight"

    def start(out: Path, change: int, record: Path | None) -> int | None:
        arguments = (_with_saves(configure, out), change, record)
        process = processes.Process(target=_train_and_die, args=arguments)
        process.start()
        process.join(60)
        return process.exitcode

    def kill(change: int) -> tuple[Path, Path]:
        killed = tmp_path / f"killed-{change}"
        assert start(killed, change, None) == -signal.SIGKILL
        return killed, straight

    assert start(straight, 0, tmp_path / "changes") == 0
    return (tmp_path / "changes").read_text().splitlines(), kill


def _check_kill(change: int, kill: Kill) -> bool:
    """Returns False if the kill was before the run began."""
    killed, straight = kill(change)
    if not (killed / "run.json").exists():
        with pytest.raises(TrainingError, match=r"has no run\.json"):
            train(TrainingConfig(out=killed, resume=True))
        return False
    _resume_and_compare(killed, straight)
    shutil.rmtree(killed)
    return True


def test_run_killed_before_a_change_of_its_folder_ends_in_the_same_bits(
    kill_at: tuple[list[str], Kill],
) -> None:
    changes, kill = kill_at
    assert len(changes) > 60
    assert _check_kill(len(changes) // 2, kill)


@pytest.mark.slow
def test_run_killed_before_each_kind_of_change_ends_in_the_same_bits(
    kill_at: tuple[list[str], Kill],
) -> None:
    """One run is killed before the first change of one kind, another before the last change of the
    next kind, and so on. So some kills come when the run is still empty, and others when there are
    checkpoints to replace and remove."""
    kinds, kill = kill_at
    first = {kind: number for number, kind in reversed(list(enumerate(kinds, start=1)))}
    last = {kind: number for number, kind in enumerate(kinds, start=1)}
    chosen = sorted({(first, last)[turn % 2][kind] for turn, kind in enumerate(first)})
    assert len(first) > 30
    begun = sum(_check_kill(change, kill) for change in chosen)
    assert begun > len(chosen) / 2


def _kill_while_it_writes(
    processes: ForkServerContext, config: TrainingConfig, aside: str, delay: float
) -> bool:
    """Returns True if the kill came in the middle of a write: the temporary file or folder still
    exists."""
    assert config.out is not None
    process = processes.Process(target=_train_and_die, args=(config, 0, None))
    process.start()
    while not list(config.out.glob(aside)) or not (config.out / "latest").exists():
        if not process.is_alive():
            return False
    time.sleep(delay)
    process.kill()
    process.join(60)
    return bool(list(config.out.glob(aside)))


@pytest.mark.slow
def test_run_killed_while_it_writes_ends_in_the_same_bits(
    configure: Configure, tmp_path: Path, processes: ForkServerContext
) -> None:
    """The weights take 2 MB, so that writing them takes a while."""
    draw = random.Random(0)
    wide = {"d_model": 128, "d_ff": 512, "steps": 8, "eval_every": 100, "sample_every": 100}
    straight = _with_saves(configure, tmp_path / "straight", **wide)
    train(straight)
    assert straight.out is not None
    hits = 0
    for number in range(8):
        config = _with_saves(configure, tmp_path / f"killed-{number}", **wide)
        assert config.out is not None
        aside = ("state/.state.pt.*", ".step-*")[number % 2]
        hits += _kill_while_it_writes(processes, config, aside, draw.uniform(0, 0.004))
        _resume_and_compare(config.out, straight.out)
    assert hits >= 2, "in the middle"
