"""Trainers: two on one run, kills while one waits for the other, disks that are full or not there.

Real `logitd train` processes. What a single kill leaves is tested with the trainer
(`tests/model/training/test_killed.py`).
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.attack import Attack, Ground
from tests.model.conftest import story
from tests.zygote import ForkedProcess

STATE = Path("state") / "state.pt"
SHAPE = (
    *("--n-layer", "1", "--n-head", "2", "--n-kv-head", "1", "--d-model", "32", "--d-ff", "64"),
    *("--context-length", "16", "--batch-size", "2", "--vocab-size", "300", "--threads", "1"),
    *("--device", "cpu", "--compile", "off", "--dtype", "float32", "--preset", "tiny"),
    *("--log-every", "20", "--checkpoint-every", "50", "--sample-every", "1000000"),
    *("--eval-every", "1000000"),
)


class Training:
    """A trainer, from the zygote; `limit` is the size of a file in bytes above which its disk is
    full."""

    def __init__(self, ground: Ground, *flags: str, limit: int | None = None) -> None:
        text = ground.folder / "text.txt"
        if not text.exists():
            text.write_text(story(300), encoding="utf-8")
        said, stderr = os.pipe()  # not a file, which the limit would be for as well
        self._said = os.fdopen(said)
        with os.fdopen(stderr, "w"), Path(os.devnull).open("w") as nothing:
            self.process = ForkedProcess(
                ["train", *flags], stdout=nothing.fileno(), stderr=stderr, file_bytes=limit
            )

    def finish(self) -> tuple[int, str]:
        """Wait for its end: the exit code, and what it said on stderr."""
        with self._said:
            try:
                return self.process.wait(timeout=60), self._said.read()
            finally:
                self.process.kill()

    def wait_for(self, event: Callable[[], bool]) -> None:
        """Until it has done something and goes on."""
        deadline = time.monotonic() + 60
        while not event():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, "it does not go on"
            time.sleep(0.02)


def begin(ground: Ground, run: Path, *, steps: int, limit: int | None = None) -> Training:
    flags = ("--data", str(ground.folder / "text.txt"), "--out", str(run), "--steps", str(steps))
    return Training(ground, *flags, *SHAPE, limit=limit)


def saved_since(run: Path, moment: int) -> bool:
    return (run / STATE).stat().st_mtime_ns != moment


def two_trainers(ground: Ground, count: int) -> str:
    """One trains; others want the same run, new and resumed, until the first is killed."""
    generator = random.Random(0)
    run = ground.folder / "run"
    flags = ("--resume", "--out", str(run))
    first = begin(ground, run, steps=1_000_000)
    first.wait_for((run / STATE).exists)
    refused = 0
    for _ in range(count):
        anew = generator.random() < 0.5
        second = Training(ground, *flags) if anew else begin(ground, run, steps=5)
        code, err = second.finish()
        assert code == 1, err
        assert f"is being trained by process {first.process.pid} on" in err, err
        assert "Traceback" not in err, err
        assert first.process.poll() is None, "the first goes on"
        refused += 1
        if generator.random() < 0.5:
            first.process.kill()
            first.finish()
            before = (run / STATE).stat().st_mtime_ns
            first = Training(ground, *flags)
            first.wait_for(partial(saved_since, run, before))
    first.process.terminate()
    code, err = first.finish()
    assert code == 0, err
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
        limit = int(10 ** generator.uniform(1, 6))
        code, err = begin(ground, run, steps=3, limit=limit).finish()
        assert "Traceback" not in err, err
        assert code in (0, 1), f"{code}: {err}"
        if code == 1:
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
