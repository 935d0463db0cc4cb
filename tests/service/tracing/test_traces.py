"""Traces of a real server in a real collector: the tree of spans, their attributes, errors, and an
absent collector."""

import ast
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from logitd.model.version import VERSION
from logitd.service.settings.serve import ServeSettings
from logitd.service.tracing import otlp
from logitd.service.tracing.traces import TracesError, traces_of
from tests.e2e.server import ServedProcess
from tests.service.serving import (
    Serving,
    app_with_bugs,
    events,
    eventually,
    read_all,
    read_until,
    request_bytes,
    serving,
    serving_app,
)
from tests.service.tracing.collector import (
    ERROR,
    INTERNAL,
    SERVER,
    Collector,
    ReceivedSpan,
    collecting,
)

ROOT = Path(__file__).parents[3]
SLOWLY = ("--threads", "1", "--kernels", "torch")
"""Flags that make generation slow."""
LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(checkpoint_path: Path, collector: Collector) -> Iterator[Serving]:
    """The tiny checkpoint, served with tracing and with two endpoints that have a bug."""
    app = app_with_bugs(checkpoint_path, otlp_endpoint=collector.url, slots=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "SEND_SECONDS", 0.05)
        with serving_app(app) as running:
            eventually(running.state.settled.is_set)
            yield running


def parent(flags: str = "01") -> tuple[str, str, dict[str, str]]:
    """Ids of a client's trace and span, and their headers."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-{flags}"}


# The tree


def test_span_of_a_request_has_a_span_for_each_phase(traced: Serving, collector: Collector) -> None:
    trace, span, headers = parent()
    before = time.time_ns()
    body = {"prompt": "abc", "max_tokens": 5, "seed": 7, "temperature": 0.5, "top_p": 0.9}
    reply = traced.post("/v1/completions", body, **headers).json()
    after = time.time_ns()
    request, *phases = collector.trace(trace)

    assert (request.name, request.kind, request.parent_id) == ("POST /v1/completions", SERVER, span)
    assert request.status == 0
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert {phase.parent_id for phase in phases} == {request.span_id}
    assert {phase.kind for phase in phases} == {INTERNAL}
    queue, prefill, decode = phases
    assert before <= request.start <= queue.start <= queue.end == prefill.start
    assert prefill.start < prefill.end == decode.start < decode.end <= request.end <= after

    checkpoint = traced.served.checkpoint
    assert request.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": traced.port,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "logitd",
        "gen_ai.request.model": checkpoint.name,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": reply["model"],
        "gen_ai.response.finish_reasons": [reply["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": reply["usage"]["completion_tokens"],
        "logitd.weights_sha256": checkpoint.weights_sha256,
    }
    assert request.resource["service.name"] == "logitd"
    assert request.resource["service.version"] == VERSION


def test_span_of_a_stream_lasts_until_its_end(traced: Serving, collector: Collector) -> None:
    trace, span, headers = parent()
    body = {"prompt": ["ab", "c"], "max_tokens": 20, "n": 2, "stream": True, "ignore_eos": True}
    reply = traced.post("/generate", body, **headers)
    usage = events(reply.content)[-1]["usage"]
    request, *phases = collector.trace(trace)
    assert (request.parent_id, request.status) == (span, 0)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    said = request.attributes
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.request.choice.count"] == 2
    assert said["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 3
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 80


@pytest.mark.parametrize("header", [{}, {"traceparent": "00-nonsense-01"}])
def test_request_without_a_parent_begins_a_trace(
    traced: Serving, collector: Collector, header: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="logitd.http"):
        traced.post("/probs", {"prompt": "abc"}, **header)
        eventually(lambda: any("POST /probs" in message for message in caplog.messages))
    (record,) = [record for record in caplog.records if "POST /probs" in record.getMessage()]
    trace_id = record.fields["trace_id"]  # type: ignore[attr-defined]
    assert f" trace_id={trace_id}" in record.getMessage()
    request, *phases = collector.trace(trace_id)
    assert request.parent_id == ""
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.operation.name" not in request.attributes


# Attributes


def test_no_text_is_sent(traced: Serving, collector: Collector) -> None:
    trace, _, headers = parent()
    body = {"prompt": "xyzzy-plugh", "stop": ["frotz-ozmoo"], "user": "somebody", "max_tokens": 8}
    reply = traced.post("/v1/completions", body, **headers)
    assert reply.status_code == 200
    collector.trace(trace)
    sent = b"".join(collector.bodies)
    assert b"POST /v1/completions" in sent
    for text in ("xyzzy", "frotz", "somebody", reply.json()["choices"][0]["text"]):
        assert text.encode() not in sent


@pytest.mark.parametrize(
    ("fields", "seed"),
    [
        ({"prompt": "a", "seed": 2**64 - 1}, None),  # the trace protocol cannot represent it
        ({"prompt": ["a", "b"]}, None),  # each prompt draws its own
        ({"prompt": ["a", "b"], "seed": 7}, 7),
    ],
)
def test_common_seed_is_an_attribute(
    traced: Serving, collector: Collector, fields: dict[str, Any], seed: int | None
) -> None:
    trace, _, headers = parent()
    assert traced.post("/generate", {"max_tokens": 1, **fields}, **headers).status_code == 200
    (request, *_) = collector.trace(trace)
    assert request.attributes.get("gen_ai.request.seed") == seed
    assert request.attributes["gen_ai.request.max_tokens"] == 1


def test_polled_endpoints_have_no_trace(traced: Serving, collector: Collector) -> None:
    ids = []
    for path in ("/health", "/metrics", "/health/live", "/version"):
        trace, _, headers = parent()
        assert traced.client.get(path, headers=headers).status_code == 200
        ids.append(trace)
    assert collector.trace(ids[-1])[0].name == "GET /version"
    assert not [span for span in collector.spans if span.trace_id in ids[:-1]]


def test_unknown_path_does_not_name_its_span(traced: Serving, collector: Collector) -> None:
    trace, _, headers = parent()
    path = "/" + "x" * 500
    assert traced.client.get(path, headers=headers).status_code == 404
    (request,) = collector.trace(trace)
    assert (request.name, request.status) == ("GET", 0)
    assert "http.route" not in request.attributes
    assert len(request.attributes["url.path"]) < 250


def test_headers_that_are_not_text_are_answered(traced: Serving, collector: Collector) -> None:
    """With OpenTelemetry's own instrumentation, such a request gets a 500."""
    trace, _, headers = parent()
    with traced.connect() as raw:
        raw.sendall(
            b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"User-Agent: \xff\\x\r\ntraceparent: " + headers["traceparent"].encode() + b"\r\n\r\n"
        )
        assert read_all(raw).startswith(b"HTTP/1.1 200 ")
    (request,) = collector.trace(trace)
    assert (request.name, request.status) == ("GET /version", 0)


