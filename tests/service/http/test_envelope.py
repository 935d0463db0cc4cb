"""The members and headers common to all replies."""

from dataclasses import replace
from pathlib import Path

import pytest

from logitd.model.checkpoint.checkpoint import CheckpointInfo, read_checkpoint
from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.operations.operation import new_id
from logitd.service.http.envelope import checkpoint_headers, timings


@pytest.fixture
def checkpoint(checkpoint_path: Path) -> CheckpointInfo:
    return read_checkpoint(checkpoint_path)


def finish(*times: float | None, reason: FinishReason = FinishReason.LENGTH) -> FinishEvent:
    return FinishEvent("gen-1", 0, reason, SequenceTimes(*times), 2, 0, 1)  # type: ignore[arg-type]


# Times


def test_timings_span_all_sequences() -> None:
    first = finish(10.0, 10.5, 11.0, 13.0)
    second = finish(10.0, 11.5, 12.0, 15.0)
    assert timings([second, first], 8) == {
        "queue_ms": 500.0,
        "prefill_ms": 500.0,
        "decode_ms": 4000.0,
        "ttft_ms": 1000.0,
        "tokens_per_second": 1.5,
    }


def test_rate_does_not_count_tokens_of_the_prefill_phase() -> None:
    only_first = finish(10.0, 10.5, 11.0, 11.0001)
    assert timings([only_first], 1)["tokens_per_second"] == 0.0
    assert timings([finish(10.0, 10.5, 11.0, 13.0)], 5)["tokens_per_second"] == 2.0


def test_timings_without_a_start_are_not_divided() -> None:
    never = finish(10.0, None, None, 12.0, reason=FinishReason.ABORT)
    assert timings([never], 0)["tokens_per_second"] == 0.0


# The model


def test_ids_do_not_repeat() -> None:
    ids = {new_id("gen") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.startswith("gen-") and len(one) > 30 for one in ids)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("modèle", "mod%C3%A8le"),
        ("模型", "%E6%A8%A1%E5%9E%8B"),
        ("two words", "two%20words"),
        ("a\r\nX-Evil: 1", "a%0D%0AX-Evil:%201"),
        ("100%", "100%25"),
        ("step-000500[best]", "step-000500[best]"),
    ],
)
def test_name_unfit_for_a_header_is_percent_encoded(
    checkpoint: CheckpointInfo, name: str, sent: str
) -> None:
    assert checkpoint_headers(replace(checkpoint, name=name))["X-Logitd-Name"] == sent
