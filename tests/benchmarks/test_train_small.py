"""Comparison on a small text: the same size and steps, another recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.train_small import fewer, of_passes
from logitd.model.training.configuration.autosize import SIZES
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve
from tests.benchmarks.test_train import OUTCOME
from tests.model.conftest import story


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(story(400))
    return path


def test_configurations_have_one_size_and_the_same_steps(text: Path) -> None:
    asked = TrainingConfig(data=(str(text),), minutes=2)
    adapted, long = (of_passes(side, asked, 2, 6.0) for side in ("adapted", "long"))
    assert adapted.steps == long.steps
    assert adapted.minutes is None
    tokens = (long.steps or 0) * SIZES[2].batch_size * SIZES[2].context_length
    assert tokens == pytest.approx(6 * 0.9 * text.stat().st_size / 2.65, rel=0.2)
    assert (adapted.vocab_size, long.vocab_size) == (512, SIZES[2].vocab_size)
    models = [resolve(config).model for config in (adapted, long)]
    assert len({(model.n_layer, model.d_model, model.context_length) for model in models}) == 1
    few = [of_passes(side, asked, 2, 1.0) for side in ("adapted", "long")]
    assert few[0] == few[1]


def test_our_last_weights_are_compared_with_their_last_and_best() -> None:
    theirs = replace(OUTCOME, last=4.0, best=2.5)
    ours = replace(OUTCOME, last=2.0, best=1.9)
    assert fewer({"adapted": [ours], "long": [theirs]}, "long") == pytest.approx((50, 20))