# Errors


def failed(collector: Collector, trace: str) -> tuple[int, Any, Any]:
    """Status of a request's span, status of its reply, and type of the error."""
    said = collector.trace(trace)[0]
    return (
        said.status,
        said.attributes.get("http.response.status_code"),
        said.attributes.get("error.type"),
    )


TIMED_OUT = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "timeout": 0.01}


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"prompt": "a", "n": 0}, 400, (0, 400, None)),
        (TIMED_OUT, 504, (ERROR, 504, "504")),
        ({**TIMED_OUT, "stream": True}, 200, (ERROR, 200, "timeout")),
    ],
    ids=["mistake of the client", "timeout", "timeout in a stream"],
)
def test_span_has_errors_of_the_server_only(
    traced: Serving,
    collector: Collector,
    body: dict[str, Any],
    status: int,
    expected: tuple[int, int, str | None],
) -> None:
    trace, _, headers = parent()
    assert traced.post("/generate", body, **headers).status_code == status
    assert failed(collector, trace) == expected
    if "stream" in body:
        reasons = collector.trace(trace)[0].attributes["gen_ai.response.finish_reasons"]
        assert reasons == ["timeout"]


def test_bug_is_an_error(traced: Serving, collector: Collector, logged_errors: list[str]) -> None:
    trace, _, headers = parent()
    assert traced.client.get("/bug", headers=headers).status_code == 500
    assert failed(collector, trace) == (ERROR, 500, "500")
    trace, _, headers = parent()
    with pytest.raises(httpx.RemoteProtocolError):
        traced.client.get("/late-bug", headers=headers)
    assert failed(collector, trace) == (ERROR, 200, "ZeroDivisionError")
    logged_errors.clear()


def test_client_that_leaves_has_an_aborted_span(traced: Serving, collector: Collector) -> None:
    trace, span, headers = parent()
    with traced.connect() as raw:
        raw.sendall(request_bytes("/generate", LONG, f"traceparent: {headers['traceparent']}"))
        read_until(raw, b"data: ")
    request, *phases = collector.trace(trace)
    assert (request.parent_id, request.status) == (span, 0)
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert "error.type" not in request.attributes
    assert 0 < request.attributes["gen_ai.usage.output_tokens"] < 100
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]


