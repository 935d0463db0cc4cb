"""The share of a run that is done, by steps and by the clock."""

import math

import pytest

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
        (Length(None, 1), Counters(step=1, seconds=70.0, setup=70.0), 0.0, -10.0),
        (Length(4, 1), Counters(step=3, seconds=30.0), 0.75, 30.0),
    ],
)
def test_done_excludes_setup_and_reserves_the_end(
    length: Length, counters: Counters, done: float, left: float
) -> None:
    assert length.done(counters) == pytest.approx(done)
    assert length.clock_left(counters) == pytest.approx(left)
