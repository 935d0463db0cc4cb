"""`logitd bench`: rates of a tiny checkpoint in process and over HTTP, and refused workloads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model import machine
from logitd.service.cli.commands.bench import whole_batch_rate
from logitd.service.cli.main import run
from tests.service.serving import Serving, serving

SMALL = ("--threads=1", "--batches=1,3", "--prompt-tokens=20", "--rounds=1", "--kernels=torch")
"""Flags for a run that takes about a second."""


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure the machine quickly, and restore torch's threads."""
    monkeypatch.setattr(machine, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(machine, "READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(machine, "MATRIX_WIDTH", {"cpu": 64})
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(capsys: pytest.CaptureFixture[str], checkpoint: Path, *flags: str) -> Any:
    """The JSON report, which is the last line of the output."""
    code = run(["bench", str(checkpoint), *SMALL, *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_engine_is_measured(checkpoint_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, checkpoint_path, "--quantize=none")
    assert (found["dtype"], found["threads"], found["decoding"]) == ("float32", 1, "torch")
    assert (found["checkpoint"], found["http"]) == (checkpoint_path.name, [])
    for kind in ("prefill", "decode"):
        assert [rate["batch"] for rate in found["engine"][kind]] == [1, 3]
        for rate in found["engine"][kind]:
            assert min(rate["tokens_per_second"], rate["share_of_limit"]) > 0


def test_running_server_is_measured(
    server: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.finished("length")
    found = bench(capsys, checkpoint_path, "--url", server.url)
    server.wait_idle()
    assert server.finished("length") - before == 1 + 3
    assert [rate["batch"] for rate in found["http"]] == [1, 3]
    for rate, alone in zip(found["http"], found["engine"]["decode"], strict=True):
        share = rate["tokens_per_second"] / alone["tokens_per_second"]
        assert rate["share_of_engine"] == pytest.approx(share)
        assert rate["first_token_seconds"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-tokens", "5000"], "5000 tokens; the model's context is 128"),
        (["--tokens", "8"], "--tokens, which is 8"),
        (["--url", "http://127.0.0.1:1"], "no connection to http://127.0.0.1:1"),
        (["--quantize", "int8"], "int8"),
        (["--device", "tpu"], "'tpu' is not a device"),
    ],
)
def test_unmeasurable_load_is_refused(
    checkpoint_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(checkpoint_path), *SMALL, *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_default_prompt_leaves_room_for_the_tokens(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context of 128 tokens is too short for the usual prompt together with 64 generated
    tokens."""
    assert run(["bench", str(checkpoint_path), "--threads=1", "--batches=2", "--rounds=1"]) == 0
    workload = json.loads(capsys.readouterr().out.splitlines()[-1])["workload"]
    assert (workload["prompt_tokens"], workload["tokens"]) == (64, 64)


def test_rate_is_that_of_the_whole_batch() -> None:
    """All streams run from 3 s, when the first tokens of the second stream arrive, to 7 s, when the
    first stream ends. After 3 s and until 7 s, the first stream gets 2 + 4 tokens, and the second
    gets 1 + 1."""
    early = [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 5), (5.0, 2), (7.0, 4)]
    late = [(0.0, 0), (3.0, 1), (4.0, 1), (6.0, 1), (8.0, 9)]
    assert whole_batch_rate([early, late]) == (2 + 4 + 1 + 1) / (7 - 3)
    assert whole_batch_rate([early[:3], late]) is None


def test_streams_that_never_run_at_once_generate_more_up_to_the_context(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one slot the streams run one after another. The context has 128 tokens, so 108 are left
    after the prompt."""
    with serving(checkpoint_path, slots=1) as running:
        assert run(["bench", str(checkpoint_path), *SMALL, "--url", running.url]) == 1
        assert running.finished("length") == 1 + 3 + 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        "3 streams of 108 tokens never all ran at the same time, and the context of 128" in message
    )
