"""Killed extractions: repeating the command completes the files left by a kill at any moment.

An audit hook copies the folder before each change to it (a file opened for writing, a rename, a
removal). Each copy is the state that a kill at that moment leaves; one process is really killed.
"""

import os
import shutil
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from logitd.model.extraction.run import ExtractionRequest, extract
from tests.model.extraction.conftest import TORCH, contents

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir")
LOGPROBS = ExtractionRequest(top_k=1, shard_tokens=200)
REQUESTS = [
    pytest.param(LOGPROBS, id="logprobs"),
    pytest.param(
        ExtractionRequest(stages=("embedding", "final_norm"), shard_tokens=200), id="stages"
    ),
    pytest.param(ExtractionRequest(lens=True, top_k=2, shard_tokens=200), id="lens"),
]


def _extract(
    checkpoint: Path,
    texts: Path,
    out: Path,
    request: ExtractionRequest,
    copies: Path,
    last: int | None = None,
) -> None:
    """Run in a new process: extract, and copy `out` to `copies` before each change. The process
    kills itself with SIGKILL before change number `last`, counted from 0."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or not str(arguments[0]).startswith(str(out)):
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
        if out.exists():
            shutil.copytree(out, copies / f"{seen:03d}")
        seen += 1

    sys.addaudithook(hook)
    extract(checkpoint, [str(texts)], out, request, options=TORCH)


def _run(processes: ForkServerContext, *arguments: Any) -> int | None:
    process = processes.Process(target=_extract, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS)
def test_every_moment_continues_to_the_same_files(
    request_: ExtractionRequest,
    checkpoint_path: Path,
    texts: Path,
    tmp_path: Path,
    processes: ForkServerContext,
) -> None:
    straight, copies = tmp_path / "straight", tmp_path / "copies"
    assert _run(processes, checkpoint_path, texts, straight, request_, copies) == 0
    shards = []
    for left in sorted(copies.iterdir()):
        shards.append(len(list(left.glob("shard-*"))))
        extract(checkpoint_path, [str(texts)], left, request_, options=TORCH)
        assert contents(left) == contents(straight), left.name
    assert shards == sorted(shards)
    assert (shards[0], shards[-1]) == (0, len(list(straight.glob("shard-*"))))


def test_killed_process_leaves_a_folder_that_continues(
    checkpoint_path: Path, texts: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    out, straight = tmp_path / "out", tmp_path / "straight"
    ended = _run(processes, checkpoint_path, texts, out, LOGPROBS, tmp_path / "copies", 9)
    assert ended == -signal.SIGKILL
    assert len(list(out.glob("shard-*"))) == 1
    for folder in (out, straight):
        extract(checkpoint_path, [str(texts)], folder, LOGPROBS, options=TORCH)
    assert contents(out) == contents(straight)
