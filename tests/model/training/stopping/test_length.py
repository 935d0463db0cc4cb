"""The completed share of a run, by steps and by the clock."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.training.configuration.presets import PRESETS, Recipe
from logitd.model.training.optim.schedule import lr_scale
from logitd.model.training.stopping.length import Counters, Length


@pytest.mark.parametrize(
    ("length", "counters", "done", "left"),
    [
        (Length(100, None), Counters(step=25, seconds=9.0), 0.25, math.inf),
        (Length(None, 1), Counters(), 0.0, 60.0),
        (Length(None, 1), Counters(step=1, seconds=30.0), 0.5, 30.0),
        # 60 s less 10 s of setup and 5 s of saving leave 45 s for steps.
        (Length(None, 1), Counters(step=1, seconds=10.0, setup=10.0, ending=5.0), 0.0, 45.0),
        (Length(None, 1), Counters(step=2, seconds=19.0, setup=10.0, ending=5.0), 0.2, 36.0),
        (Length(None, 1), Counters(step=9, seconds=55.0, setup=10.0, ending=5.0), 1.0, 0.0),
        (Length(None, 1), Counters(step=9, seconds=70.0, setup=10.0, ending=5.0), 1.0, -15.0),
        (Length(None, 1), Counters(step=1, seconds=70.0, setup=70.0), 1.0, -10.0),
        (Length(4, 1), Counters(step=3, seconds=30.0), 0.75, 30.0),
        # A planned share counts for the minutes for which it was planned. Steps are half as fast
        # as at the latest checkpoint, so the ending takes twice as long.
        (Length(None, 1), Counters(step=3, seconds=30.0, share=0.4, minutes=1), 0.4, 30.0),
        (Length(None, 2), Counters(step=3, seconds=30.0, share=0.4, minutes=1), 0.25, 90.0),
        (Length(9, 1), Counters(step=3, ending=5.0, pace=2.0, ending_pace=1.0), 1 / 3, 50.0),
        (Length(9, 1), Counters(step=3, ending=5.0, pace=9.0, ending_pace=1.0), 1 / 3, 49.0),
    ],
)
def test_done_excludes_setup_and_reserves_the_end(
    length: Length, counters: Counters, done: float, left: float
) -> None:
    assert length.done(counters) == pytest.approx(done)
    assert length.clock_left(counters) == pytest.approx(left)


@dataclass(frozen=True)
class Simulated:
    """A run whose clock is a number.

    seconds   time of the whole run
    scales    learning rate of each step, as a share of the peak
    expected  pairs of the seconds so far and the seconds left, as expected after each step
    """

    seconds: float
    scales: list[float]
    expected: list[tuple[float, float]]


def simulate(
    length: Length, recipe: Recipe, times: list[float], *, setup: float = 0.0, saving: float = 0.0
) -> Simulated:
    """Simulate a run by the trainer's rules. The given step times are repeated as often as needed.
    Every 20th step is followed by an evaluation that takes a fifth of that step's time. Saving
    before the first step takes `saving` seconds. If steps have become slower by some factor, the
    last save is slower by the same factor."""
    counters = Counters(seconds=setup, setup=setup).saved(saving)
    tasks, scales, expected = 0.2 * times[0] / 20, list[float](), list[tuple[float, float]]()
    while not length.is_over(counters):
        took = times[counters.step % len(times)]
        planned = length.plan(counters, tasks)
        scales.append(lr_scale(recipe, counters.step, length.done(planned)))
        warm = counters.step > 0
        counters = planned.stepped(planned.seconds + took, 1, warm=warm)
        if not warm:
            counters = replace(counters, setup=setup + took)
        elif counters.step % 20 == 0:
            counters = replace(counters, seconds=counters.seconds + took / 5)
        pace = counters.pace or took
        expected.append((counters.seconds, length.seconds_left(counters, pace, tasks)))
    taken = [times[step % len(times)] for step in range(counters.step)]
    slow = fmean(taken[-10:]) / fmean(taken[:10])
    return Simulated(counters.seconds + saving * slow, scales, expected)


STEP_TIMES = st.lists(st.floats(0.1, 1.0), min_size=1, max_size=200)
"""Step times in seconds, which differ by a factor of up to 10."""


@given(STEP_TIMES, st.sampled_from(["linear", "cosine"]), st.floats(0.0, 20.0), st.floats(0.0, 1.0))
@example([0.1] * 250 + [1.0] * 250, "linear", 0.0, 1.0)  # slow in the second half
@example([1.0] * 20 + [0.1] * 900, "linear", 5.0, 1.0)  # fast after the beginning
@example([0.1] * 540 + [1.0] * 60, "linear", 0.0, 0.0)  # slow in the last tenth
def test_minutes_end_a_run_in_time_with_the_last_learning_rate(
    times: list[float], decay: str, setup: float, saving: float
) -> None:
    recipe = replace(PRESETS["tiny"].recipe, decay=decay, final_lr=0.1, warmup=3)  # type: ignore[arg-type]
    run = simulate(Length(None, 1), recipe, times, setup=setup, saving=saving)
    assert 0.8 * 60 < run.seconds < 1.2 * 60
    assert run.scales[-1] == pytest.approx(0.1)
    peak = run.scales.index(max(run.scales))
    assert all(after <= before for before, after in pairwise(run.scales[peak:]))


@given(st.floats(0.05, 0.3), st.booleans(), st.floats(0.0, 3.0))
def test_time_left_is_right_after_a_tenth(took: float, by_clock: bool, saving: float) -> None:
    length = Length(None, 1) if by_clock else Length(200, None)
    run = simulate(length, PRESETS["tiny"].recipe, [took], saving=saving)
    for now, left in run.expected:
        if now > 0.1 * run.seconds:
            assert left == pytest.approx(run.seconds - now, rel=0.2, abs=2 * took)


def test_run_on_a_steady_machine_decays_evenly() -> None:
    """If every step takes the same time, a run limited by time has the same schedule as a run with
    a fixed number of steps."""
    recipe = PRESETS["tiny"].recipe
    by_clock = simulate(Length(None, 1), recipe, [0.5]).scales
    steps = len(by_clock)
    assert steps in range(118, 122)
    by_steps = simulate(Length(steps, None), recipe, [0.5]).scales
    assert by_clock == pytest.approx(by_steps, abs=3 / steps / recipe.cooldown)
