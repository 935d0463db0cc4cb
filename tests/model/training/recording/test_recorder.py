"""Files of a run, and refusals to overwrite them."""

import math
import re
import resource
import shutil
from itertools import count
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.prepare import PreparedText
from logitd.model.data.shards import Shard
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.events import Event, Progress, Sampled
from logitd.model.training.recording.samples import default_prompts
from logitd.model.training.trainer import Trainer, train
from tests.model.conftest import Configure
from tests.model.training.test_trainer import _state


def test_weights_spoiled_by_the_last_update_are_not_saved(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def poisoned(self: Trainer) -> None:
        step(self)
        if self.counters.step == 12:
            with torch.no_grad():
                self.gpt.token_embedding.weight[3, 3] = math.inf

    config = configure()
    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(TrainingError, match=r"after step 12 token_embedding\.weight") as error:
        train(config)
    assert "step-000006" in str(error.value)
    monkeypatch.undo()
    assert train(TrainingConfig(out=config.out, resume=True)).step == 12


def test_samples_take_a_small_share_of_the_minutes(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples once took 40 of 60 seconds on a busy machine. On the simulated clock a token takes a
    second. A run of two minutes may spend two percent of them, 2.4 seconds, on samples, so it stops
    after three tokens."""
    seconds = SimpleNamespace(monotonic=count(0.0).__next__)
    monkeypatch.setattr("logitd.model.training.recording.samples.time", seconds)
    texts = []
    for minutes in (None, 2):
        events: list[Event] = []
        out = tmp_path / str(minutes)
        config = configure(steps=1, minutes=minutes, sample_tokens=40, prompts=("a",), out=out)
        train(config, events.append)
        texts.append(next(event.text for event in events if isinstance(event, Sampled)))
    whole, cut = texts
    assert whole.startswith(cut)
    assert 0 < len(cut) < len(whole) / 3


PIECES = Tokenizer(
    ranks={b"the": 0, b"dog": 1, b" ": 2},
    pattern=r"\w+|\s",
    special_tokens={END_OF_TEXT: 3},
    kind="pieces",
)


@pytest.mark.parametrize(
    ("ids", "prompts"),
    [
        ([0, 3, 1, 3], {"the"}),  # documents of a word, whose text `thedog` has no ids
        ([0, 2, 1, 2], {"the dog the dog "}),
        ([3], set()),
    ],
)
def test_default_prompts_have_ids(ids: list[int], prompts: set[str]) -> None:
    val = Shard(Path("val.tokens"), np.array(ids * 30), 0)
    text = PreparedText(PIECES, val, val, {"built_in": False})
    assert set(default_prompts(text)) == prompts
    built_in = PreparedText(PIECES, val, val, {"built_in": True})
    assert default_prompts(built_in) == (), "the vocabulary has none of their words"


def _train_with_little_room(config: TrainingConfig, limit: int, sentence: Path) -> None:
    """Train in a process in which files cannot grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        train(config)
    except TrainingError as error:
        sentence.write_text(str(error))


@pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.slow), 0.99])
def test_failed_save_leaves_the_last_good_state(
    configure: Configure, tmp_path: Path, processes: ForkServerContext, share: float
) -> None:
    """The disk has room for only a part of the second state. Once there is room again, the run
    continues."""
    train(configure(steps=6, out=tmp_path / "run", decay="constant"))
    train(configure(out=tmp_path / "straight", decay="constant"))
    run = tmp_path / "run"
    before = (run / "state" / "state.pt").read_bytes()
    resume = TrainingConfig(out=run, resume=True, steps=12)
    arguments = (resume, int(len(before) * share), tmp_path / "sentence")
    process = processes.Process(target=_train_with_little_room, args=arguments)
    process.start()
    process.join(60)
    assert re.fullmatch(
        r"step 12 could not be saved: .*File too large. The last good checkpoint is \S+step-000006."
        r" Free disk space, then continue with --resume",
        (tmp_path / "sentence").read_text(),
    )
    assert (run / "state" / "state.pt").read_bytes() == before
    assert [path.name for path in (run / "state").iterdir()] == ["state.pt"]
    load_checkpoint(run / "latest", device=torch.device("cpu"), dtype=torch.float32)
    assert train(resume).step == 12
    assert _state(run)["weights"] == _state(tmp_path / "straight")["weights"]


@pytest.mark.parametrize("removed", ["run", "state"])
def test_removed_folder_is_not_reported_as_a_full_disk(
    configure: Configure, tmp_path: Path, removed: str
) -> None:
    """After a run was removed with `rm -r`, its save failed, and the error message once advised the
    user to make room and resume."""
    run = tmp_path / "run"

    def remove(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 4:
            shutil.rmtree(run if removed == "run" else run / "state")
            if removed == "state":
                (run / "state").write_text("in the way of a folder")

    with pytest.raises(TrainingError) as refusal:
        train(configure(out=run, checkpoint_every=3, eval_every=3), remove)
    said = str(refusal.value)
    if removed == "run":
        assert f"{run} was removed or moved during training: if you moved it, continue" in said
    else:
        assert re.search(r"step-00000\d\. Fix the error, then continue with --resume$", said)


def test_replaced_run_is_left_to_its_new_process(configure: Configure, tmp_path: Path) -> None:
    """A user removed or moved the folder of a run in training, and began another run there. The
    first process once went on writing its state, log and checkpoints into the other run."""
    run, config = tmp_path / "run", configure(out=tmp_path / "run", checkpoint_every=3)

    def replace_folder(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 4:
            run.rename(tmp_path / "moved")
            train(config)
            before.update(_files(run))

    before: dict[Path, bytes] = {}
    with pytest.raises(TrainingError, match=r"another process made a new folder .*--resume"):
        train(config, replace_folder)
    assert _files(run) == before


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoint_that_cannot_be_written_leaves_nothing(
    configure: Configure, tmp_path: Path, processes: ForkServerContext
) -> None:
    run, sentence = tmp_path / "run", tmp_path / "sentence"
    config = configure(d_model=128, eval_every=4, checkpoint_every=100)
    process = processes.Process(target=_train_with_little_room, args=(config, 300_000, sentence))
    process.start()
    process.join(60)
    assert sentence.read_text().startswith("step 0 could not be saved: ")
    assert "File too large" in sentence.read_text()
    assert [path.name for path in run.iterdir() if "step-" in path.name] == []


def test_samples_do_not_end_in_half_a_character(configure: Configure, tmp_path: Path) -> None:
    """An untrained byte model writes mostly invalid UTF-8."""
    sampled: list[str] = []
    train(
        configure(vocab_size=257, steps=1, sample_tokens=9),
        lambda event: sampled.append(event.text) if isinstance(event, Sampled) else None,
    )
    assert any("\ufffd" in text for text in sampled)
    assert not any(text.endswith("\ufffd") for text in sampled)
    assert "\ufffd\n" not in (tmp_path / "run" / "samples.txt").read_text()
