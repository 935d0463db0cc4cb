"""The whole training loop, on a model of a few thousand parameters."""

import hashlib
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.checkpoint.run_folder import HISTORY, checkpoints_in
from logitd.model.data.errors import DataError
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.events import (
    Evaluated,
    Event,
    Noticed,
    Prepared,
    Progress,
    Sampled,
    Saved,
    Started,
    line,
)
from logitd.model.training.optim import schedule
from logitd.model.training.recording import recorder
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.state import read_state
from logitd.model.training.run.summary import summarize
from logitd.model.training.step.validate import ValidationLoss
from logitd.model.training.trainer import Trainer, TrainingResult, train
from logitd.model.transformer.config import ConfigError
from tests.model.conftest import Configure, story


def _hash(value: Any) -> str:
    """A hash of a value, including all nested tensors, keys and other values."""
    digest = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                digest.update(repr(key).encode())
                feed(part[key])
        elif isinstance(part, list | tuple):
            for each in part:
                feed(each)
        else:
            digest.update(repr(part).encode())

    feed(value)
    return digest.hexdigest()


def _state(run: Path) -> dict[str, str]:
    """Hashes of everything in a run's state except the clock."""
    document = read_state(run / "state" / "state.pt").model_dump()
    for clock in ("seconds", "setup", "ending", "pace", "ending_pace"):
        document["counters"].pop(clock)
    document["reports"]["log"].pop("seconds")
    document["reports"].pop("tasks")
    return {name: _hash(part) for name, part in document.items()}


def _losses(run: Path) -> list[tuple[str, int, Any]]:
    return [
        (each["kind"], each["step"], each.get("loss", each.get("val_loss")))
        for each in RunDirectory(run).metrics()
    ]


