"""Trainers: two on one run, kills while one waits for the other, disks that are full or not there.

Real `logitd train` processes. What a single kill leaves is tested with the trainer
(`tests/model/training/test_killed.py`).
"""

import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.attack import Attack, Ground
from tests.model.conftest import story

STATE = Path("state") / "state.pt"
SHAPE = (
    *("--n-layer", "1", "--n-head", "2", "--n-kv-head", "1", "--d-model", "32", "--d-ff", "64"),
    *("--context-length", "16", "--batch-size", "2", "--vocab-size", "300", "--threads", "1"),
    *("--device", "cpu", "--compile", "off", "--dtype", "float32", "--preset", "tiny"),
    *("--log-every", "20", "--checkpoint-every", "50", "--sample-every", "1000000"),
    *("--eval-every", "1000000"),
)


def start(ground: Ground, *flags: str, limit: int | None = None) -> "subprocess.Popen[str]":
    """A trainer; `limit` is the size of a file in bytes above which its disk is full."""
    text = ground.folder / "text.txt"
    if not text.exists():
        text.write_text(story(300), encoding="utf-8")

    def full_disk() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", "train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=full_disk,
    )


def begin(
    ground: Ground, run: Path, *, steps: int, limit: int | None = None
) -> "subprocess.Popen[str]":
    flags = ("--data", str(ground.folder / "text.txt"), "--out", str(run), "--steps", str(steps))
    return start(ground, *flags, *SHAPE, limit=limit)


def wait_for(event: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Until a process that goes on has done something."""
    deadline = time.monotonic() + 60
    while not event():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.02)


def saved_since(run: Path, moment: int) -> bool:
    return (run / STATE).stat().st_mtime_ns != moment


def two_trainers(ground: Ground, count: int) -> str:
    """One trains; others want the same run, new and resumed, until the first is killed."""
    generator = random.Random(0)
    run = ground.folder / "run"
    flags = ("--resume", "--out", str(run))
    first = begin(ground, run, steps=1_000_000)
    wait_for((run / STATE).exists, first)
    refused = 0
    for _ in range(count):
        second = start(ground, *flags) if generator.random() < 0.5 else begin(ground, run, steps=5)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 1, err
        assert f"is being trained by process {first.pid} on" in err, err
        assert "Traceback" not in err, err
        assert first.poll() is None, "the first goes on"
        refused += 1
        if generator.random() < 0.5:
            first.kill()
            first.communicate()
            before = (run / STATE).stat().st_mtime_ns
            first = start(ground, *flags)
            wait_for(partial(saved_since, run, before), first)
    first.terminate()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    return f"{refused} refused with the process that has it, and the run went on after every kill"


def full_disks(ground: Ground, count: int) -> str:
    """Disks that are full after any number of bytes, and places where no run can be."""
    generator = random.Random(0)
    ended = saved = 0
    for attempt in range(count):
        run = ground.folder / f"run-{attempt}"
        if attempt % 4 == 3:
            run = Path(
                generator.choice(("/proc/run", "/sys/run", "/dev/null/run", "/dev/full/run"))
            )
        process = begin(ground, run, steps=3, limit=int(10 ** generator.uniform(1, 6)))
        _, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        assert process.returncode in (0, 1), f"{process.returncode}: {err}"
        if process.returncode == 1:
            assert err.count("logitd train: ") == 1, err
            ended += 1
        else:
            saved += 1
    return f"{ended} ended with a sentence, {saved} had room"


ATTACKS = (
    Attack(
        "two trainers",
        "the second is told who trains, a kill leaves no lock",
        two_trainers,
        short=2,
        long=60,
    ),
    Attack(
        "full disks", "a sentence and exit code 1, or a whole run", full_disks, short=4, long=80
    ),
)
