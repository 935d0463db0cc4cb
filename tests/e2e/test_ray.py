"""`logitd extract --ray` with real workers: the files of one process, whoever dies on the way.

Ray runs on this machine, in processes that a variable of their environment tells from others.
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
    """Extractions of a text into folders beside it."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder
        self._checkpoint = checkpoint
        (folder / "text.txt").write_text(story(2500))

    def command(self, out: str, *flags: str, checkpoint: Path | None = None) -> list[str]:
        words = ["extract", str(checkpoint or self._checkpoint), "--data", "text.txt"]
        return [
            sys.executable,
            "-m",
            "logitd",
            *words,
            "--out",
            out,
            *FLAGS,
            *flags,
        ]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            MARK: str(self.folder),
        }

    def start(
        self, out: str, *flags: str, checkpoint: Path | None = None
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(out, *flags, checkpoint=checkpoint),
            cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish(self, out: str, *flags: str) -> str:
        """What it printed on stderr."""
        process = self.start(out, *flags)
        printed, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert printed.startswith(f"{out}: ")
        return said

    def processes(self) -> list[int]:
        """All that were started here and run, Ray's among them."""
        mark = f"{MARK}={self.folder}".encode()
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if mark in _read(path).split(b"\0")
        ]

    def workers(self) -> list[int]:
        """The processes that hold the model."""
        return [
            process
            for process in self.processes()
            if b"ray::ShardWorker" in _read(Path(f"/proc/{process}/cmdline"))
        ]

    def kill_one_that_computes(self, process: "subprocess.Popen[str]") -> None:
        """Kill a worker in the middle of a shard."""
        while process.poll() is None:
            for worker in self.workers():
                if b"ShardWorker.shard" in _read(Path(f"/proc/{worker}/cmdline")):
                    return os.kill(worker, signal.SIGKILL)
            time.sleep(0.02)
        raise AssertionError(process.communicate())

    def wait_for_shards(self, out: str, count: int, process: "subprocess.Popen[str]") -> None:
        """Some are written, and the command still runs."""
        while len(list((self.folder / out).glob("shard-*"))) < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    def wait_for_a_shard_of(self, worker: int, out: str, process: "subprocess.Popen[str]") -> None:
        """It is stopped, and since it holds the shard that is written next, nothing more is."""
        os.kill(worker, signal.SIGSTOP)
        written, since = -1, time.monotonic()
        while time.monotonic() < since + 2:
            assert process.poll() is None, "the other worker had all that was left"
            if written != (count := len(list((self.folder / out).glob("shard-*")))):
                written, since = count, time.monotonic()
            time.sleep(0.02)

    def wait_for_the_end(self, *, of_workers: bool = False) -> None:
        """Of all processes, or of those that hold the model."""
        deadline = time.monotonic() + 60
        while left := self.workers() if of_workers else self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""


@pytest.fixture
def started(tmp_path: Path, checkpoint_path: Path) -> Iterator[Started]:
    extraction = Started(tmp_path, checkpoint_path)
    yield extraction
    for process in extraction.processes():
        os.kill(process, signal.SIGKILL)


def test_a_worker_is_killed_and_the_files_are_those_of_one_process(started: Started) -> None:
    started.finish("straight")
    process = started.start("killed", *RAY)
    started.wait_for_shards("killed", 4, process)
    workers = started.workers()
    assert len(workers) == 2
    # One that has nothing to compute at that moment may not be missed until all is done.
    started.wait_for_a_shard_of(workers[0], "killed", process)
    os.kill(workers[0], signal.SIGKILL)
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert printed.startswith("killed: ")
    assert printed.count("\n") == 1, "Ray says nothing where the result goes"
    assert "died and was restarted" in said
    assert all(line.startswith("logitd extract: ") for line in said.splitlines()), said
    assert contents(started.folder / "killed") == contents(started.folder / "straight")
    assert len(list((started.folder / "straight").glob("shard-*"))) > 20
    started.wait_for_the_end()
    assert not (started.folder / ".ray").exists(), "nothing is written into the home"


def test_a_shard_over_which_three_workers_die_ends_the_command(started: Started) -> None:
    process = started.start("out", "--ray", "local", "--ray-workers", "1")
    started.wait_for_shards("out", 1, process)
    for _ in range(3):
        started.kill_one_that_computes(process)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.search(r"3 workers died .* over token \d+ of text\.txt .*--shard-tokens", said), said
    started.wait_for_the_end()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_ends_leaves_no_worker_and_goes_on_without_ray(
    started: Started, ending: signal.Signals
) -> None:
    """After a kill two of Ray's own processes were still there a minute later, so only those that
    hold the model are waited for."""
    process = started.start("stopped", *RAY)
    started.wait_for_shards("stopped", 3, process)
    os.kill(process.pid, ending)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL), said
    assert "Traceback" not in said
    started.wait_for_the_end(of_workers=ending == signal.SIGKILL)
    before = len(list((started.folder / "stopped").glob("shard-*")))
    started.finish("stopped")
    started.finish("straight")
    assert before < len(list((started.folder / "straight").glob("shard-*")))
    assert contents(started.folder / "stopped") == contents(started.folder / "straight")


def test_a_checkpoint_that_a_worker_lacks_is_a_sentence(
    started: Started, checkpoint_path: Path, tmp_path: Path
) -> None:
    """It is removed after the command has read it, before a worker can."""
    copied = tmp_path / "copied"
    shutil.copytree(checkpoint_path, copied)
    process = started.start("out", "--ray", "local", "--ray-workers", "1", checkpoint=copied)
    assert process.stderr is not None
    while "workers: 1 on cpu" not in (line := process.stderr.readline()):
        assert line, "it ended before"
    shutil.rmtree(copied)
    printed, said = process.communicate(timeout=120)
    assert (process.returncode, printed) == (1, "")
    assert said.startswith("logitd extract: on ")
    assert f"{copied} does not exist" in said
    assert said.count("\n") == 1, said
    assert not (started.folder / "out").exists()


def test_more_workers_than_fit_are_refused(started: Started) -> None:
    process = started.start("out", "--ray", "local", "--ray-workers", "1000")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1000 on cpu with --threads 1; only" in said
    started.wait_for_the_end()
