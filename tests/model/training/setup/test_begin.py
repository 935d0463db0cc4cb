"""A run that cannot begin: a directory that is in use, that cannot be written, or whose disk is
full. Each ends with a sentence, and leaves nothing behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.events import Event, Prepared
from logitd.model.training.run.directory import LOCK
from logitd.model.training.run.summary import summarise
from logitd.model.training.trainer import train
from tests.model.conftest import Configure
from tests.model.full_disk import files_of_at_most


class TryASecond:
    """A reporter that starts a second trainer on the same run when the text is prepared."""

    def __init__(self, configure: Configure, *, resume: bool) -> None:
        self.config = configure(resume=True) if resume else configure()
        self.error: TrainingError | None = None

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Prepared):
            with pytest.raises(TrainingError) as caught:
                train(self.config)
            self.error = caught.value


def test_a_second_trainer_is_told_of_the_first_while_it_prepares_its_text(
    configure: Configure,
) -> None:
    second = TryASecond(configure, resume=False)
    train(configure(steps=2), second)
    assert f"is being trained by process {os.getpid()} on" in str(second.error)
    assert "remove" not in str(second.error)


def test_a_run_in_training_is_not_resumed_by_a_second_and_is_afterwards(
    configure: Configure,
) -> None:
    result = train(configure(steps=2))
    second = TryASecond(configure, resume=True)
    train(configure(resume=True, steps=4), second)
    assert f"is being trained by process {os.getpid()} on" in str(second.error)
    assert train(configure(resume=True, steps=6)).step == 6
    assert summarise(result.run).step == 6


def test_a_run_that_failed_leaves_no_lock_to_this_process(configure: Configure) -> None:
    class Fails:
        def __call__(self, event: Event, /) -> None:
            if not isinstance(event, Prepared):
                raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        train(configure(steps=2), Fails())
    assert train(configure(resume=True, steps=2)).step == 2


def test_a_run_in_training_is_read_by_those_who_do_not_write(
    configure: Configure, tmp_path: Path
) -> None:
    """Inspected, and started from."""
    first = train(configure(steps=2))
    seen: list[int] = []

    class Reads:
        def __call__(self, event: Event, /) -> None:
            if isinstance(event, Prepared):
                seen.append(summarise(first.run).step)
                based = configure(from_checkpoint=first.best, out=tmp_path / "tuned", steps=1)
                own = {"vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "context_length"}
                given = {k: v for k, v in based.given().items() if k not in own}
                seen.append(train(type(based)(**given)).step)

    train(configure(resume=True, steps=3), Reads())
    assert seen == [2, 1]


@pytest.mark.parametrize("out", ["/proc/run", "/sys/run", "/dev/null/run"])
def test_a_directory_that_cannot_be_made_is_refused_with_a_sentence(
    configure: Configure, out: str
) -> None:
    with pytest.raises(TrainingError, match=f"{out}: .*Choose another --out"):
        train(configure(out=Path(out)))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files larger than 20 kB cannot be written: as if the disk were full."""
    with files_of_at_most(20_000):
        yield


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_is_full_while_the_text_is_prepared_is_named(configure: Configure) -> None:
    config = configure()
    with pytest.raises(TrainingError, match=r"cannot be prepared in .*File too large; make room"):
        train(config)
    assert config.out is not None
    assert not config.out.exists()


FULL_DISK = """
mount -t tmpfs -o size=40k none {mount} || exit 77
{python} -m logitd train --data {text} --out {mount}/run --preset tiny --steps 1
"""


def test_a_real_full_disk_gives_a_sentence_and_no_traceback(
    story_file: Path, tmp_path: Path
) -> None:
    """On a file system of 40 kB, where this machine lets a test mount one."""
    script = FULL_DISK.format(mount=tmp_path, python=sys.executable, text=story_file)
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if process.returncode == 77 or "unshare" in process.stderr:
        pytest.skip("no file system may be mounted here")
    assert process.returncode == 1
    assert "No space left on device; make room there" in process.stderr
    assert "Traceback" not in process.stderr


def test_the_lock_is_named_as_the_readme_has_it() -> None:
    assert LOCK in (Path(__file__).parents[4] / "model/training/README.md").read_text()
