"""`logitd extract --ray` with real workers: it writes the same files as a single process, even if
workers die.

Ray runs on this machine. An environment variable marks its processes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.conftest import story
from tests.model.extraction.conftest import contents

pytest.importorskip("ray", reason="the extra `ray`, which `make test-slow` installs")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MARK = "MARK_OF_A_TEST"
FLAGS = (
    *("--dtype", "float32", "--kernels", "torch", "--threads", "1"),
    *("--top-k", "2", "--shard-tokens", "1000"),
)
RAY = ("--ray", "local", "--ray-workers", "2")


class Started:
    """Starts extractions of one text, each into its own folder."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder
        self._checkpoint = checkpoint
        (folder / "text.txt").write_text(story(2500))

    def start(
        self, out: str, *flags: str, checkpoint: Path | None = None
    ) -> "subprocess.Popen[str]":
        words = ["extract", str(checkpoint or self._checkpoint), "--data", "text.txt", "--out", out]
        return subprocess.Popen(
            [sys.executable, "-m", "logitd", *words, *FLAGS, *flags],
            env={
                "PYTHONPATH": str(ROOT),
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.folder),
                MARK: str(self.folder),
            },
            cwd=self.folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish(self, out: str) -> None:
        """Run without Ray, to the end."""
        process = self.start(out)
        printed, messages = process.communicate(timeout=300)
        assert process.returncode == 0, messages
        assert printed.startswith(f"{out}: ")

    def shards(self, out: str) -> int:
        return len(list((self.folder / out).glob("shard-*")))

    def processes(self) -> list[int]:
        """Running processes of these extractions, including Ray's."""
        mark = f"{MARK}={self.folder}".encode()
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if mark in _read(path).split(b"\0")
        ]

    def workers(self) -> list[int]:
        """Processes that hold the model."""
        return [
            process
            for process in self.processes()
            if b"ray::ShardWorker" in _read(Path(f"/proc/{process}/cmdline"))
        ]

    def kill_computing_worker(self, process: "subprocess.Popen[str]") -> None:
        """Kill a worker in the middle of a shard."""
        while process.poll() is None:
            for worker in self.workers():
                if b"ShardWorker.shard" in _read(Path(f"/proc/{worker}/cmdline")):
                    os.kill(worker, signal.SIGKILL)
                    while worker in self.workers():  # a second kill of it would be lost
                        time.sleep(0.01)
                    return
            time.sleep(0.02)
        raise AssertionError(process.communicate())

    def wait_for_shards(self, out: str, count: int, process: "subprocess.Popen[str]") -> None:
        while self.shards(out) < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    def stop_until_its_shard_is_next(
        self, worker: int, out: str, process: "subprocess.Popen[str]"
    ) -> None:
        """Pause a worker, and wait until the other worker has nothing left to write."""
        os.kill(worker, signal.SIGSTOP)
        written, since = -1, time.monotonic()
        while time.monotonic() < since + 2:
            assert process.poll() is None, "the other worker had everything that was left"
            if written != (count := self.shards(out)):
                written, since = count, time.monotonic()
            time.sleep(0.02)

    def wait_for_the_end(self, *, of_workers: bool = False) -> None:
        """Wait for the end of all processes, or only of the processes that hold the model."""
        deadline = time.monotonic() + 60
        while left := self.workers() if of_workers else self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


@pytest.fixture
def started(tmp_path: Path, checkpoint_path: Path) -> Iterator[Started]:
    extraction = Started(tmp_path, checkpoint_path)
    yield extraction
    for process in extraction.processes():
        os.kill(process, signal.SIGKILL)


def test_killed_worker_changes_no_file(started: Started) -> None:
    started.finish("straight")
    process = started.start("killed", *RAY)
    started.wait_for_shards("killed", 4, process)
    workers = started.workers()
    assert len(workers) == 2
    # The death of an idle worker may stay unnoticed until the end.
    started.stop_until_its_shard_is_next(workers[0], "killed", process)
    os.kill(workers[0], signal.SIGKILL)
    printed, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    assert printed.startswith("killed: ")
    assert printed.count("\n") == 1, "Ray prints nothing next to the result"
    assert "died and was restarted" in messages
    lines = messages.splitlines()
    assert all(line.startswith("logitd extract: ") for line in lines), messages
    assert contents(started.folder / "killed") == contents(started.folder / "straight")
    assert started.shards("straight") > 20
    started.wait_for_the_end()
    assert not (started.folder / ".ray").exists(), "Ray writes nothing into the home"


def test_shard_over_which_three_workers_die_ends_the_command(started: Started) -> None:
    process = started.start("out", "--ray", "local", "--ray-workers", "1")
    started.wait_for_shards("out", 1, process)
    for _ in range(3):
        started.kill_computing_worker(process)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 1
    pattern = r"3 workers died .* at token \d+ of text\.txt .*--shard-tokens"
    assert re.search(pattern, messages), messages
    started.wait_for_the_end()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_ended_command_leaves_no_worker_and_continues_without_ray(
    started: Started, ending: signal.Signals
) -> None:
    """After SIGKILL, two of Ray's processes stay for a minute, so the test waits only for
    workers."""
    process = started.start("stopped", *RAY)
    started.wait_for_shards("stopped", 3, process)
    os.kill(process.pid, ending)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL), messages
    assert "Traceback" not in messages
    started.wait_for_the_end(of_workers=ending == signal.SIGKILL)
    before = started.shards("stopped")
    started.finish("stopped")
    started.finish("straight")
    assert before < started.shards("straight")
    assert contents(started.folder / "stopped") == contents(started.folder / "straight")


def test_worker_without_the_checkpoint_is_explained(
    started: Started, checkpoint_path: Path, tmp_path: Path
) -> None:
    """The checkpoint is removed after the command has read it and before a worker can."""
    copied = tmp_path / "copied"
    shutil.copytree(checkpoint_path, copied)
    process = started.start("out", "--ray", "local", "--ray-workers", "1", checkpoint=copied)
    assert process.stderr is not None
    while "workers: 1 on cpu" not in (line := process.stderr.readline()):
        assert line, "the command ended early"
    shutil.rmtree(copied)
    printed, messages = process.communicate(timeout=120)
    assert (process.returncode, printed) == (1, "")
    assert messages.startswith("logitd extract: on ")
    assert f"{copied} does not exist" in messages
    assert messages.count("\n") == 1, messages
    assert not (started.folder / "out").exists()


def test_more_workers_than_fit_are_refused(started: Started) -> None:
    process = started.start("out", "--ray", "local", "--ray-workers", "1000")
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "--ray-workers is 1000, but only" in messages
    started.wait_for_the_end()
