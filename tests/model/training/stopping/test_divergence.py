"""Detection of a run that no longer learns, from its reports."""

import math
from collections.abc import Iterable

import pytest

from logitd.model.training.run.step_log import Figures
from logitd.model.training.stopping.divergence import (
    MARGIN,
    REPORTS,
    SMOOTHING,
    STEPS,
    DivergenceMonitor,
)


def _figures(loss: float, norm: float = 1.0) -> Figures:
    return Figures(loss, 1.0, norm, 1.0, 1.0, 1.0)


def _unsmoothed(smoothed: Iterable[float]) -> list[float]:
    """Losses of reports whose moving average is `smoothed`."""
    values = list(smoothed)
    before = [values[0], *values[:-1]]
    return [
        (value - SMOOTHING * last) / (1 - SMOOTHING)
        for value, last in zip(values, before, strict=True)
    ]


def _watch(
    losses: Iterable[float], *, every: int = 10, warmup: int = 0, first: float = 8.0
) -> list[str | None]:
    """The diagnosis after each report of a run that starts at `first` nats. `losses` are
    smoothed."""
    monitor = DivergenceMonitor(warmup)
    monitor.start(first)
    found = []
    for number, loss in enumerate(_unsmoothed(losses), start=1):
        monitor.observe(number * every, _figures(loss, 1.0))
        found.append(monitor.diagnosis())
    return found


def _first(found: list[str | None]) -> int:
    return next((number for number, each in enumerate(found, start=1) if each), -1)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (3.0, math.nan), (3.0, math.inf)]
)
def test_infinite_number_ends_a_run_at_once(loss: float, norm: float) -> None:
    monitor = DivergenceMonitor(warmup=1000)
    monitor.start(8.0)
    monitor.observe(5, _figures(loss, norm))
    diagnosis = monitor.diagnosis()
    assert diagnosis is not None
    assert diagnosis.startswith(f"training diverged: at step 5 the loss is {loss} and the gradient")


def test_loss_that_stays_above_half_the_way_back_has_exploded() -> None:
    """The first loss is 8 and the best is 4, so a loss above 6 is more than halfway back."""
    down = [8 - 0.2 * index for index in range(21)]
    assert _first(_watch([*down, *[6.1] * 50])) == len(down) + REPORTS
    assert _first(_watch([*down, *[5.9] * 200])) == -1
    assert _first(_watch([*down, *[6.1] * (REPORTS - 1), 5.9, *[6.1] * (REPORTS - 1)])) == -1


def test_loss_that_only_rises_by_a_nat_has_exploded() -> None:
    assert _first(_watch([8 + MARGIN + 0.01] * 50)) == REPORTS
    assert _first(_watch([8 + MARGIN - 0.01] * 200)) == -1


def test_frequent_reports_do_not_shorten_the_wait() -> None:
    assert _first(_watch([20.0] * 300, every=1)) == STEPS + 1


def test_run_is_not_suspect_during_its_warmup() -> None:
    assert _first(_watch([20.0] * 50, warmup=300)) == 30 + REPORTS


def test_falling_loss_is_never_suspect() -> None:
    """One run starts with a loss of 30, as may happen with imported weights; the other overfits to
    zero."""
    assert _first(_watch([30 - 0.5 * index for index in range(50)], first=30)) == -1
    assert _first(_watch([8 * 0.9**index for index in range(200)])) == -1


def test_last_report_has_no_time_to_recover() -> None:
    monitor = DivergenceMonitor(0)
    monitor.start(8.0)
    losses = _unsmoothed([9.5, 8.5])
    monitor.observe(10, _figures(losses[0], 1.0))
    assert monitor.suspect
    assert monitor.diagnosis() is None
    diagnosis = monitor.diagnosis(last=True)
    assert diagnosis == (
        "training diverged: since step 10 the smoothed loss is above 9.00; at step 10 it is "
        "9.50, and its best was 8.00"
    )
    monitor.observe(20, _figures(losses[1], 1.0))
    assert monitor.diagnosis(last=True) is None


def test_resumed_monitor_diagnoses_as_one_monitor() -> None:
    losses = [8.0, 4.0, *[7.0] * 40]
    monitor = DivergenceMonitor(0)
    monitor.start(8.0)
    diagnoses = []
    for number, loss in enumerate(_unsmoothed(losses), start=1):
        again = DivergenceMonitor(0)
        again.restore(monitor.state())
        again.observe(number * 10, _figures(loss, 1.0))
        monitor = again
        diagnoses.append(monitor.diagnosis())
    assert diagnoses == _watch(losses)
    assert _first(diagnoses) == 2 + REPORTS
