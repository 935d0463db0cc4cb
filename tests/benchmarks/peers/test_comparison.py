"""A whole comparison of a small model, with each peer in its own process."""

import pytest

from benchmarks.peers import comparison
from benchmarks.peers.__main__ import parse
from benchmarks.peers.comparison import WARM_UP, Plan, compare, rounds_of, summarize
from benchmarks.peers.contract import Run
from benchmarks.peers.report import Result


def plan(*arguments: str) -> Plan:
    small = ("--shape", "small", "--threads", "1", "--prompt", "20", "--steps", "4")
    return parse([*small, "--rounds", "2", "--batches", "1", "3", *arguments])


def test_small_batches_are_measured_more_often() -> None:
    asked = plan("--rounds", "3", "--batches", "1", "8", "32")
    assert [rounds_of(asked, batch) for batch in asked.batches] == [12, 6, 3]


def test_rates_are_medians_of_rounds_without_their_first_steps() -> None:
    rounds = [(1.0, 0.25), (8.0, 0.5), (2.0, 4.0)]
    cold = [100.0] * WARM_UP
    runs = [Run(prefill, [*cold, step, step / 2, 50.0]) for prefill, step in rounds]
    result = summarize(runs, "int8", "us", [[1, 2, 3], [4, 5, 6]], 0.01)
    assert result == Result(
        dtype="int8",
        peer="us",
        batch=2,
        decode_tokens_per_second=2 / 0.5,
        prefill_tokens_per_second=6 / 2.0,
        step_seconds=[0.25, 0.5, 4.0],
        prefill_seconds=[1.0, 8.0, 2.0],
        disagreement=0.01,
    )


@pytest.mark.slow
def test_comparison_refuses_a_peer_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(comparison.LIMITS["gpt2"], "bfloat16", 1e-5)
    with pytest.raises(SystemExit, match=r"logitd.*0\.00"):
        compare(plan("--dtypes", "bfloat16", "--peers", "logitd"))
