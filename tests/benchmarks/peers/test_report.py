"""The tables say who is ahead, and leave empty what was not measured."""

from benchmarks.peers.report import Result, report, table


def result(peer: str, batch: int, rate: float, dtype: str = "float32") -> Result:
    return Result(
        dtype=dtype,
        peer=peer,
        batch=batch,
        decode_tokens_per_second=rate,
        prefill_tokens_per_second=2 * rate,
        step_seconds=[batch / rate],
        prefill_seconds=[1.0],
        disagreement=0.0,
    )


def test_the_ratio_is_to_the_best_of_the_others_at_each_batch_size() -> None:
    results = [
        result("us", 1, 150.0),
        result("a", 1, 100.0),
        result("b", 1, 60.0),
        result("us", 8, 1234.5),
        result("a", 8, 500.0),
        result("b", 8, 2469.0),
        result("us", 1, 10.0, dtype="int8"),
    ]
    assert table(results, (1, 8), "us", lambda r: r.decode_tokens_per_second).splitlines() == [
        "| | batch 1 | batch 8 |",
        "|---|---:|---:|",
        "| us, float32 | 150 | 1,234 |",
        "| a, float32 | 100 | 500 |",
        "| b, float32 | 60 | 2,469 |",
        "| *us over the best other, float32* | 1.50 (a) | 0.50 (b) |",
        "| us, int8 | 10 |  |",
        "| *us over the best other, int8* |  |  |",
    ]


def test_both_rates_are_told() -> None:
    text = report([result("us", 1, 150.0), result("a", 1, 100.0)], (1,), "us")
    decode, _, prefill = text.partition("Prefill")
    assert "| a, float32 | 100 |" in decode
    assert "| a, float32 | 200 |" in prefill
