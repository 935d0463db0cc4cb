"""What is compared with nanoGPT: equal matrices, equal seconds, and files that can be continued."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.train import (
    Outcome,
    Results,
    Run,
    block_matrices,
    check,
    settings,
    smaller,
    summary,
    table,
)
from logitd.model.training.configuration.autosize import SIZES
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve

RUN = Run(minutes=2, side="default", rate=0.03, batch=8, seed=1)
OUTCOME = Outcome(
    run=RUN,
    bits_per_byte=1.6,
    seconds=120.4,
    steps=600,
    tokens=1_200_000,
    matrices=100,
    parameters=200,
    threads=2,
)
NANOGPT = replace(OUTCOME, run=replace(RUN, side="nanogpt"), bits_per_byte=2.0, parameters=150)


def test_both_sides_have_the_same_matrices_at_every_size() -> None:
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


def test_the_smaller_size_has_the_same_windows() -> None:
    assert smaller(SIZES[3]).d_model < SIZES[3].d_model
    assert smaller(SIZES[5]).context_length == SIZES[5].context_length


def test_a_file_of_results_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add_size(2, SIZES[2])
    first.add(OUTCOME)
    again = Results(path)
    assert again.sizes == {2: SIZES[2]}
    assert again.outcomes == {RUN: OUTCOME}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seconds": 119.0}, "took 119.0 s of 120.0"),
        ({"seconds": 125.0}, "took 125.0 s of 120.0"),
        ({"matrices": 101}, r"the block matrices are not equal: \[100, 101\]"),
        ({"threads": 1}, "the same threads"),
    ],
)
def test_what_cannot_be_compared_is_not(change: dict[str, float], sentence: str) -> None:
    check([OUTCOME, NANOGPT])
    with pytest.raises(SystemExit, match=sentence):
        check([OUTCOME, replace(NANOGPT, **change)])  # type: ignore[arg-type]


def test_only_the_smaller_one_may_have_other_matrices() -> None:
    check([OUTCOME, replace(NANOGPT, run=replace(RUN, side="nanogpt smaller"), matrices=50)])


def test_the_table_says_how_many_percent_fewer() -> None:
    default = [OUTCOME, replace(OUTCOME, bits_per_byte=1.4)]
    summaries = [summary(default, default), summary([NANOGPT], default)]
    assert summaries[0]["spread"] == pytest.approx(0.2)
    assert summaries[1]["fewer"] == pytest.approx(25)
    lines = table(summaries).splitlines()
    assert "1.6000, 1.4000 | 1.5000 | 0.2000 |  |" in lines[2]
    assert "2.0000 | 2.0000 | 0.0000 | 25.0 % |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
