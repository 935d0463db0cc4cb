"""Extractions that are really killed: whatever the moment, going on ends in the same files.

The moments are before each single change of the folder (files opened for writing, renames,
removals), counted by an audit hook in the process that is killed.
"""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from logitd.model.extraction.index import INDEX
from logitd.model.extraction.run import ExtractionRequest, extract
from tests.model.extraction.conftest import TORCH, contents

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir")
KINDS = [
    pytest.param(ExtractionRequest(top_k=1, shard_tokens=130), id="logprobs"),
    pytest.param(
        ExtractionRequest(stages=("embedding", "final_norm"), shard_tokens=130), id="stages"
    ),
    pytest.param(ExtractionRequest(lens=True, top_k=2, shard_tokens=130), id="lens"),
]


def _extract_and_die(
    checkpoint: Path, texts: Path, out: Path, asked: ExtractionRequest, change: int, count: Path
) -> None:
    """In a process of its own: extract, and send SIGKILL to itself before the change of that number
    to the folder. `count` is a file for how many there were."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or not str(arguments[0]).startswith(str(out)):
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        seen += 1
        if seen == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    extract(checkpoint, [str(texts)], out, asked, options=TORCH)
    count.write_text(str(seen))


Kill = Callable[[ExtractionRequest, int], Path]


@pytest.fixture
def kill(checkpoint_path: Path, texts: Path, tmp_path: Path, processes: ForkServerContext) -> Kill:
    """Extract in a process that is killed before a change (0: none); the folder."""

    def start(asked: ExtractionRequest, change: int) -> Path:
        out = tmp_path / f"out-{change}"
        arguments = (checkpoint_path, texts, out, asked, change, tmp_path / "count")
        process = processes.Process(target=_extract_and_die, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if change else 0)
        return out

    return start


def _check(
    kill: Kill, asked: ExtractionRequest, change: int, straight: Path, texts: Path, model: Path
) -> int:
    """Kill, go on, compare; how many shards were there."""
    out = kill(asked, change)
    shards = len(list(out.glob("shard-*"))) if (out / INDEX).exists() else 0
    extract(model, [str(texts)], out, asked, options=TORCH)
    assert contents(out) == contents(straight)
    return shards


@pytest.mark.slow
@pytest.mark.parametrize("asked", KINDS)
def test_one_killed_before_any_change_goes_on_to_the_same_files(
    kill: Kill, asked: ExtractionRequest, tmp_path: Path, texts: Path, checkpoint_path: Path
) -> None:
    """Every second one, by turns the odd and the even ones of a kind of values."""
    straight = kill(asked, 0)
    changes = int((tmp_path / "count").read_text())
    there = [
        _check(kill, asked, change, straight, texts, checkpoint_path)
        for change in (*range(1 + (asked.top_k or 0) % 2, changes, 2), changes)
    ]
    assert there == sorted(there)
    assert there[0] == 0
    assert there[-1] == len(list(straight.glob("shard-*")))
