"""Set-up of a run: a run that cannot begin ends with a message and leaves nothing on disk."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.data.prepare import read_prepared
from logitd.model.data.shards import HEADER
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.events import Event, Noticed, Prepared, Started
from logitd.model.training.run.summary import summarize
from logitd.model.training.trainer import train
from tests.model.conftest import Configure, story
from tests.model.full_disk import files_of_at_most


class TryASecond:
    """Starts a second trainer on the same run when the text is prepared."""

    def __init__(self, configure: Configure, *, resume: bool) -> None:
        self.config = configure(resume=True) if resume else configure()
        self.error: TrainingError | None = None

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Prepared):
            with pytest.raises(TrainingError) as caught:
                train(self.config)
            self.error = caught.value


def test_second_trainer_names_the_first_that_prepares_its_text(configure: Configure) -> None:
    second = TryASecond(configure, resume=False)
    train(configure(steps=2), second)
    assert f"is being trained by process {os.getpid()} on" in str(second.error)
    assert "remove" not in str(second.error)


def test_run_in_training_is_resumed_only_afterwards(configure: Configure) -> None:
    result = train(configure(steps=2))
    second = TryASecond(configure, resume=True)
    train(configure(resume=True, steps=4), second)
    assert f"is being trained by process {os.getpid()} on" in str(second.error)
    assert train(configure(resume=True, steps=6)).step == 6
    assert summarize(result.run).step == 6


def test_failed_run_releases_its_lock(configure: Configure) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Started):
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        train(configure(steps=2), fail)
    assert train(configure(resume=True, steps=2)).step == 2


def test_run_in_training_can_be_read(configure: Configure, tmp_path: Path) -> None:
    first = train(configure(steps=2))
    seen: list[int] = []

    def read(event: Event) -> None:
        if isinstance(event, Prepared):
            seen.append(summarize(first.run).step)
            based = configure(from_checkpoint=first.best, out=tmp_path / "tuned", steps=1)
            own = {"vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "context_length"}
            given = {k: v for k, v in based.given().items() if k not in own}
            seen.append(train(TrainingConfig(**given)).step)

    train(configure(resume=True, steps=3), read)
    assert seen == [2, 1]


def notices(config: TrainingConfig) -> str:
    """Train, and return the notices."""
    events: list[Event] = []
    train(config, events.append)
    return "\n".join(event.message for event in events if isinstance(event, Noticed))


def test_changed_text_is_refused_on_resume(configure: Configure, tmp_path: Path) -> None:
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
    with pytest.raises(TrainingError, match=r"--data: .*t\.txt is not a file.*remove --data"):
        train(again)
    assert train(TrainingConfig(out=config.out, resume=True, steps=4)).step == 4


def test_changed_shards_are_refused_on_resume(
    configure: Configure, straight: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(straight / "data", data)
    given = {"data": (str(data),), "tokenizer": str(data / "tokenizer.tiktoken")}
    config = configure(**given, vocab_size=None, steps=1)
    train(config)
    again = TrainingConfig(out=config.out, data=config.data, resume=True, steps=2)
    assert train(again).step == 2
    (data / "data.json").unlink()  # it has the sha256 of the shards
    raw = bytearray((data / "train.tokens").read_bytes())
    raw[HEADER.size] ^= 1  # the first id
    (data / "train.tokens").write_bytes(raw)
    with pytest.raises(TrainingError, match=r"--data: .* has changed"):
        train(again)


@pytest.mark.parametrize("encoding", ["ids", "text"])
def test_reused_shards_keep_their_encoding_of_special_tokens(
    configure: Configure, tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "t.txt").write_text(story(300).replace("\n", "\n<|endoftext|>\n"))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ eos_token }}")
    first = configure(data=(str(tmp_path / "t.txt"),), steps=1, special_tokens=encoding)
    data = train(first).run / "data"
    tokenizer = str(data / "tokenizer.tiktoken")
    given: dict[str, Any] = {"data": (str(data),), "tokenizer": tokenizer, "steps": 1,
                             "vocab_size": None}  # fmt: skip
    other = "text" if encoding == "ids" else "ids"
    with_template = {"chat_template": template} if encoding == "text" else {}
    again = train(configure(**given, **with_template, out=tmp_path / "again"))
    assert read_checkpoint(again.checkpoint).special_ids == (encoding == "ids")
    refused = f"special_tokens is '{other}', but .* it was '{encoding}'"
    with pytest.raises(TrainingError, match=refused):
        train(configure(**given, out=tmp_path / "b", special_tokens=other))
    description = data / "data.json"
    differs = tmp_path / "differs"
    shutil.copytree(data, differs)
    (differs / "data.json").write_text(
        description.read_text().replace(
            f'"special_tokens": "{encoding}"', f'"special_tokens": "{other}"'
        )
    )
    both = (str(data), str(differs))
    with pytest.raises(TrainingError, match="shards differ in the encoding of special tokens"):
        train(configure(**{**given, "data": both}, out=tmp_path / "c"))
    description.unlink()
    unknown = train(configure(**given, out=tmp_path / "d", special_tokens=other))
    assert read_checkpoint(unknown.checkpoint).special_ids == (other == "ids")


def test_prompt_without_tokens_is_refused(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="--prompts ''"):
        train(configure(prompts=("a", "")))
    assert os.listdir(tmp_path) == []
    words = models.WordLevel({"the": 0, "cat": 1, "<|endoftext|>": 2, "[UNK]": 3}, "[UNK]")
    library = tokenizers.Tokenizer(words)
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<|endoftext|>", "[UNK]"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("the cat " * 900)
    given = {"tokenizer": str(tmp_path / "tokenizer.json"), "data": (str(tmp_path / "t.txt"),)}
    config = configure(**given, vocab_size=None, prompts=("the cat", " \n"))
    with pytest.raises(TrainingError, match=r"--prompts ' \\n' .* no tokens"):
        train(config)
    assert config.out is not None
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("given", "special_ids"),
    [
        ({}, False),
        ({"special_tokens": "ids"}, True),
        ({"chat_template": "{{ eos_token }}"}, True),
        ({"chat_template": "{{ eos_token }}", "special_tokens": "text"}, False),
    ],
)
def test_names_of_special_tokens_in_a_text_are_reported(
    configure: Configure, tmp_path: Path, given: dict[str, Any], special_ids: bool
) -> None:
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
    assert info.special_ids is special_ids, "so it is evaluated in the same way"


@pytest.mark.parametrize("special_tokens", ["auto", "ids", "text"])
def test_chat_template_of_a_resumed_run_does_not_change_its_text(
    configure: Configure, tmp_path: Path, special_tokens: str
) -> None:
    path, template = tmp_path / "t.txt", tmp_path / "chat.jinja"
    path.write_text(story(300).replace("\n", "\n<|endoftext|>\n"))
    template.write_text("{{ eos_token }}")
    config = configure(data=(str(path),), steps=1, special_tokens=special_tokens)
    train(config)
    again = TrainingConfig(out=config.out, resume=True, chat_template=template, steps=2)
    told = notices(again)
    assert ("start a new run with --chat-template" in told) is (special_tokens == "auto")


def test_names_at_which_a_text_is_split_are_not_reported(
    configure: Configure, tmp_path: Path
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(story(300).replace("\n", "\n<|endoftext|>\n"))
    config = configure(data=(str(path),), steps=1, split_at="<|endoftext|>")
    assert "<|endoftext|>" not in notices(config)
    assert config.out is not None
    assert read_prepared(config.out / "data").record["documents"] == 300


@pytest.mark.parametrize(("ends", "reported"), [("\r\n", 300), ("\n", 0)])
def test_windows_line_ends_are_reported(
    configure: Configure, tmp_path: Path, ends: str, reported: int
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(story(300) + "\nplain\n", newline=ends)
    path.write_bytes(path.read_bytes().replace(b"plain\r\n", b"plain\n"))
    said = notices(configure(data=(str(path),), steps=1))
    assert ("sed -i" in said) is bool(reported)
    assert not reported or re.search(rf"\b{reported} lines of the text end in CR LF", said)


@pytest.mark.parametrize(("files", "reported"), [(15, True), (19, False)])
def test_held_out_share_far_from_val_fraction_is_reported(
    configure: Configure, tmp_path: Path, files: int, reported: bool
) -> None:
    """One of 15 equal documents is 6.7 % of the text, two of 19 are 10.5 %."""
    for number in range(files):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "the cat saw a dog. " * 40 + "\n")
    said = notices(configure(data=(str(tmp_path / "*.txt"),), steps=1))
    pattern = r"6\.[67]\d*% of the text is held out.*val_fraction is 10%"
    assert bool(re.search(pattern, said)) is reported
    assert ("held out" in said) is reported


@pytest.mark.parametrize("out", ["/proc/run", "/sys/run", "/dev/null/run"])
def test_impossible_run_directory_is_refused(configure: Configure, out: str) -> None:
    with pytest.raises(TrainingError, match=f"{out}: .*choose another --out"):
        train(configure(out=Path(out)))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 20 kB, as on a full disk."""
    with files_of_at_most(20_000):
        yield


@pytest.mark.usefixtures("small_files")
def test_full_disk_while_the_text_is_prepared_is_named(configure: Configure) -> None:
    config = configure()
    with pytest.raises(TrainingError, match=r"cannot be prepared in .*File too large; make room"):
        train(config)
    assert config.out is not None
    assert not config.out.exists()