def _press_ctrl_c(_: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _train_until(
    step: int,
    config: TrainingConfig,
    report: Callable[[Event], None] = lambda event: None,
    act: Callable[[Trainer], None] = _press_ctrl_c,
) -> TrainingResult:
    """Train, and call `act` after the given step."""
    original = Trainer._step

    def interrupted(self: Trainer) -> None:
        original(self)
        if self.counters.step == step:
            act(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        return train(config, report)


def test_run_learns_and_writes_its_files(configure: Configure) -> None:
    events: list[Event] = []
    config = configure(steps=40, eval_every=10, checkpoint_every=20, sample_every=20, keep=1)
    result = train(config, events.append)
    run = result.run
    assert (result.reason, result.step, result.tokens) == ("finished", 40, 40 * 4 * 32)
    assert {path.name for path in run.iterdir()} == {
        *("run.json", "run.lock", "data", "metrics.jsonl", "samples.txt"),
        *("state", "latest", "best", "step-000040"),
    }
    info, gpt = load_checkpoint(run / "best", device=torch.device("cpu"), dtype=torch.float32)
    assert info.training.step == 40
    assert info.training.val_loss == result.val_loss
    assert (
        info.training.data["sha256"]
        == hashlib.sha256(Path(config.data[0]).read_bytes() + b"\0").hexdigest()
    )
    assert gpt.config.vocab_size == info.tokenizer.vocab_size
    evals = [event for event in events if isinstance(event, Evaluated)]
    assert [event.step for event in evals] == [0, 1, 2, 4, 10, 12, 20, 30, 40]
    assert evals[-1].val_loss < evals[0].val_loss - 0.5
    kinds = [type(event) for event in events]
    assert kinds[:3] == [Noticed, Prepared, Started]
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.step for event in progress] == sorted({1, *range(2, 41, 2)})
    assert progress[-1].share == 1
    assert 0 < progress[-1].seconds_left < 10, "the last step is not saved yet"
    sampled = [event.step for event in events if isinstance(event, Sampled)]
    assert sampled == [step for step in (0, 1, 2, 4, 12, 20, 40) for _ in range(3)]  # 3 prompts
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert saved == [0, 1, 2, 4, 10, 12, 20, 30, 40]
    assert all(line(event) for event in events)


def test_context_of_a_preset_fits_a_short_text(configure: Configure, tmp_path: Path) -> None:
    """The validation text is shorter than the preset's context. A step has as many tokens."""
    text = tmp_path / "short.txt"
    text.write_text(story(150))
    short = {"data": (str(text),), "steps": 1}
    events: list[Event] = []
    result = train(configure(**short, context_length=None, batch_size=None), events.append)
    preset = PRESETS["tiny"]
    context = read_checkpoint(result.checkpoint).shape.context_length
    assert 128 <= context < preset.shape["context_length"]
    assert result.tokens == preset.recipe.batch_size * preset.shape["context_length"]
    told = "\n".join(event.message for event in events if isinstance(event, Noticed))
    assert f"the context has {context} positions instead of" in told
    with pytest.raises(DataError, match="a window needs 1025"):
        train(configure(**short, context_length=1024, out=tmp_path / "given"))


def test_card_describes_the_run(configure: Configure) -> None:
    result = train(configure(data_licence="CC0", prompts=("the cat ", "a dog", "```")))
    card = (result.checkpoint / "README.md").read_text()
    data = read_checkpoint(result.checkpoint).training.data
    for part in (
        data["sha256"],
        "License of the text: CC0",
        f"{result.val_bits_per_byte:.4f} bits per byte",
        "````\nlogitd train --preset tiny --data",
        "| 12 | ",
        "the cat ▸",
        "a dog▸",
        "threads: 1",
        "1,536",
    ):
        assert part in card, part
    assert str(result.run) not in card


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_stopped_and_resumed_run_has_the_bits_of_one_run(
    configure: Configure, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped twice by Ctrl-C, between two checkpoints and between two reports, once
    before and once after its windows become longer. Dropout draws random numbers, and the three
    runs evaluate and sample at different times."""
    monkeypatch.setattr(schedule, "SHORTEST", 4)
    shared = {
        "short_windows": 0.5,
        "dropout": 0.1,
        "dtype": dtype,
        "accumulate": 2,
        "warmup": 3,
        "clip": 1.0,
        "log_every": 5,
    }
    told: list[Event] = []
    train(configure(out=tmp_path / "straight", **shared), told.append)
    assert "from step 7 on, windows have 32 tokens instead of 8" in [
        event.message for event in told if isinstance(event, Noticed)
    ]
    one = configure(out=tmp_path / "broken", **shared)
    assert _train_until(3, one).reason == "interrupted"
    resume = TrainingConfig(out=one.out, resume=True, sample_tokens=2)
    assert _train_until(8, resume).step == 8
    result = train(TrainingConfig(out=one.out, resume=True))
    assert (result.step, result.reason) == (12, "finished")
    assert _state(tmp_path / "straight") == _state(tmp_path / "broken")
    weights = [
        read_checkpoint(tmp_path / run / "latest").weights_sha256 for run in ("straight", "broken")
    ]
    assert weights[0] == weights[1]
    events: list[Event] = []
    train(TrainingConfig(out=one.out, resume=True), events.append)
    assert [e.message for e in events if isinstance(e, Noticed) and "over at step 12" in e.message]
    straight, broken = _losses(tmp_path / "straight"), _losses(tmp_path / "broken")
    there = {each[:2] for each in straight}
    assert straight == [each for each in broken if each[:2] in there]


def test_history_keeps_the_weights_of_its_steps(configure: Configure, tmp_path: Path) -> None:
    """Checkpoints are kept more often at the start of a run. A stopped and resumed run keeps the
    same steps and weights."""

    def kept(run: Path) -> dict[int, str]:
        paths = checkpoints_in(run / HISTORY)
        found = {step: read_checkpoint(path) for step, path in paths.items()}
        assert all(info.training.step == step for step, info in found.items())
        evaluations = {each["step"]: each["val_loss"] for each in RunDirectory(run).metrics()
                       if each["kind"] == "eval"}  # fmt: skip
        assert all(info.training.val_loss == evaluations.get(step) for step, info in found.items())
        return {step: info.weights_sha256 for step, info in found.items()}

    shared = {"steps": 11, "keep_every": 5, "keep": 99, "checkpoint_every": 4, "eval_every": 4}
    train(configure(out=tmp_path / "straight", **shared))
    history = kept(tmp_path / "straight")
    assert list(history) == [0, 1, 2, 4, 5, 10, 11]
    usual = RunDirectory(tmp_path / "straight").checkpoints()
    same = [step for step in history if step in usual]
    assert same == [0, 1, 2, 4, 11]
    assert all(history[step] == read_checkpoint(usual[step]).weights_sha256 for step in same)
    one = configure(out=tmp_path / "broken", **shared)
    assert _train_until(7, one).reason == "interrupted"
    train(TrainingConfig(out=one.out, resume=True))
    assert kept(tmp_path / "broken") == history


def test_run_stopped_at_a_report_reports_as_one_run(configure: Configure, tmp_path: Path) -> None:
    """In steps 4 and 5 a report is due after the step. In step 7 none is due, and the divergence
    monitor must not count the report at the interruption."""
    shared = {"steps": 8, "log_every": 4, "eval_every": 5, "sample_every": 1000}
    train(configure(out=tmp_path / "straight", **shared))
    reported = [each for each in _losses(tmp_path / "straight") if each[0] == "train"]
    for stop in (4, 5, 7):
        broken = tmp_path / f"broken-{stop}"
        assert _train_until(stop, configure(out=broken, **shared)).reason == "interrupted"
        train(TrainingConfig(out=broken, resume=True))
        assert _state(tmp_path / "straight") == _state(broken)
        assert [each for each in _losses(broken) if each[0] == "train"] == reported


def test_state_of_an_earlier_version_resumes_with_its_smoothed_loss(
    configure: Configure, straight: Path, tmp_path: Path
) -> None:
    """Earlier versions saved the smoothed loss in the log."""
    config = configure(out=tmp_path / "earlier")
    assert _train_until(6, config).reason == "interrupted"
    path = tmp_path / "earlier" / "state" / "state.pt"
    document = torch.load(path, weights_only=True)
    document["reports"]["log"]["smoothed"] = document["reports"]["health"].pop("smoothed")
    torch.save(document, path)
    train(TrainingConfig(out=config.out, resume=True))
    assert _state(straight) == _state(tmp_path / "earlier")


@pytest.mark.usefixtures("pictures")
def test_ctrl_c_finishes_the_step_and_saves(configure: Configure) -> None:
    events: list[Event] = []
    before = signal.getsignal(signal.SIGINT)
    result = _train_until(2, configure(), events.append)
    assert (result.reason, result.step) == ("interrupted", 2)
    assert read_checkpoint(result.checkpoint).training.step == 2
    assert (result.run / "loss.png").is_file()
    notices = [event.message for event in events if isinstance(event, Noticed)]
    assert notices[1:] == [
        "stopping after this step, then saving; interrupt again to stop without saving"
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_evaluating_and_sampling_do_not_change_training(
    configure: Configure, tmp_path: Path
) -> None:
    seldom = configure(out=tmp_path / "seldom", dropout=0.2, eval_every=12)
    often = configure(out=tmp_path / "often", dropout=0.2, eval_every=1, sample_every=1)
    train(seldom)
    train(often)
    states = [_state(tmp_path / name) for name in ("seldom", "often")]
    for state in states:
        del state["reports"]  # each evaluation is preceded by a report
    assert states[0] == states[1]


def test_accumulated_gradients_are_averaged(configure: Configure, tmp_path: Path) -> None:
    """A sum would be `accumulate` times too large. Losses hardly show it, because AdamW and Muon do
    not depend on the scale of a gradient; the recorded norm does."""
    shared = {"optimizer": "adamw", "steps": 3, "log_every": 1, "clip": 1000.0}
    big = train(configure(out=tmp_path / "big", batch_size=8, **shared))
    parts = train(configure(out=tmp_path / "parts", batch_size=4, accumulate=2, **shared))
    steps = [
        [each for each in RunDirectory(run).metrics() if each["kind"] == "train"]
        for run in (big.run, parts.run)
    ]
    assert len(steps[0]) == 3
    for name in ("gradient_norm", "loss"):
        expected, found = ([each[name] for each in metrics] for metrics in steps)
        assert found == pytest.approx(expected, rel=1e-3), name
    weights = [read_state(result.run / "state" / "state.pt").weights for result in (big, parts)]
    for name, weight in weights[0].items():
        # Except one in a thousand whose gradient is nearly zero: AdamW follows its sign.
        far = (weights[1][name] - weight).abs() > 1e-4
        assert far.float().mean() <= 1e-3, name


def test_train_restores_random_state_and_threads(configure: Configure) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(configure(steps=2, threads=threads + 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_one_batch_can_be_memorized(tmp_path: Path, configure: Configure, optimizer: str) -> None:
    """The training text is hardly longer than a window, so all batches are nearly the same."""
    path = tmp_path / "short.txt"
    path.write_text(story(8))
    config = configure(
        data=(str(path),),
        vocab_size=257,
        val_fraction=0.5,
        context_length=100,
        steps=200,
        eval_every=200,
        checkpoint_every=200,
        optimizer=optimizer,
        matrix_lr=0.02 if optimizer == "muon" else 0.005,
    )
    losses = [loss for kind, _, loss in _losses(train(config).run) if kind == "train"]
    assert losses[0] > 4
    assert losses[-1] < 0.4


def test_diverging_run_stops_and_names_the_last_good_checkpoint(
    configure: Configure,
) -> None:
    def poison(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.gpt.token_embedding.weight.fill_(math.nan)

    config = configure()
    with pytest.raises(
        TrainingError, match=r"training diverged: at step 8 the loss is nan"
    ) as error:
        _train_until(7, config, act=poison)
    assert "step-000006" in str(error.value)
    assert config.out is not None
    load_checkpoint(config.out / "latest", device=torch.device("cpu"), dtype=torch.float32)
    assert train(TrainingConfig(out=config.out, resume=True)).step == 12


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> float:
    """Make the trainer's clock advance by a hundredth of a second per reading. Returns the time
    before the first reading."""
    begin = time.monotonic()
    ticks = (begin + tick / 100 for tick in count(1))
    monkeypatch.setattr(
        "logitd.model.training.trainer.time", SimpleNamespace(monotonic=ticks.__next__)
    )
    return begin


@pytest.mark.usefixtures("clock")
def test_minutes_end_a_run(configure: Configure) -> None:
    """Minutes alone set the length, and the learning rate falls with the clock. If steps are set
    too, the limit that is reached first ends the run."""
    config = configure(minutes=0.02, log_every=1, eval_every=10_000, checkpoint_every=10_000)
    given = {k: v for k, v in config.model_dump(exclude_unset=True).items() if k != "steps"}
    events: list[Event] = []
    result = train(TrainingConfig(**given), events.append)
    assert result.reason == "time is up"
    assert result.seconds < 60 * 0.02 + 0.1
    rates = [event.figures.learning_rate for event in events if isinstance(event, Progress)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0
    long = configure(minutes=60, steps=2, out=result.run.with_name("long"))
    assert train(long).reason == "finished"


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock for the trainer and the recorder that advances only with each step. Returns a list of
    the time and the duration of a step, both in seconds."""
    now, step = [1000.0, 1.0], Trainer._step

    def timed(self: Trainer) -> None:
        now[0] += now[1]
        step(self)

    stopped = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("logitd.model.training.trainer.time", stopped)
    monkeypatch.setattr("logitd.model.training.recording.recorder.time", stopped)
    monkeypatch.setattr(Trainer, "_step", timed)
    return now


def test_run_by_the_clock_keeps_its_plan_when_resumed(
    configure: Configure, tmp_path: Path, tick: list[float]
) -> None:
    """The clock advances one second per step. A run that was stopped and resumed ends with the same
    bits as an uninterrupted run, because the state includes its completed share of the minutes."""
    given = configure(minutes=0.4, dropout=0.1).model_dump(exclude_unset=True)
    del given["steps"]

    def ended(out: str) -> TrainingConfig:
        return TrainingConfig(**{**given, "out": tmp_path / out})

    result = train(ended("straight"))
    assert (result.reason, result.step, result.seconds) == ("time is up", 24, 24)
    assert _train_until(9, ended("broken")).reason == "interrupted"
    tick[0] += 3600
    assert train(TrainingConfig(out=tmp_path / "broken", resume=True)).step == 24
    assert _state(tmp_path / "straight") == _state(tmp_path / "broken")


def test_slower_steps_shorten_a_run_and_are_reported(
    configure: Configure, tick: list[float]
) -> None:
    def slow_down(_: Trainer) -> None:
        tick[1] = 5.0

    events: list[Event] = []
    config = configure(minutes=1, steps=60, log_every=1)
    result = _train_until(30, config, events.append, slow_down)
    assert result.reason == "time is up"
    assert result.seconds == pytest.approx(60, abs=6)
    said = [event.message for event in events if isinstance(event, Noticed)]
    assert [each for each in said if re.match(r"--minutes 1 suffice for about \d\d steps", each)]
    rates = [event.figures.learning_rate for event in events if isinstance(event, Progress)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0


@pytest.mark.parametrize("used", [29.2, 60.0])
def test_minutes_count_from_the_start_of_the_command(
    configure: Configure, clock: float, used: float
) -> None:
    """The minutes include importing, reading the text and saving the last step."""
    given = configure(minutes=0.5, log_every=1).model_dump(exclude_unset=True)
    del given["steps"]
    events: list[Event] = []
    result = train(TrainingConfig(**given), events.append, clock - used)
    assert result.reason == "time is up"
    assert used < result.seconds < max(30, used) + 0.5
    said = [event.message for event in events if isinstance(event, Noticed)]
    assert any("only one step" in each for each in said) == (used == 60)
    left = any(re.search(r"set-up took 29 s, so \d s of --minutes 0.5 are left", x) for x in said)
    assert left == (used < 30)
    if used == 60:
        assert result.step == 1
    rates = [event.figures.learning_rate for event in events if isinstance(event, Progress)]
    assert rates[0] == 1  # the schedule begins with the first step
    assert summarize(result.run).finished


def test_lengthened_run_reports_and_keeps_the_rise_of_its_learning_rate(
    configure: Configure,
) -> None:
    """How the new warmup is determined is tested in configuration/test_resolve.py."""
    first = train(configure(steps=4, log_every=1, sample_tokens=1)).run
    assert "command that reproduces it" in (first / "latest" / "README.md").read_text()
    events: list[Event] = []
    train(TrainingConfig(out=first, resume=True, steps=24), events.append)
    card = (first / "latest" / "README.md").read_text()
    assert "reproduces" not in card
    assert "The run was extended" in card
    (notice,) = (e.message for e in events if isinstance(e, Noticed) and "longer" in e.message)
    assert "from 0.00 to 1.00" in notice
    rates = [event.figures.learning_rate for event in events if isinstance(event, Progress)]
    assert rates[:3] == pytest.approx([0, 1, 1])
    assert RunDirectory(first).read_training().rewarming is not None


def test_patience_ends_a_run_that_no_longer_improves(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.4, 1.0, *[1.5] * 9])
    monkeypatch.setattr(
        recorder, "validate", lambda *_, **__: ValidationLoss(next(losses), tokens=1, text_bytes=1)
    )
    result = train(configure(steps=100, eval_every=2, checkpoint_every=100, patience=3))
    assert result.reason == "no improvement"
    assert read_checkpoint(result.best).training.step == 4
    assert result.step == 10


@pytest.mark.parametrize("interrupted", [2.1, 1.0])
def test_interruption_does_not_count_for_patience(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: float
) -> None:
    """Guards against a resumed run that ends early because its interruption was evaluated, or
    because that loss was the lowest."""
    losses = iter([3.0, 2.9, 2.8, 2.7, 2.0, interrupted, 1.9, 2.2, 2.3])  # at 0 to 6, 8 and 10
    monkeypatch.setattr(
        recorder, "validate", lambda *_, **__: ValidationLoss(next(losses), tokens=1, text_bytes=1)
    )
    given = configure(steps=100, eval_every=2, checkpoint_every=100, patience=2)
    assert _train_until(5, given).reason == "interrupted"
    result = train(TrainingConfig(out=tmp_path / "run", resume=True))
    assert (result.reason, result.step) == ("no improvement", 10)


def test_every_checkpoint_has_the_chat_template(configure: Configure, tmp_path: Path) -> None:
    """The template is the one at the start of the run or of the latest resume."""
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }} é", encoding="utf-8")
    _train_until(8, configure(chat_template=file))
    paths = [tmp_path / "run" / name for name in ("step-000006", "step-000008", "best")]
    assert [_template(path) for path in paths] == ["{{ messages[0].content }} é"] * 3
    file.write_text("{{ messages }}", encoding="utf-8")
    result = train(TrainingConfig(out=tmp_path / "run", resume=True))
    assert _template(result.checkpoint) == "{{ messages }}"
    file.unlink()
    with pytest.raises(TrainingError, match=r"chat\.jinja cannot be read: "):
        train(TrainingConfig(out=tmp_path / "run", resume=True))


