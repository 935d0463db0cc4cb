"""Training processes that are really killed: whatever the moment, a resumed run ends in the same
bits, and what is on the disk in between can be served.

Two kinds of moments: before each single change of the run directory (files opened for writing,
renames, links, removals), counted by an audit hook in the process that is killed; and while a file
is being written, found by watching the directory.
"""

import os
import random
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

from model.checkpoint.checkpoint import load_checkpoint, read_checkpoint
from model.training.config import TrainingConfig, TrainingError
from model.training.trainer import train
from tests.model.conftest import Configure
from tests.model.training.test_trainer import _losses, _state

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod")


def _train_and_die(config: TrainingConfig, change: int, count: Path | None, draws: bool) -> None:
    """In a process of its own: train, and send SIGKILL to itself before the change of that
    number. `count` is a file for how many there were."""
    if not draws:
        sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]
    seen = 0
    root = str(config.out)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES:
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        inside = str(arguments[0]).startswith(root) or arguments[-1] != -1  # by its folder
        if not inside or (event == "open" and not str(arguments[0]).startswith(root)):
            return
        seen += 1
        if seen == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train(config)
    if count is not None:
        count.write_text(str(seen))


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
    """What can be served is whole."""
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
def kill_at(configure: Configure, tmp_path: Path, processes: ForkServerContext) -> tuple[int, Kill]:
    """How many changes a run makes, and a way to kill one before any of them."""
    straight = tmp_path / "straight"

    def start(out: Path, change: int, count: Path | None) -> int | None:
        draws = sys.modules.get("matplotlib.figure", True) is not None
        arguments = (_with_saves(configure, out), change, count, draws)
        process = processes.Process(target=_train_and_die, args=arguments)
        process.start()
        process.join(60)
        return process.exitcode

    def kill(change: int) -> tuple[Path, Path]:
        killed = tmp_path / f"killed-{change}"
        assert start(killed, change, None) == -signal.SIGKILL
        return killed, straight

    assert start(straight, 0, tmp_path / "count") == 0
    return int((tmp_path / "count").read_text()), kill


def _check_kill(change: int, kill: Kill) -> bool:
    """False: it was before the run began, which is told."""
    killed, straight = kill(change)
    if not (killed / "run.json").exists():
        with pytest.raises(TrainingError, match=r"has no run\.json"):
            train(TrainingConfig(out=killed, resume=True))
        return False
    _resume_and_compare(killed, straight)
    shutil.rmtree(killed)
    return True


def test_a_run_killed_before_some_change_of_its_folder_ends_in_the_same_bits(
    no_picture: None, kill_at: tuple[int, Kill]
) -> None:
    changes, kill = kill_at
    assert changes > 60
    for change in (changes // 2, changes - 9):
        assert _check_kill(change, kill)


@pytest.mark.slow
def test_a_run_killed_before_any_change_of_its_folder_ends_in_the_same_bits(
    no_picture: None, kill_at: tuple[int, Kill]
) -> None:
    """Every single one."""
    changes, kill = kill_at
    begun = sum(_check_kill(change, kill) for change in range(1, changes + 1))
    assert begun > changes * 0.8


def _kill_while_it_writes(
    processes: ForkServerContext, config: TrainingConfig, aside: str, delay: float
) -> bool:
    """Whether it was really in the middle: the file or folder aside is still there."""
    assert config.out is not None
    process = processes.Process(target=_train_and_die, args=(config, 0, None, False))
    process.start()
    while not list(config.out.glob(aside)) or not (config.out / "latest").exists():
        if not process.is_alive():
            return False
    time.sleep(delay)
    process.kill()
    process.join(60)
    return bool(list(config.out.glob(aside)))


@pytest.mark.slow
def test_a_run_killed_while_it_writes_ends_in_the_same_bits(
    configure: Configure, tmp_path: Path, processes: ForkServerContext, no_picture: None
) -> None:
    """A model of 2 MB, so that writing takes its time."""
    draw = random.Random(0)
    wide = {"d_model": 128, "d_ff": 512, "steps": 8, "eval_every": 100, "sample_every": 100}
    straight = _with_saves(configure, tmp_path / "straight", **wide)
    train(straight)
    assert straight.out is not None
    hits = 0
    for number in range(14):
        config = _with_saves(configure, tmp_path / f"killed-{number}", **wide)
        assert config.out is not None
        aside = ("state/.state.pt.*", ".step-*")[number % 2]
        hits += _kill_while_it_writes(processes, config, aside, draw.uniform(0, 0.004))
        _resume_and_compare(config.out, straight.out)
    assert hits >= 4, "in the middle"
