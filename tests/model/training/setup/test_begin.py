"""A run that cannot begin: a directory that is in use, that cannot be written, or whose disk is
full. Each ends with a sentence, and leaves nothing behind."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.run_folder import LOCK
from logitd.model.data.prepare import read_prepared
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.events import Event, Noticed, Prepared, Started
from logitd.model.training.run.summary import summarise
from logitd.model.training.trainer import train
from tests.model.conftest import Configure, story
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
            if isinstance(event, Started):
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


def notices(config: TrainingConfig) -> str:
    """Train, and return what was noticed."""
    events: list[Event] = []
    train(config, events.append)
    return "\n".join(event.message for event in events if isinstance(event, Noticed))


def test_a_text_that_has_changed_is_refused_when_it_is_named_again(
    configure: Configure, tmp_path: Path
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(story(300))
    config = configure(data=(str(path),), steps=2)
    train(config)
    again = TrainingConfig(out=config.out, data=config.data, resume=True, steps=3)
    assert train(again).step == 3
    path.write_text(story(301))
    with pytest.raises(TrainingError, match=r"--data: .*t\.txt has changed .*sha256 [0-9a-f]{12}"):
        train(again)
    path.unlink()
    with pytest.raises(TrainingError, match=r"--data: .*t\.txt is not a file.*leave --data out"):
        train(again)
    assert train(TrainingConfig(out=config.out, resume=True, steps=4)).step == 4


def test_shards_that_have_changed_are_refused_when_they_are_named_again(
    configure: Configure, straight: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(straight / "data", data)
    given = {"data": (str(data),), "tokenizer": str(data / "tokenizer.tiktoken")}
    config = configure(**given, vocab_size=None, steps=1)
    train(config)
    again = TrainingConfig(out=config.out, data=config.data, resume=True, steps=2)
    assert train(again).step == 2
    raw = bytearray((data / "train.tokens").read_bytes())
    raw[-2:] = raw[-4:-2]
    (data / "train.tokens").write_bytes(raw)
    with pytest.raises(TrainingError, match=r"--data: .* has changed"):
        train(again)
    with pytest.raises(TrainingError, match=r"special_tokens is 'ids', but .* already tokenised"):
        train(configure(**given, vocab_size=None, out=tmp_path / "b", special_tokens="ids"))


@pytest.mark.parametrize(
    ("given", "special_ids"),
    [
        ({}, False),
        ({"special_tokens": "ids"}, True),
        ({"chat_template": "{{ eos_token }}"}, True),
        ({"chat_template": "{{ eos_token }}", "special_tokens": "text"}, False),
    ],
)
def test_names_of_special_tokens_in_a_text_are_told(
    configure: Configure, tmp_path: Path, given: dict[str, Any], special_ids: bool
) -> None:
    """With a chat template, which sends their ids, they are the tokens."""
    path = tmp_path / "t.txt"
    path.write_text(story(300).replace("\n", "\n<|endoftext|>\n"))
    if source := given.get("chat_template"):
        (tmp_path / "chat.jinja").write_text(source)
        given = {**given, "chat_template": tmp_path / "chat.jinja"}
    config = configure(data=(str(path),), steps=1, prompts=("the cat<|endoftext|>",), **given)
    told = notices(config)
    assert re.search(r"<\|endoftext\|> 299 times", told)
    assert ("--split-at '<|endoftext|>'" in told) is not special_ids
    assert ("--special-tokens ids" in told) is not special_ids
    assert config.out is not None
    text = read_prepared(config.out / "data")
    end = text.tokenizer.end_of_text
    assert (text.train.tokens.tolist().count(end) > 200) is special_ids
    info = read_checkpoint(config.out / "latest")
    assert info.special_ids is special_ids, "so it is evaluated alike"
    divided = configure(data=(str(path),), steps=1, split_at="<|endoftext|>", out=tmp_path / "b")
    assert "<|endoftext|>" not in notices(divided)
    assert read_prepared(tmp_path / "b" / "data").record["documents"] == 300


def test_a_share_far_from_what_was_asked_is_told(configure: Configure, tmp_path: Path) -> None:
    for number in range(15):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "the cat saw a dog. " * 40 + "\n")
    config = configure(data=(str(tmp_path / "*.txt"),), steps=1)
    assert re.search(r"6\.[67]% of the text is held out.*val_fraction is 10\.0%", notices(config))
    (tmp_path / "0.txt").unlink()
    for number in range(15, 20):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "the cat saw a dog. " * 40 + "\n")
    config = configure(data=(str(tmp_path / "*.txt"),), steps=1, out=tmp_path / "b")
    assert "held out" not in notices(config)


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