def _template(checkpoint: Path) -> str | None:
    template = read_checkpoint(checkpoint).chat_template
    return None if template is None else template.source


@pytest.mark.parametrize(
    ("written", "sentence"),
    [(b"{% for %}", r"chat\.jinja: line 1 of the chat template: "), (b"\xff", "cannot be read: "),
     (None, "cannot be read: .*No such file")],
)  # fmt: skip
def test_bad_chat_template_is_refused_before_anything_is_written(
    configure: Configure, tmp_path: Path, written: bytes | None, sentence: str
) -> None:
    file = tmp_path / "chat.jinja"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(TrainingError, match=sentence):
        train(configure(chat_template=file))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"preset": "huge"}, TrainingError, "--preset 'huge' is unknown: choose from tiny, small"),
        ({"preset": "gpt2-142m"}, TrainingError, "unknown; did you mean gpt2-124m"),
        ({"n_head": 3}, ConfigError, "d_model 32 is not divisible by n_head 3"),
        ({"data": ("nowhere.txt",)}, DataError, "nowhere.txt is not a file"),
        ({"context_length": 50_000}, DataError, "a window needs 50001"),
        ({"tokenizer": "gpt3", "vocab_size": None}, DataError, "'gpt3'.*'own', one of gpt2"),
    ],
)
def test_impossible_run_is_refused(
    configure: Configure, given: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    config = configure(**given)
    with pytest.raises(error, match=sentence):
        train(config)
    assert config.out is not None
    assert not config.out.exists(), "a second try is not told that the run already exists"


def test_unknown_vocabulary_is_refused_before_the_text_is_opened(configure: Configure) -> None:
    with pytest.raises(DataError, match=r"nowhere\.tiktoken"):
        train(configure(tokenizer="nowhere.tiktoken", vocab_size=None, data=("missing.txt",)))


def test_taken_name_is_refused_before_the_text_is_opened(configure: Configure) -> None:
    """Reading the text and measuring for --minutes are slow and come later."""
    config = configure(data=("is-not-there.txt",))
    assert config.out is not None
    config.out.mkdir()
    (config.out / "run.json").touch()
    with pytest.raises(TrainingError, match=f"{config.out} already exists"):
        train(config)


def test_warning_about_the_speed_of_guards_is_not_shown(configure: Configure) -> None:
    def warn(_: object) -> None:
        warnings.warn("Guards may run slower on Python 3.13.0.", RuntimeWarning, stacklevel=2)

    train(configure(steps=1), warn)


@pytest.mark.first
@pytest.mark.slow
def test_default_recipe_learns_the_built_in_text(tmp_path: Path) -> None:
    """The run takes 60 steps, a twentieth of the default 1,200. After 60 steps, `logitd train`
    reaches 2.43 bits per byte."""
    result = train(TrainingConfig(out=tmp_path / "run", steps=60, sample_tokens=1, threads=1))
    assert result.val_bits_per_byte < 2.55


def test_exploding_loss_ends_the_run_without_a_bad_state(configure: Configure) -> None:
    """The loss explodes but stays finite. Nothing is saved while the loss is far above its lowest
    value."""
    events: list[Event] = []
    config = configure(
        optimizer="adamw",
        matrix_lr=30.0,
        embedding_lr=30.0,
        head_lr=30.0,
        scalar_lr=30.0,
        steps=10_000,
        warmup=2,
        decay="constant",
        checkpoint_every=20,
        eval_every=20,
        log_every=5,
    )
    with pytest.raises(TrainingError, match=r"diverged: since step 5 the smoothed loss"):
        train(config, events.append)
    assert config.out is not None
    assert read_state(config.out / "state" / "state.pt").counters.step == 0
    notices = [event.message for event in events if isinstance(event, Noticed)]
    assert any(each.startswith("step 20 is not saved: the loss is far") for each in notices)
    steps = [event.step for event in events if isinstance(event, Progress)]
    assert steps[-1] < 120


def test_run_killed_before_its_first_save_begins_again(
    configure: Configure, straight: Path, tmp_path: Path
) -> None:
    config = configure(out=tmp_path / "killed")
    with pytest.raises(SystemExit):
        _train_until(3, config, act=lambda _: sys.exit())
    assert train(TrainingConfig(out=config.out, resume=True)).step == 12
    assert _state(straight) == _state(tmp_path / "killed")
    assert _losses(straight) == _losses(tmp_path / "killed")


def test_run_without_its_state_keeps_its_checkpoints(straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "state" / "state.pt").unlink()
    with pytest.raises(TrainingError, match=r"nothing to resume: .*state\.pt does not exist"):
        train(TrainingConfig(out=tmp_path / "run", resume=True))
    assert read_checkpoint(tmp_path / "run" / "latest").training.step == 12


def test_failing_resume_removes_nothing(straight: Path, tmp_path: Path) -> None:
    """The checkpoints after the saved state may be the best of the run."""
    run = tmp_path / "run"
    shutil.copytree(straight, run, symlinks=True)
    document = torch.load(run / "state" / "state.pt", weights_only=True)
    document["counters"]["step"] = 6
    document["weights"].popitem()
    torch.save(document, run / "state" / "state.pt")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(TrainingError, match="does not fit"):
        train(TrainingConfig(out=run, resume=True))
    assert read_checkpoint(run / "latest").training.step == 12
    assert (run / "metrics.jsonl").read_bytes() == before


def test_rising_validation_loss_is_reported_meanwhile_and_at_the_end(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.5, 2.0, 2.5, 2.6, 2.7, 2.8])
    monkeypatch.setattr(
        recorder, "validate", lambda *_, **__: ValidationLoss(next(losses), tokens=1, text_bytes=1)
    )
    events: list[Event] = []
    config = configure(steps=8, eval_every=2, checkpoint_every=100, average=0.0)
    result = train(config, events.append)
    notices = [event.message for event in events if isinstance(event, Noticed)]
    bits = {e.step: e.val_bits_per_byte for e in events if isinstance(e, Evaluated)}
    best = min(bits, key=lambda step: bits[step])
    rising = [step for step in bits if step >= best][:3]
    (meanwhile,) = (each for each in notices if each.startswith("the validation loss rises"))
    assert all(f"{bits[step]:.4f} at step {step}" in meanwhile for step in rising)
    assert notices[-1].startswith(
        f"validation was best at step {best}, with {bits[best]:.4f} bits per byte; "
        f"{8 - best} steps later it is {bits[8]:.4f}"
    )
    assert read_checkpoint(result.best).training.step == best


@pytest.mark.parametrize(
    ("values", "warned"), [({}, True), ({"dropout": 0.1}, False), ({"steps": 15}, False)]
)
def test_many_passes_without_dropout_are_reported_before_the_first_step(
    values: dict[str, Any], warned: bool, configure: Configure, tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text(story(30))
    asked = {"steps": 10_000, "context_length": 8, "val_fraction": 0.3, **values}
    events: list[Event] = []
    train(configure(**asked, data=(str(text),), minutes=1e-6), events.append)
    said = [event.message for event in events if isinstance(event, Noticed)]
    assert any("pass over the text" in each for each in said) is warned
