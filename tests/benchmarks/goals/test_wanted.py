"""Wanted: figures are found where the benchmarks put them, and judged by their bounds."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.goals.parts import Plan
from benchmarks.goals.wanted import (
    Goal,
    determinism,
    goals,
    judged,
    over_others,
    over_transformers,
    overhead_us,
    share_of_engine,
    share_of_limit,
    table,
    written,
)

BENCH = {
    "engine": {
        "prefill": [{"prompts": 1, "share_of_limit": 0.5}],
        "decode": [{"batch": 1, "share_of_limit": 0.9}, {"batch": 8, "share_of_limit": 0.7}],
    },
    "http": {"decode": [{"batch": 8, "share_of_engine": 0.6}]},
}
PROFILES = {
    "profiles": [
        {"case": "prefill", "batch": 1, "overhead_us": 900.0},
        {"case": "decode", "batch": 1, "overhead_us": 120.0},
        {"case": "decode", "batch": 1, "overhead_us": 140.0},
    ]
}
PEERS = {
    "results": [
        {"peer": peer, "dtype": "int8", "batch": 8, "decode_tokens_per_second": rate,
         "prefill_tokens_per_second": 2 * rate}
        for peer, rate in (("logitd", 30.0), ("llama.cpp", 20.0), ("torch", 10.0))
    ]
}  # fmt: skip
SERVING = {
    "results": [
        {"server": server, "batch": 8, "tokens_per_second": rate}
        for server, rate in (("logitd serve", 30.0), ("transformers serve", 20.0),
                             ("transformers serve, continuous", 15.0))
    ]
}  # fmt: skip


def test_figures_are_found() -> None:
    assert share_of_limit(BENCH, kind="decode", key="batch", value=8) == 0.7
    assert share_of_limit(BENCH, kind="prefill", key="prompts", value=1) == 0.5
    assert share_of_limit(BENCH, kind="decode", key="batch", value=32) is None
    assert share_of_engine(BENCH, batch=8) == 0.6
    assert overhead_us(PROFILES, batch=1) == 120.0
    assert over_others(PEERS, kind="decode", numbers="int8", batch=8) == 1.5
    assert over_others(PEERS, kind="prefill", numbers="float32", batch=8) is None
    assert over_transformers(SERVING, batch=8) == 1.5
    assert over_transformers(SERVING, batch=1) is None
    assert determinism({"native": None}) is None
    assert determinism({"native": {"whole_share": -0.5}}) == -0.5


def test_alone_a_server_is_compared_with_nobody() -> None:
    assert over_transformers({"results": SERVING["results"][:1]}, batch=8) is None
    assert over_others({"results": PEERS["results"][:1]}, kind="decode", numbers="int8",
                      batch=8) is None  # fmt: skip


@pytest.mark.parametrize(
    ("at_least", "figure", "reached"),
    [(True, 0.5, True), (True, 0.4, False), (False, 0.5, True), (False, 0.6, False)],
)
def test_bounds_belong_to_what_is_reached(at_least: bool, figure: float, reached: bool) -> None:
    goal = Goal("g", "p", lambda found: found["x"], 0.5, "share", at_least)
    row = judged(goal, {"p": {"found": {"x": figure}}})
    assert (row["measured"], row["reached"]) == (figure, reached)
    assert f"| {'yes' if reached else 'no'} |" in table([row])


@pytest.mark.parametrize("results", [{}, {"p": {"found": None}}, {"p": {"found": {"x": None}}}])
def test_what_was_not_measured_is_not_reached(results: Any) -> None:
    row = judged(Goal("g", "p", lambda found: found["x"], 0.5, "share"), results)
    assert (row["measured"], row["reached"]) == (None, None)
    assert table([row]).endswith("| g | >= 50% |  | not measured |")


def test_the_whole_table_of_one_result(tmp_path: Path) -> None:
    plan = Plan(tmp_path, threads=1, peer_python=None, small=True)
    rows = [judged(goal, {"bench-small-int8": {"found": BENCH}}) for goal in goals(plan)]
    assert [row["measured"] for row in rows if row["measured"] is not None] == [0.9]
    assert len(table(rows).splitlines()) == 2 + len(rows)


def test_figures_are_written_in_their_units() -> None:
    found = (written(0.123, "share"), written(1.5, "ratio"), written(9.96, "s"),
             written(1234.5, "us"), written(314.0, "MB"))  # fmt: skip
    assert found == ("12%", "1.50", "10.0 s", "1,234 us", "314 MB")
