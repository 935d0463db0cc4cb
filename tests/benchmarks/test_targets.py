"""Targets: judged by their bounds, and written in their units."""

import pytest

from benchmarks.targets import Target, table, written


@pytest.mark.parametrize(
    ("at_least", "figure", "reached"),
    [(True, 0.5, True), (True, 0.4, False), (False, 0.5, True), (False, 0.6, False)],
)
def test_a_bound_belongs_to_what_is_reached(at_least: bool, figure: float, reached: bool) -> None:
    target = Target("t", figure, 0.5, "share", at_least)
    assert target.reached is reached
    assert target.json()["reached"] is reached
    assert f"| {'yes' if reached else 'no'} |" in table([target])


def test_what_was_not_measured_is_not_reached() -> None:
    target = Target("t", None, 0.5, "share")
    assert target.reached is None
    assert table([target]).endswith("| t | >= 50% |  | not measured |")


def test_figures_are_written_in_their_units() -> None:
    found = (written(0.123, "share"), written(1.5, "ratio"), written(9.96, "s"),
             written(1234.5, "us"), written(314.0, "MB"))  # fmt: skip
    assert found == ("12%", "1.50", "10.0 s", "1,234 us", "314 MB")