def test_request_ended_by_shutdown_is_an_error(checkpoint_path: Path, collector: Collector) -> None:
    """The client gets an error in the stream, and the collector gets the span before the process
    exits."""
    trace, _, headers = parent()
    flags = ("--otlp-endpoint", collector.url, "--drain-timeout", "0", *SLOWLY)
    with ServedProcess(str(checkpoint_path), *flags) as process:
        with httpx.stream("POST", f"{process.url}/generate", json=LONG, headers=headers) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            assert any("shutting down" in line for line in lines)
        assert process.exit_code() == 0
    assert failed(collector, trace) == (ERROR, 200, "abort")


# Sampling


def test_sampled_flag_of_a_client_overrides_the_ratio(
    checkpoint_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "SEND_SECONDS", 0.05)
    unsampled, _, not_wanted = parent("00")
    sampled, _, wanted = parent("01")
    with serving(checkpoint_path, otlp_endpoint=collector.url, trace_ratio=0) as running:
        had = len(collector.spans)
        running.client.get("/version")
        running.client.get("/version", headers=not_wanted)
        running.client.get("/version", headers=wanted)
        assert collector.trace(sampled)[0].name == "GET /version"
    assert len(collector.spans) == had + 1
    assert not [span for span in collector.spans if span.trace_id == unsampled]


def test_standard_variables_are_read(
    checkpoint_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-gpt")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    trace, _, headers = parent()
    with serving(checkpoint_path, otlp_endpoint=f"{collector.url}/") as running:
        running.client.get("/version", headers=headers)
    span: ReceivedSpan = collector.trace(trace)[0]
    assert span.resource["service.name"] == "my-gpt"
    assert span.resource["deployment.environment.name"] == "staging"
    assert collector.headers[-1]["x-key"] == "secret"


# An absent collector

EXPORT_SECONDS = 10
"""Seconds for which the exporter itself waits for a silent collector."""


@pytest.mark.slow
def test_absent_collector_is_logged_once(checkpoint_path: Path) -> None:
    """Each request has four spans, so the queue overflows."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with ServedProcess(str(checkpoint_path), "--otlp-endpoint", url) as process:
            with httpx.Client(base_url=process.url, trust_env=False) as http:
                for _ in range(otlp.QUEUE // 4 + 10):
                    body = {"prompt": "a", "max_tokens": 1}
                    assert http.post("/generate", json=body).status_code == 200
            eventually(lambda: "traces do not reach" in process.output)
            before = time.monotonic()
            process.signal(signal.SIGTERM)
            assert process.exit_code() == 0
            assert time.monotonic() - before < EXPORT_SECONDS
            lines = [line for line in process.output.splitlines() if "logitd.traces" in line]
            assert f"traces do not reach {url}/v1/traces: " in lines[0]
            assert len(lines) <= 2
            assert "opentelemetry" not in process.output


def test_silent_collector_does_not_delay_the_shutdown(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serving(checkpoint_path, otlp_endpoint=url) as server:
            assert server.client.get("/version").status_code == 200
            before = time.monotonic()
        assert time.monotonic() - before < EXPORT_SECONDS
    assert f"the last traces did not reach {url}/v1/traces in 0.3 s" in caplog.text


# Settings


def test_packages_are_imported_on_demand() -> None:
    """Importing a module never imports OpenTelemetry's packages, unless the module is `otlp`."""
    for package in ("model", "service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path == Path(otlp.__file__).resolve():
                continue
            text = path.read_text(encoding="utf-8")
            if "opentelemetry" not in text and "otlp" not in text:
                continue
            for statement in ast.parse(text).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    assert "opentelemetry" not in ast.unparse(statement), path
                    assert "logitd.service.tracing.otlp" not in ast.unparse(statement), path


def test_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "logitd.service.tracing.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = ServeSettings(_env_file=None, otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(TracesError, match=r"not installed: .*pip install 'opentelemetry-sdk"):
        traces_of(settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"otlp_endpoint": "127.0.0.1:4318"}, "a collector is http://host:port"),
        ({"otlp_endpoint": "http://me:secret@host:4318"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({"otlp_endpoint": "http://host:4318/?key=1"}, "a collector is"),
        ({"trace_ratio": 0.5}, "--otlp-endpoint"),
        ({"otlp_endpoint": "http://host", "trace_ratio": 1.5}, "less than or equal to 1"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeSettings(_env_file=None, **settings)
