"""Real servers under a small load, from the command line to the table."""

import json
from pathlib import Path

import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.real import measure, overhead_of
from benchmarks.fleet.simulate import Load, StepTimes, arrivals
from tests.service.serving import serving

BENCH = {
    "engine": {
        "prefill": [{"tokens_per_second": 5000.0}],
        "decode": [{"batch": 1, "tokens_per_second": 500.0}],
    }
}


def test_every_request_is_answered_and_timed(checkpoint_path: Path) -> None:
    load = Load(rate=60, prompt_tokens=30, tokens=9)
    with serving(checkpoint_path) as one, serving(checkpoint_path) as other:
        urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
        outcome = measure(urls, load, arrivals(load, 30, seed=1))
        assert overhead_of(urls[0], StepTimes(0.0, ((1, 0.0),)), load) > 0
        served = [server.sample("logitd_generation_tokens_total") for server in (one, other)]
    assert (outcome.rejected, outcome.tokens) == (0, 270)
    assert len(outcome.first_tokens) == 30
    assert 0 < outcome.first_tokens[0] <= outcome.quantile(0.95)
    assert outcome.inter_token >= 0
    assert sum(served) == 270 + 8 * 9
    assert min(served) > 0, "both had some"


def test_the_table_has_a_line_for_each_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    flags = ["fleet", str(tmp_path / "bench.json"), "--rates", "1,50", "--replicas", "1,2"]
    monkeypatch.setattr("sys.argv", flags)
    assert fleet.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    assert [(case["replicas"], case["rate"]) for case in found] == [
        (1, 1),
        (1, 50),
        (2, 1),
        (2, 50),
    ]
    assert found[1]["first_token_p95"] > found[3]["first_token_p95"] > found[2]["first_token_p95"]
    assert {case["how"] for case in found} == {"predicted"}


@pytest.mark.slow
def test_predicted_and_measured_stand_beside_each_other(
    checkpoint_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    flags = ["fleet", str(tmp_path / "bench.json"), "--rates", "20", "--replicas", "2",
             "--against-real", "--checkpoint", str(checkpoint_path), "--requests", "20",
             "--prompt-tokens", "30", "--tokens", "8"]  # fmt: skip
    monkeypatch.setattr("sys.argv", flags)
    assert fleet.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    assert [case["how"] for case in found] == ["predicted", "measured"]
    assert found[1]["rejected"] == 0
    assert found[1]["tokens_per_second"] > 0
