"""Notices of a run whose validation loss rises."""

from typing import Any

import pytest

from logitd.model.training.stopping.worsening import EVALUATIONS, ended_worse, worsening


def records(*losses: float, training: bool = True) -> list[dict[str, Any]]:
    """Evaluations every 10 steps, each but the first preceded by a training report."""
    found: list[dict[str, Any]] = []
    for index, loss in enumerate(losses):
        step = 10 * index
        if index and training:
            found.append({"kind": "train", "step": step, "loss": 3.0 - index})
        bits = loss / 2
        found.append({"kind": "eval", "step": step, "val_loss": loss, "val_bits_per_byte": bits})
    return found


def test_two_worse_evaluations_are_reported_once() -> None:
    assert worsening(records(5, 4, 4.5), None) is None
    said = worsening(records(5, 4, 4.5, 4.8), None)
    assert said == (
        "the validation loss rises: 2.0000 at step 10, 2.2500 at step 20, 2.4000 at step 30 bits "
        "per byte, while the training loss fell from 2.000 to 0.000 nats per token: the model is "
        "overfitting. `best`, which is served, stays at step 10; --patience 2 would end such a run"
    )
    assert worsening(records(5, 4, 4.5, 4.8, 4.9), None) is None
    assert worsening(records(5, 4, 4.5, 4.8, 3.9, 4, 4.1), None) is not None  # another row
    assert worsening(records(5, 4, 4.5, 4.6, 4.2), None) is None


def test_notice_leaves_out_overfitting_and_patience_if_they_do_not_apply() -> None:
    rising = [{**each, "loss": 1.0} for each in records(5, 4, 4.5, 4.8)]
    for metrics in (rising, records(5, 4, 4.5, 4.8, training=False)):
        said = worsening(metrics, None)
        assert said is not None
        assert "overfitting" not in said
    said = worsening(records(5, 4, 4.5, 4.8), 3)
    assert said is not None
    assert "--patience" not in said


def test_run_that_never_learned_is_not_reported_as_worse() -> None:
    assert worsening(records(4, 5, 6), None) is None


@pytest.mark.parametrize("losses", [(5,), (5, 4), (5, 4, 4.5, 3.9)])
def test_end_that_is_the_best_has_no_notice(losses: tuple[float, ...]) -> None:
    assert ended_worse(records(*losses)) is None


def test_end_of_a_run_that_got_worse_has_the_numbers() -> None:
    assert ended_worse(records(5, 4, 4.5, 4.8)) == (
        "validation was best at step 10, with 2.0000 bits per byte; 20 steps later it is "
        "2.4000. The link `best`, which is served, points to step 10"
    )
    assert EVALUATIONS == 2
