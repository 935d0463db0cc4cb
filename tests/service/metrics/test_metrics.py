"""Metrics: values after known events, names by Prometheus' conventions, and closed sets of
labels."""

import platform
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.inference.engine.events import (
    EngineStats,
    Event,
    FinishEvent,
    FinishReason,
    SequenceTimes,
    StepResult,
    TokenEvent,
)
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.version import VERSION
from logitd.service.engine.admission import AdmissionController, Limit, QueueLimits
from logitd.service.engine.driver import StepReport
from logitd.service.metrics.metrics import ENDPOINTS, Metrics, endpoint_label
from logitd.service.metrics.model_metrics import ModelMetrics, StepKind
from tests.model.factories import tiny_config

STATS = EngineStats(waiting=0, running=2, paused=1, begun_tokens=9, slots=4, slots_used=2)
LIMITS = QueueLimits(256, tokens=100, elements=100, per_request=9, most_tokens=9)
ADMISSION = AdmissionController(tiny_config(), 4, LIMITS)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tiny(metrics: Metrics) -> ModelMetrics:
    """The series of one model."""
    return metrics.of("tiny")


def families(metrics: Metrics) -> list[Metric]:
    """The text format, parsed as Prometheus does."""
    return list(text_string_to_metric_families(metrics.render().decode()))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of a series; the model is `tiny` if no label names it."""
    found = metrics.registry.get_sample_value(name, labels)
    if found is None:
        found = metrics.registry.get_sample_value(name, {"model": "tiny", **labels})
    assert found is not None, name
    return found


def report(
    events: Iterable[Event] = (),
    *,
    ended: float,
    prefilled: int = 0,
    decoded: int = 0,
    waiting: int = 0,
) -> StepReport:
    return StepReport(
        events=tuple(events),
        result=StepResult((), prefilled_tokens=prefilled, decoded_sequences=decoded),
        stats=replace(STATS, waiting=waiting),
        seconds=0.25,
        ended=ended,
        has_work=False,
    )


def finish(
    reason: FinishReason, times: SequenceTimes, *, completion_tokens: int = 0, index: int = 0
) -> FinishEvent:
    return FinishEvent(
        request_id="gen-1",
        index=index,
        reason=reason,
        times=times,
        prompt_tokens=5,
        cached_tokens=2,
        completion_tokens=completion_tokens,
    )


# Counts


def test_sequence_from_arrival_to_end(metrics: Metrics, tiny: ModelMetrics) -> None:
    tiny.observe_step(report(prefilled=5, waiting=3, ended=11.0))
    tiny.observe_step(report([TokenEvent("gen-1", 0, 7)], decoded=2, ended=12.0))
    tiny.observe_step(report([TokenEvent("gen-1", 0, 8)], decoded=2, ended=12.5))
    ended = finish(FinishReason.LENGTH, SequenceTimes(10.0, 10.5, 12.0, 14.0), completion_tokens=2)
    tiny.observe_step(report([ended], ended=14.0))

    assert value(metrics, "logitd_generation_tokens_total") == 2
    assert value(metrics, "logitd_prefill_tokens_total") == 5
    assert value(metrics, "logitd_prompt_tokens_total") == 5
    assert value(metrics, "logitd_prompt_tokens_cached_total") == 2
    for reason in FinishReason:
        count = value(metrics, "logitd_sequences_finished_total", reason=reason.value)
        assert count == (reason is FinishReason.LENGTH)
    for name, seconds in {
        "logitd_sequence_queue_seconds": 0.5,
        "logitd_sequence_prefill_seconds": 1.5,
        "logitd_time_to_first_token_seconds": 2.0,
        "logitd_sequence_decode_seconds": 2.0,
        "logitd_sequence_seconds": 4.0,
        "logitd_inter_token_latency_seconds": 0.5,
        "logitd_sequence_prompt_tokens": 5,
        "logitd_sequence_generation_tokens": 2,
    }.items():
        assert value(metrics, f"{name}_count") == 1, name
        assert value(metrics, f"{name}_sum") == seconds, name
    # Steps that computed something, and the number of decoded tokens.
    for kind, count in {"prefill": 1, "decode": 2, "mixed": 0, "attribution": 0}.items():
        assert value(metrics, "logitd_step_seconds_count", kind=kind) == count
        assert value(metrics, "logitd_step_seconds_sum", kind=kind) == 0.25 * count
    assert value(metrics, "logitd_step_batch_size_sum") == 4
    assert value(metrics, "logitd_step_prefill_tokens_count") == 1
    assert value(metrics, "logitd_step_prefill_tokens_sum") == 5
    assert value(metrics, "logitd_num_sequences_waiting") == 0
    assert value(metrics, "logitd_num_sequences_running") == 2
    assert value(metrics, "logitd_kv_slots_used") == 2


def test_drafted_and_accepted_tokens_are_counted(metrics: Metrics, tiny: ModelMetrics) -> None:
    for result in (StepResult((), 0, 2, 7, 3), StepResult((), 0, 2), StepResult((), 0, 1, 1, 0)):
        tiny.observe_step(StepReport((), result, STATS, 0.25, ended=1.0, has_work=False))
    assert value(metrics, "logitd_draft_tokens_total") == 8
    assert value(metrics, "logitd_draft_tokens_accepted_total") == 3


@pytest.mark.parametrize(
    ("times", "phases"),
    [
        (SequenceTimes(10.0, None, None, 13.0), []),
        (SequenceTimes(10.0, 10.0, 13.0, 13.0), ["queue", "prefill", "decode"]),
    ],
    ids=["never started", "outputs"],
)
def test_sequence_without_tokens_has_no_first_token(
    metrics: Metrics, tiny: ModelMetrics, times: SequenceTimes, phases: list[str]
) -> None:
    tiny.observe_step(report([finish(FinishReason.TIMEOUT, times)], ended=13.0))
    assert value(metrics, "logitd_sequence_seconds_sum") == 3.0
    for name in ("queue", "prefill", "decode"):
        count = value(metrics, f"logitd_sequence_{name}_seconds_count")
        assert count == (name in phases)
    assert value(metrics, "logitd_time_to_first_token_seconds_count") == 0


def test_ended_sequence_is_forgotten(metrics: Metrics, tiny: ModelMetrics) -> None:
    times = SequenceTimes(0.0, 0.0, 1.0, 1.0)
    tiny.observe_step(report([TokenEvent("gen-1", 0, 1)], ended=1.0))
    tiny.observe_step(report([finish(FinishReason.ABORT, times, completion_tokens=1)], ended=1.0))
    tiny.observe_step(report([TokenEvent("gen-1", 0, 1)], ended=9.0))
    assert value(metrics, "logitd_inter_token_latency_seconds_count") == 0


# Names and labels


def test_text_is_the_classic_format(checkpoint_path: Path) -> None:
    metrics = Metrics(callers=["alice", "none"])
    admission = AdmissionController(tiny_config(vocab_size=7), 4, LIMITS)
    admission.admit([OutputsRequest(request_id="a", token_ids=(1, 2), positions=(0, 1))])
    metrics.of("tiny").serving(read_checkpoint(checkpoint_path), admission, lambda: 2.5)
    found = {family.name: family for family in families(metrics)}
    for name, family in found.items():
        assert re.fullmatch(r"(logitd|process)_[a-z][a-z0-9_]*", name), "prefix, and no colon"
        assert family.documentation, name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)$", name), "base units"
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            assert set(sample.labels) <= {
                "endpoint", "status", "reason", "outcome", "result", "le", "name", "step", "key",
                "weights_sha256", "kind", "limit", "version", "python", "model",
            }  # fmt: skip
            if family.type == "counter":
                assert sample.name.endswith(("_total", "_created"))
    assert value(metrics, "logitd_ready") == 0
    assert value(metrics, "logitd_model_ready") == 1
    assert value(metrics, "logitd_kv_slots") == 4
    assert value(metrics, "logitd_queue_limit_sequences") == 256
    assert value(metrics, "logitd_queue_elements") == 2 * 7


def test_callers_are_counted_separately() -> None:
    metrics = Metrics(callers=["alice", "ci"])
    metrics.observe_request("/generate", 200, 0.5, "alice")
    metrics.observe_request("/generate", 429, 0.25, "alice", Limit.TOKENS)
    metrics.observe_request("/probs", 200, 2)
    assert value(metrics, "logitd_api_key_requests_total", key="alice") == 2
    assert value(metrics, "logitd_api_key_requests_total", key="ci") == 0
    assert value(metrics, "logitd_http_requests_total", endpoint="/generate", status="429") == 1
    assert value(metrics, "logitd_http_requests_total", endpoint="/probs", status="200") == 1
    for endpoint, seconds in {"/generate": 0.75, "/probs": 2, "/score": 0}.items():
        assert value(metrics, "logitd_http_request_seconds_sum", endpoint=endpoint) == seconds
    for limit in Limit:
        rejected = value(metrics, "logitd_requests_rejected_total", limit=limit.value)
        assert rejected == (limit is Limit.TOKENS)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (StepResult((), 5, 0), "prefill"),
        (StepResult((), 0, 3), "decode"),
        (StepResult((), 5, 3), "mixed"),
        (StepResult((), 0, 0, attribution_pieces=1), "attribution"),
        (StepResult((), 0, 3, attribution_pieces=1), "decode"),
        (StepResult((), 0, 0), None),
    ],
)
def test_step_is_of_one_kind(
    metrics: Metrics, tiny: ModelMetrics, result: StepResult, kind: str | None
) -> None:
    tiny.observe_step(replace(report(ended=1.0), result=result))
    for other in StepKind:
        counted = value(metrics, "logitd_step_seconds_count", kind=other.value)
        assert counted == (other.value == kind)


def test_cache_use_is_a_ratio(metrics: Metrics, tiny: ModelMetrics, checkpoint_path: Path) -> None:
    tiny.observe_step(report(ended=1.0))
    assert value(metrics, "logitd_kv_cache_use_ratio") == 0, "before loading"
    tiny.serving(read_checkpoint(checkpoint_path), ADMISSION, lambda: 0.0)
    tiny.observe_step(report(ended=1.0))
    assert value(metrics, "logitd_kv_cache_use_ratio") == 0.5


def test_build_and_process_are_reported(metrics: Metrics) -> None:
    python = platform.python_version()
    assert value(metrics, "logitd_build_info", version=VERSION, python=python) == 1
    assert value(metrics, "process_resident_memory_bytes") > 2**20
    assert value(metrics, "process_open_fds") > 0


@pytest.mark.parametrize(
    "name", ["logitd_time_to_first_token_seconds", "logitd_inter_token_latency_seconds"]
)
def test_latency_buckets_begin_at_a_tenth_of_a_millisecond(metrics: Metrics, name: str) -> None:
    metrics.of("tiny")
    samples = [sample for family in families(metrics) for sample in family.samples]
    buckets = [float(s.labels["le"]) for s in samples if s.name == f"{name}_bucket"]
    assert buckets[0] == 0.0001
    assert buckets[-2] > 60


@given(st.text() | st.sampled_from(ENDPOINTS) | st.from_regex(r"/[a-z/]*", fullmatch=True))
def test_any_path_has_one_of_the_labels(path: str) -> None:
    assert endpoint_label(path) in ENDPOINTS


def test_endpoints_have_their_own_labels() -> None:
    assert {endpoint_label(path) for path in ENDPOINTS} == set(ENDPOINTS)
    assert endpoint_label("/health/live") == endpoint_label("/health/ready") == "/health"
    assert endpoint_label("/v1/models/any/name") == endpoint_label("/v1/models/") == "/v1/models"
    assert endpoint_label("/healthy") == endpoint_label("/v1/modelsx") == "other"
    assert endpoint_label("/docs") == endpoint_label("/nothing") == "other"
