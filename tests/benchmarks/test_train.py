"""The comparison with nanoGPT: both models have matrices of the same shapes and train for the same
time, and a later run adds to the saved results."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.train import Run, check, settings
from benchmarks.train_small import fewer
from benchmarks.trained import Outcome, block_matrices
from logitd.model.training.configuration.autosize import SIZES
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve

RUN = Run(minutes=2, side="default", rate=0.03, batch=8, seed=1)
OUTCOME = Outcome(
    last=1.6,
    best=1.6,
    training=1.5,
    passes=1.0,
    steps=600,
    tokens=1_200_000,
    seconds=120.4,
    matrices=100,
    parameters=200,
    vocab_size=512,
    dropout=0.0,
    threads=2,
)


def test_nanogpt_and_logitd_have_the_same_matrices() -> None:
    for size in SIZES:
        found = set()
        for side in ("default", "nanogpt"):
            fields = settings(replace(RUN, side=side), size, (), Path("some.tiktoken"), 1)
            config = TrainingConfig(**fields)
            resolution = resolve(config)
            assert resolution.recipe.matrix_lr == RUN.rate
            assert resolution.recipe.optimizer == ("muon" if side == "default" else "adamw")
            found.add(block_matrices(resolution.model))
        assert found == {12 * size.n_layer * size.d_model**2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 119.0}, "119.0.*120.0"),
        ({"seconds": 125.0}, "125.0.*120.0"),
        ({"matrices": 101}, r"matrices.*\[100, 101\]"),
        ({"threads": 1}, "threads"),
    ],
)
def test_check_refuses_unequal_runs(change: dict[str, float], message: str) -> None:
    nanogpt, theirs = replace(RUN, side="nanogpt"), replace(OUTCOME, last=2.0, parameters=150)
    check([(RUN, OUTCOME), (nanogpt, theirs)])
    with pytest.raises(SystemExit, match=message):
        check([(RUN, OUTCOME), (nanogpt, replace(theirs, **change))])  # type: ignore[arg-type]


def test_our_last_weights_are_compared_with_their_last_and_best() -> None:
    theirs = replace(OUTCOME, last=4.0, best=2.5)
    ours = replace(OUTCOME, last=2.0, best=1.9)
    assert fewer({"adapted": [ours], "long": [theirs]}, "long") == pytest.approx((50, 20))
