"""A whole comparison of a small model, peers in processes of their own."""

import pytest

from benchmarks.peers import comparison
from benchmarks.peers.__main__ import parse
from benchmarks.peers.comparison import Plan, compare
from benchmarks.peers.process import PeerMissing


def plan(*arguments: str) -> Plan:
    small = ("--shape", "small", "--threads", "1", "--prompt", "20", "--steps", "4")
    return parse([*small, "--rounds", "2", "--batches", "1", "3", *arguments])


def test_peers_are_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(comparison.MODULES, "llama.cpp", "nobody")
    peers = ("--peers", "logitd", "torch", "llama.cpp")
    results = compare(plan("--dtypes", "float32", "int8", *peers))
    assert [(r.dtype, r.peer, r.batch) for r in results] == [
        ("float32", "logitd", 1),
        ("float32", "torch", 1),
        ("float32", "logitd", 3),
        ("float32", "torch", 3),
        ("int8", "logitd", 1),
        ("int8", "logitd", 3),
    ]
    for result in results:
        assert len(result.step_seconds) == len(result.prefill_seconds) == 2
        slow, fast = max(result.step_seconds), min(result.step_seconds)
        assert result.batch / slow <= result.decode_tokens_per_second <= result.batch / fast
        slow, fast = max(result.prefill_seconds), min(result.prefill_seconds)
        assert 20 * result.batch / slow <= result.prefill_tokens_per_second
        assert result.prefill_tokens_per_second <= 20 * result.batch / fast
    said = capsys.readouterr().out
    assert "float32: llama.cpp is left out: No module named 'benchmarks.peers.nobody'" in said
    assert "float32: torch is torch 2." in said


def test_whoever_computes_something_else_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.LIMITS, "bfloat16", 1e-5)
    with pytest.raises(SystemExit, match=r"logitd computes something else: off by 0\.00"):
        compare(plan("--dtypes", "bfloat16", "--peers", "logitd"))


def test_without_logitd_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.MODULES, "logitd", "nobody")
    with pytest.raises(PeerMissing, match="nobody"):
        compare(plan("--dtypes", "int8", "--peers", "logitd"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--prompt", "55"), "take up to 67 positions, and the shape has 64"),
        (("--peers", "torch"), "names whom logitd is compared with"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(*arguments)
    assert reason in capsys.readouterr().err
