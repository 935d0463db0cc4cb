"""Report: shares are what they say, and lines and JSON tell the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from logitd.model.benchmark.in_process import DecodeFigures, EngineFigures, PrefillFigures
from logitd.model.benchmark.machine import Machine, Surroundings
from logitd.model.benchmark.spread import Spread
from logitd.model.benchmark.work import Work
from logitd.model.benchmark.workload import Workload
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.version import VERSION
from logitd.service.cli.commands.benchmark.load import DecodeLoad, Failure, HttpFigures, PrefillLoad
from logitd.service.cli.commands.benchmark.report import HttpMeasured, Measured, lines, summary
from logitd.service.client import Checkpoint, Info

WORKLOAD = Workload(
    batches=(2,), prompt_tokens=100, tokens=20, rounds=3, vocab_size=257, prefill_chunk=256
)
ENGINE = EngineFigures(
    prefill=(PrefillFigures(1, tokens_per_second=400.0, work=Work(500.0, 400.0)),),
    decode=(
        DecodeFigures(2, tokens_per_second=50.0, step=Spread(0.04, 0.06), steps=30,
                      work=Work(2000.0, 100.0)),
    ),
)  # fmt: skip
"""On a machine of 100,000 bytes and 4,000 operations a second: a prefill of 0.1 s by its
operations, a step of 0.025 s by its operations too (0.02 s by its bytes)."""
INFO = Info(
    vocabulary="bpe",
    version="9.9", model="m", models=(),
    checkpoint=Checkpoint("m", 1, None, "abc"), config={}, training={},
    parameters=1,
    device="cpu (X)", decoding="torch", kernels=None, dtype="float32", threads=2, slots=2,
    kv_cache_bytes=1, prefill_chunk=256, target_gap="none", quantization=None, speculate="none",
    api_keys=False, limits={}, request_id="r",
)  # fmt: skip


def http(
    *failures: Failure, unlike: tuple[str, ...] = (), rate: float | None = 25.0
) -> HttpMeasured:
    figures = HttpFigures(
        prefill=(PrefillLoad(1, 200.0, ()),),
        decode=(
            DecodeLoad(
                batch=2, streams=6, tokens_per_second=rate, first_token=Spread(0.5, 0.9),
                gap=Spread(0.08, 0.2), tokens_per_chunk=1.25, client_cpu=0.3, failures=failures,
            ),
        ),
    )  # fmt: skip
    return HttpMeasured("http://here:1", INFO, unlike, figures)


@pytest.fixture
def measured(checkpoint_path: Path) -> Any:
    def make(**changed: Any) -> Measured:
        values: dict[str, Any] = {
            "date": "2026-01-02T03:04:05+00:00",
            "surroundings": Surroundings("A Processor", "cpu (X)", "float32", 2, "2.13", "3.11"),
            "checkpoint": read_checkpoint(checkpoint_path),
            "parameters": 52_512,
            "decoding": "torch",
            "quantize": "none",
            "kv_cache_dtype": "auto",
            "workload": WORKLOAD,
            "machines": (Machine(90_000.0, 4000.0), Machine(100_000.0, 3000.0)),
            "engine": ENGINE,
            "http": http(),
        }
        return Measured(**(values | changed))

    return make


def test_keys_are_stable(measured: Any) -> None:
    found = json.loads(json.dumps(summary(measured()), allow_nan=False))
    assert list(found) == [
        "logitd", "date", "processor", "device", "dtype", "threads", "torch", "python", "decoding",
        "quantize", "kv_cache_dtype", "checkpoint", "workload", "machine", "engine", "http",
    ]  # fmt: skip
    assert found["logitd"] == VERSION
    assert found["checkpoint"]["parameters"] == 52_512
    assert found["workload"] == {"batches": [2], "prompt_tokens": 100, "tokens": 20, "rounds": 3}
    assert set(found["engine"]["decode"][0]) == {
        "batch", "tokens_per_second", "limit_tokens_per_second", "limited_by", "share_of_limit",
        "steps", "step_ms", "read_bytes_per_step", "matrix_operations_per_step",
    }  # fmt: skip
    assert set(found["http"]["decode"][0]) == {
        "batch", "tokens_per_second", "share_of_limit", "share_of_engine", "errors", "streams",
        "ttft_ms", "gap_ms", "tokens_per_chunk", "client_cpu",
    }  # fmt: skip


def test_the_machine_is_taken_at_its_best(measured: Any) -> None:
    machine = summary(measured())["machine"]
    assert machine["read_bytes_per_second"] == 100_000
    assert machine["matrix_operations_per_second"] == 4000
    assert [one["read_bytes_per_second"] for one in machine["measured"]] == [90_000, 100_000]


def test_shares_are_of_the_limit_and_of_the_engine(measured: Any) -> None:
    found = summary(measured())
    prefill, decode = found["engine"]["prefill"][0], found["engine"]["decode"][0]
    assert prefill["limit_tokens_per_second"] == pytest.approx(100 / 0.1)
    assert prefill["share_of_limit"] == pytest.approx(0.4)
    assert (prefill["limited_by"], decode["limited_by"]) == ("matrix products",) * 2
    assert decode["limit_tokens_per_second"] == pytest.approx(2 / 0.025)
    assert decode["share_of_limit"] == pytest.approx(50 / 80)
    assert decode["step_ms"] == {"p50": 40.0, "p99": 60.0}
    over_http = found["http"]["decode"][0]
    assert over_http["share_of_limit"] == pytest.approx(25 / 80)
    assert over_http["share_of_engine"] == 0.5
    assert found["http"]["prefill"][0]["share_of_engine"] == 0.5
    assert over_http["ttft_ms"] == {"p50": 500.0, "p99": 900.0}


def test_another_kind_of_server_is_not_compared(measured: Any) -> None:
    run = measured(http=http(unlike=("threads is 8 there, here 2",)))
    found = summary(run)
    decode = found["http"]["decode"][0]
    assert decode["tokens_per_second"] == 25
    assert (decode["share_of_limit"], decode["share_of_engine"]) == (None, None)
    assert "not compared with the engine, because threads is 8 there, here 2" in lines(found)


def test_failures_are_counted_by_kind_and_shown(measured: Any) -> None:
    failures = (
        Failure("QueueFullError", "first"), Failure("StreamError", "s"),
        Failure("QueueFullError", "second"),
    )  # fmt: skip
    found = summary(measured(http=http(*failures, rate=None)))
    assert found["http"]["decode"][0]["errors"] == [
        {"kind": "QueueFullError", "count": 2, "message": "first"},
        {"kind": "StreamError", "count": 1, "message": "s"},
    ]
    assert "decode of 2: 2 x QueueFullError: first" in lines(found)
    assert not any(line.startswith("no rate") for line in lines(found))


def test_lines_are_aligned_and_have_every_figure(measured: Any) -> None:
    shown = lines(summary(measured()))
    at = shown.index("decode, in process")
    assert shown[at + 1 : at + 3] == [
        "batch  tokens/s  limit  of limit       limited by  step p50 ms  p99 ms",
        "    2        50     80       62%  matrix products        40.00   60.00",
    ]
    at = shown.index("decode, over HTTP")
    assert shown[at + 1 : at + 3] == [
        "batch  tokens/s  of limit  of engine  TTFT p50 ms  p99 ms  gap p50 ms  gap p99 ms  "
        "tokens/chunk",
        "    2        25       31%        50%       500.00  900.00       80.00      200.00  "
        "        1.25",
    ]
    assert any(line.startswith("machine ") and "A Processor" in line for line in shown)


def test_notes_say_what_a_figure_does_not(measured: Any) -> None:
    assert not any(line.startswith("above 100 %") for line in lines(summary(measured())))
    slow = (Machine(1000.0, 4000.0),)
    assert any(line.startswith("above 100 %") for line in lines(summary(measured(machines=slow))))
    early = lines(summary(measured(http=http(rate=None))))
    assert any(line.startswith("no rate") for line in early)
    int8 = lines(summary(measured(quantize="int8")))
    assert any(line.startswith("int8: ") for line in int8)


def test_without_http_there_is_none(measured: Any) -> None:
    found = summary(measured(http=None))
    assert found["http"] is None
    assert not any("HTTP" in line for line in lines(found))
