"""The model and the recipe that the option `--minutes` chooses."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.device import Placement
from logitd.model.training.configuration.autosize import (
    DROPOUT,
    FEW,
    FIRST_MEASURED,
    MEASURING,
    SIZES,
    TOKENS_PER_PARAMETER,
    USABLE,
    Choice,
    Size,
    autosize,
    bytes_per_token,
    dropout_of,
    passes,
    resolve_size,
    search,
    suit_text,
    wants_size,
)
from logitd.model.training.configuration.command_line import command
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.resolve import ResolvedTraining, resolve
from logitd.model.training.events import Event, Noticed
from logitd.model.training.setup import measure
from logitd.model.training.trainer import train
from logitd.model.transformer.size import count_elements
from tests.model.conftest import story

CANDIDATES = {size: resolve_size(TrainingConfig(), size) for size in SIZES}
MODELS = {size: candidate.model for size, candidate in CANDIDATES.items()}
FLOPS = {size: candidate.operations_per_token for size, candidate in CANDIDATES.items()}
MATRICES = {size: count_elements(model).block_matrices for size, model in MODELS.items()}
ONE_CORE = 7.2e10
"""Training speed, in operations per second, of the core on which the sizes were compared: 1.84
million tokens of 6.7 million operations each in 170 s."""


def _chosen(seconds: float, operations: float = ONE_CORE) -> Choice:
    """The choice for a machine with one rate for all sizes, without measuring."""
    return search(
        seconds, CANDIDATES, lambda run: operations / run.operations_per_token, lambda: 0.0
    )


def test_each_size_is_a_step_larger_than_the_one_before() -> None:
    matrices = list(MATRICES.values())
    ratios = [above / below for below, above in pairwise(matrices)]
    assert all(1.3 < ratio < 3.5 for ratio in ratios)
    assert all(size.d_model % size.n_head == 0 for size in SIZES)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(75, (4, 128)), (170, (4, 128)), (2 * 1800, (6, 256)), (0.5, (2, 64)), (1e12, (16, 1024))],
)
def test_chosen_size_is_the_one_that_measured_best(
    seconds: float, expected: tuple[int, int]
) -> None:
    # Half an hour of two cores counts as an hour of one.
    size = _chosen(seconds).size
    assert (size.n_layer, size.d_model) == expected


def test_more_time_or_speed_never_chooses_a_smaller_model() -> None:
    indices = [SIZES.index(_chosen(10 * 1.5**n).size) for n in range(36)]
    assert indices == sorted(indices)
    assert indices[0] < 3
    assert indices[-1] == len(SIZES) - 1
    assert _chosen(600, 6 * ONE_CORE).size == _chosen(3600).size


def test_chosen_model_sees_enough_tokens_and_the_next_would_not() -> None:
    for seconds in (60.0, 300.0, 7200.0):
        choice = _chosen(seconds)
        index = SIZES.index(choice.size)
        tokens = seconds * USABLE * choice.tokens_per_second
        assert tokens >= TOKENS_PER_PARAMETER * MATRICES[choice.size]
        above = SIZES[index + 1]
        fewer = tokens * FLOPS[choice.size] / FLOPS[above]
        assert fewer < TOKENS_PER_PARAMETER * MATRICES[above]


def test_measured_speed_overrides_the_expected_one() -> None:
    # A machine that is slow with all sizes except the first.
    def measure(run: ResolvedTraining) -> float:
        fast = ONE_CORE * (20 if run is CANDIDATES[FIRST_MEASURED] else 0.5)
        return fast / run.operations_per_token

    choice = search(600, CANDIDATES, measure, lambda: 0.0)
    assert len(choice.speeds) >= 2
    assert choice.size.d_model < _chosen(600, 20 * ONE_CORE).size.d_model


def test_measuring_stays_within_its_share() -> None:
    seconds, now = 60.0, 0.0
    spent: list[float] = []

    def take(run: ResolvedTraining) -> float:
        nonlocal now
        speed = 1e12 / run.operations_per_token
        spent.append(4 * run.tokens_per_step / speed)
        now += spent[-1] + 1.0  # building a model takes a second
        return speed

    choice = search(seconds, CANDIDATES, take, lambda: now)
    assert len(spent) == len(choice.speeds)
    assert sum(spent[1:]) + len(spent[:-1]) <= MEASURING * seconds


class _Clock:
    """A clock on which another process slows steps 2 and 3 by a factor of ten."""

    def __init__(self, step_seconds: float) -> None:
        self._now, self._looks, self._step_seconds = 0.0, 0, step_seconds

    def __call__(self) -> float:
        """Return the time. The clock advances by one step just before readings 4, 7, 10 and so
        on."""
        self._looks += 1
        if self._looks > 1 and self._looks % 3 == 1:
            step = self._looks // 3
            self._now += self._step_seconds * (10 if step in (2, 3) else 1)
        return self._now


@pytest.mark.parametrize(("step_seconds", "said"), [(0.01, 0.01), (3.0, 30.0), (20.0, 200.0)])
def test_measurement_ignores_a_short_disturbance_if_there_is_time_for_more_steps(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, said: float
) -> None:
    # Once three steps were measured, and two disturbed ones decided the size of the run.
    monkeypatch.setattr(
        "logitd.model.training.setup.measure.time.perf_counter", _Clock(step_seconds)
    )
    candidate = resolve_size(TrainingConfig(context_length=16, batch_size=1), SIZES[0])
    placement = Placement(torch.device("cpu"), torch.float32, 1)
    speed = measure.measure(candidate, placement, 600.0)
    tokens = candidate.recipe.batch_size * candidate.model.context_length
    assert speed == pytest.approx(tokens / said)


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        TrainingConfig(minutes=5, preset="small"),
        TrainingConfig(minutes=5, preset="tiny"),
        TrainingConfig(minutes=5, d_model=64),
        TrainingConfig(minutes=5, steps=10),
        TrainingConfig(minutes=5, from_checkpoint=Path("base")),
    ],
)
def test_given_preset_size_or_base_disables_autosizing(config: TrainingConfig) -> None:
    assert not wants_size(config, 1)


def test_autosizing_refuses_several_processes() -> None:
    assert wants_size(TrainingConfig(minutes=5), 1)
    with pytest.raises(TrainingError, match="there are 2: set --preset"):
        wants_size(TrainingConfig(minutes=5), 2)


def test_given_values_stay() -> None:
    size = SIZES[3]
    config = TrainingConfig(minutes=5, context_length=64, batch_size=3, eval_every=7)
    chosen = _autosized(config, 1e6, 10**9, size=size)[0]
    assert (chosen.context_length, chosen.batch_size, chosen.eval_every) == (64, 3, 7)
    assert (chosen.n_layer, chosen.d_model, chosen.vocab_size) == (4, 192, 2048)
    assert chosen.checkpoint_every == round(0.4 * 1e6 / (64 * 3))
    published = resolve_size(TrainingConfig(tokenizer="gpt2"), size, 50_257)
    assert published.config.vocab_size is None
    assert published.model.vocab_size == 50_257
    assert MATRICES[size] == 1769856


def test_run_keeps_its_chosen_size_and_resumes_without_measuring(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainingConfig(
        minutes=0.01, data=(str(story_file),), threads=1, context_length=32, sample_tokens=2
    )
    events: list[Event] = []
    result = train(config, events.append)
    assert result.reason == "time is up"
    assert result.run == Path("runs/0.01-minutes")
    notices = [event.message for event in events if isinstance(event, Noticed)]
    assert sum("measured" in each for each in notices) == 1
    described = json.loads((result.run / "run.json").read_text())
    first = TrainingConfig(**described["config"])
    assert (first.n_layer, first.d_model) == (SIZES[0].n_layer, SIZES[0].d_model)
    assert described["model"]["d_model"] == SIZES[0].d_model
    assert first.run_name == "0.01-minutes"
    assert "--d-model 64" in command(first)
    assert first.given().keys() >= {"n_layer", "batch_size", "eval_every", "minutes"}
    monkeypatch.setattr(measure, "measure", None)  # measuring now would fail
    again = train(
        TrainingConfig(minutes=10, steps=result.step + 2, resume=True, out=result.run, threads=1),
        events.append,
    )
    assert (again.reason, again.step) == ("finished", result.step + 2)


def _choice(
    asked: TrainingConfig, tokens: float, published: int | None = None, size: Size = SIZES[2]
) -> Choice:
    """The choice of `size` (by default `tiny`) for a run of this many tokens."""
    return Choice(size, resolve_size(asked, size, published), 1.0, tokens, {})


def _autosized(
    asked: TrainingConfig,
    tokens: float,
    text_bytes: int,
    published: int | None = None,
    size: Size = SIZES[2],
) -> tuple[TrainingConfig, str]:
    """The settings of `size` for a text of `text_bytes`, and the end of the notice."""
    choice = _choice(asked, tokens, published, size)
    training, notice = autosize(asked, choice, text_bytes)
    return training.config, notice.partition("batches of")[2].partition("\n")[2]


@given(st.floats(1e3, 1e9), st.integers(1, 10**10))
def test_only_a_short_text_changes_the_recipe(tokens: float, text_bytes: int) -> None:
    # A text that is passed at most FEW times gets the same configuration, hence the same bits.
    config, said = _autosized(TrainingConfig(minutes=2), tokens, text_bytes)
    often = passes(tokens, 0.9 * text_bytes, 1024)
    if often <= FEW * 0.999:
        assert said == ""
        assert "dropout" not in config.given()
        assert config.vocab_size == 1024
    elif often > FEW * 1.001:
        assert said
        assert config.vocab_size == 512
        assert (config.dropout or 0.0) == dropout_of(passes(tokens, 0.9 * text_bytes, 512), 512)
    before, _ = _autosized(TrainingConfig(minutes=2), tokens, 10**13)
    same = {"vocab_size", "dropout"}
    assert {k: v for k, v in config.given().items() if k not in same} == {
        k: v for k, v in before.given().items() if k not in same
    }


def test_recipe_of_a_long_text_has_these_values() -> None:
    # Changing any of these changes the bits of all runs.
    config, _ = _autosized(TrainingConfig(minutes=2), 1e6, 10**9)
    training = resolve(config)
    recipe, model = training.recipe, training.model
    rates = (recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr, recipe.scalar_lr)
    assert rates == (0.035, 0.1, 0.004, 0.01)
    assert (recipe.weight_decay, recipe.vocab_size, recipe.batch_size) == (0.0, 1024, 2)
    assert (recipe.decay, recipe.cooldown, recipe.warmup, recipe.clip) == ("linear", 0.6, 0, 0.0)
    assert (model.dropout, model.value_embeddings, model.tied_head) == (0.0, "all", False)
    assert (model.n_layer, model.d_model, model.context_length) == (4, 128, 1024)
    assert recipe.short_windows == 0.7


def test_short_text_keeps_given_fields() -> None:
    config, said = _autosized(TrainingConfig(minutes=2, vocab_size=2000), 1e6, 10**5)
    assert (config.vocab_size, config.dropout) == (2000, 0.3)
    assert said == "the run passes over the text about 35 times, so it uses dropout 0.3"
    config, said = _autosized(TrainingConfig(minutes=2, dropout=0.0), 1e6, 10**5)
    assert (config.vocab_size, config.dropout) == (512, 0.0)
    assert said == (
        "the run passes over the text about 23 times (29 with a vocabulary of 1,024), so it uses a "
        "vocabulary of 512"
    )
    both = TrainingConfig(minutes=2, dropout=0.0, vocab_size=2000)
    config, said = _autosized(both, 1e6, 10**5)
    assert (config.vocab_size, config.dropout) == (2000, 0.0)
    assert said == "the run passes over the text about 35 times"
    published = TrainingConfig(minutes=2, tokenizer="gpt2")
    config, said = _autosized(published, 1e6, 10**6, published=50_257)
    assert (config.vocab_size, config.dropout) == (None, 0.1)


def test_recipe_of_a_short_text_is_reported_recorded_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure, "measure", lambda *_: 13_000.0
    )  # no matter how busy the machine is
    text = tmp_path / "short.txt"
    text.write_text(story(20))
    events: list[Event] = []
    config = TrainingConfig(
        minutes=0.01, data=(str(text),), threads=1, context_length=8, val_fraction=0.4,
        sample_tokens=1, out=tmp_path / "run",
    )  # fmt: skip
    result = train(config, events.append)
    notices = [event.message for event in events if isinstance(event, Noticed)]
    (said,) = (each for each in notices if "passes over the text about" in each)
    described = json.loads((result.run / "run.json").read_text())
    assert described["model"]["dropout"] == described["config"]["dropout"] > 0
    assert said.endswith(f"a vocabulary of 512 and dropout {described['model']['dropout']:g}")
    assert described["recipe"]["vocab_size"] == 512
    assert f"--dropout {described['model']['dropout']:g}" in command(
        TrainingConfig(**described["config"])
    )


VOCABULARIES = st.integers(257, 200_000)
TOKENS = st.floats(1, 1e12)
BYTES = st.floats(1, 1e12)


@given(VOCABULARIES, VOCABULARIES)
def test_bytes_per_token_rise_with_the_vocabulary(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert 1 <= bytes_per_token(smaller) <= bytes_per_token(larger) <= 5


def test_bytes_per_token_interpolate_by_the_logarithm() -> None:
    assert [bytes_per_token(size) for size in (257, 512, 1024, 16_384)] == [1, 2.05, 2.65, 4.4]
    assert math.isclose(bytes_per_token(round(1024 * math.sqrt(2))), (2.65 + 3.2) / 2, rel_tol=1e-3)


@given(TOKENS, BYTES, VOCABULARIES, st.booleans(), st.floats(1, 1000))
def test_more_passes_never_weaken_the_changes(
    tokens: float, train_bytes: float, vocab_size: int, learned: bool, times: float
) -> None:
    few, notice = suit_text({}, vocab_size, tokens, train_bytes, learned=learned)
    enough = 0.9 * _choice(TrainingConfig(), tokens, vocab_size).enough_bytes
    if not 0.999 < train_bytes / enough < 1.001:
        assert bool(notice) is (train_bytes < enough)
    if not notice:
        assert few == {}
        return
    smaller = min(vocab_size, 512) if learned else vocab_size
    assert few.get("vocab_size", vocab_size) == smaller
    assert few.get("dropout", 0.0) == dropout_of(passes(tokens, train_bytes, smaller), smaller)
    many, _ = suit_text({}, vocab_size, times * tokens, train_bytes, learned=learned)
    assert many.get("vocab_size") == few.get("vocab_size")
    assert many.get("dropout", 0.0) >= few.get("dropout", 0.0)


def test_dropout_rises_with_passes_and_begins_earlier_with_a_large_vocabulary() -> None:
    for index, (least, share) in enumerate(DROPOUT):
        assert dropout_of(least * 1.01, 512) == dropout_of(least * 1.01, 1024) == share
        assert dropout_of(least, 512) == (DROPOUT[index - 1][1] if index else 0)
    assert dropout_of(FEW, 1024) == 0
    assert dropout_of(FEW * 1.01, 1024) == DROPOUT[0][1]
    assert dropout_of(1e9, 512) == DROPOUT[-1][1] < 0.5
