"""Target gap: a small run, whose figures are those of every token that counts."""

import json

import pytest

from benchmarks.target_gap import main


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape", "small", "--clients", "3", "--requests", "2", "--prompt-tokens", "40",
          "--tokens", "9", "--targets", "4x", "1ms", "none"])  # fmt: skip
    said = capsys.readouterr().out
    results = json.loads(said.splitlines()[-1])["results"]
    assert [result["target"] for result in results] == ["4x", "0.001s", "none"]
    assert all(result["tokens_per_second"] > 0 for result in results)
    assert all(result["gap"]["p50"] <= result["gap"]["p99"] for result in results)
    assert said.count("\n| ") == 4


def test_who_has_no_slot_waits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", "small", "--clients", "4", "--requests", "3", "--prompt-tokens", "8",
             "--tokens", "30", "--targets", "none"]  # fmt: skip
    waits = []
    for slots in ("4", "1"):
        main([*flags, "--slots", slots])
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        waits.append(result["first_token"]["p50"])
    assert waits[1] > 2 * waits[0]
