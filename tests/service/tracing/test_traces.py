"""Traces of a real server in a real collector: who is whose parent, what a span says and what it
must not, what counts as an error, and what a collector that is away may cost."""

import ast
import json
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
from starlette.responses import StreamingResponse

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from logitd.model.version import VERSION
from logitd.service.application.app import create_app
from logitd.service.settings.serve import ServeSettings
from logitd.service.tracing import otlp
from logitd.service.tracing.traces import TracesError, traces_of
from tests.e2e.server import ServedProcess
from tests.service.serving import (
    Serving,
    events,
    eventually,
    read_all,
    read_until,
    request_bytes,
    serve_settings,
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
"""So that a generation takes long enough to be met."""
LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(checkpoint_path: Path, collector: Collector) -> Iterator[Serving]:
    """The tiny checkpoint, served with traces and with two endpoints that have a bug."""
    app = create_app(serve_settings(checkpoint_path, otlp_endpoint=collector.url, slots=4))

    @app.get("/bug", include_in_schema=False)
    def bug() -> None:
        raise ZeroDivisionError

    @app.get("/late-bug", include_in_schema=False)
    def late_bug() -> StreamingResponse:
        def body() -> Iterator[bytes]:
            yield b"one"
            raise ZeroDivisionError

        return StreamingResponse(body())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "SEND_SECONDS", 0.05)
        with serving_app(app) as running:
            eventually(running.state.settled.is_set)
            yield running


def parent(flags: str = "01") -> tuple[str, str, dict[str, str]]:
    """A client's trace and span, and the headers that tell of them."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-{flags}"}


# The tree


def test_a_request_is_a_span_below_its_clients_with_a_span_for_each_phase(
    traced: Serving, collector: Collector
) -> None:
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


def test_a_stream_is_a_span_until_its_end(traced: Serving, collector: Collector) -> None:
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
def test_without_a_parent_a_trace_begins_here(
    traced: Serving, collector: Collector, header: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="logitd.http"):
        traced.post("/probs", {"prompt": "abc"}, **header)
        eventually(lambda: any("POST /probs" in message for message in caplog.messages))
    (line,) = [message for message in caplog.messages if "POST /probs" in message]
    trace_id = line.partition("trace_id=")[2].split()[0]
    request, *phases = collector.trace(trace_id)
    assert request.parent_id == ""
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.operation.name" not in request.attributes, "the conventions have none for it"


# What a span says, and what not


def test_no_text_of_the_request_or_of_the_answer_is_sent(
    traced: Serving, collector: Collector
) -> None:
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
        ({"prompt": "a", "seed": 2**64 - 1}, None),  # the protocol cannot carry it
        ({"prompt": ["a", "b"]}, None),  # each prompt draws its own
        ({"prompt": ["a", "b"], "seed": 7}, 7),
    ],
)
def test_a_seed_is_named_if_it_is_one_that_the_protocol_can_carry(
    traced: Serving, collector: Collector, fields: dict[str, Any], seed: int | None
) -> None:
    trace, _, headers = parent()
    assert traced.post("/generate", {"max_tokens": 1, **fields}, **headers).status_code == 200
    (request, *_) = collector.trace(trace)
    assert request.attributes.get("gen_ai.request.seed") == seed
    assert request.attributes["gen_ai.request.max_tokens"] == 1


def test_a_cached_prefix_and_a_stop_are_said(traced: Serving, collector: Collector) -> None:
    prompt = "q" * 70
    traced.generate(prompt, max_tokens=1)
    trace, _, headers = parent()
    body = {"prompt": prompt, "max_tokens": 20, "regex": "a{3}"}
    reply = traced.post("/generate", body, **headers).json()
    assert reply["choices"][0]["text"] == "aaa"
    (request, *_) = collector.trace(trace)
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]


def test_what_is_polled_has_no_trace(traced: Serving, collector: Collector) -> None:
    ids = []
    for path in ("/health", "/metrics", "/health/live", "/version"):
        trace, _, headers = parent()
        assert traced.client.get(path, headers=headers).status_code == 200
        ids.append(trace)
    assert collector.trace(ids[-1])[0].name == "GET /version"
    assert not [span for span in collector.spans if span.trace_id in ids[:-1]]


def test_an_unknown_path_makes_no_name_of_its_own(traced: Serving, collector: Collector) -> None:
    trace, _, headers = parent()
    path = "/" + "x" * 500
    assert traced.client.get(path, headers=headers).status_code == 404
    (request,) = collector.trace(trace)
    assert (request.name, request.status) == ("GET", 0)
    assert "http.route" not in request.attributes
    assert len(request.attributes["url.path"]) < 250


def test_headers_that_are_not_text_are_answered(traced: Serving, collector: Collector) -> None:
    """Instrumentation that decodes them answers 500."""
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
    """The status of a request's span, what it says of the reply's status, and of the error."""
    said = collector.trace(trace)[0]
    return (
        said.status,
        said.attributes.get("http.response.status_code"),
        said.attributes.get("error.type"),
    )


def test_a_clients_mistake_is_no_error_of_the_server(traced: Serving, collector: Collector) -> None:
    trace, _, headers = parent()
    assert traced.post("/generate", {"prompt": "a", "n": 0}, **headers).status_code == 400
    assert failed(collector, trace) == (0, 400, None)
    assert len(collector.trace(trace)) == 1


def test_a_passed_timeout_is_an_error_in_a_reply_and_in_a_stream(
    traced: Serving, collector: Collector
) -> None:
    trace, _, headers = parent()
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "timeout": 0.01}
    assert traced.post("/generate", body, **headers).status_code == 504
    assert failed(collector, trace) == (ERROR, 504, "504")
    trace, _, headers = parent()
    reply = traced.post("/generate", {**body, "stream": True}, **headers)
    assert "error" in events(reply.content)[-1]
    assert failed(collector, trace) == (ERROR, 200, "timeout")
    assert collector.trace(trace)[0].attributes["gen_ai.response.finish_reasons"] == ["timeout"]


def test_a_bug_is_an_error(traced: Serving, collector: Collector, logged_errors: list[str]) -> None:
    trace, _, headers = parent()
    assert traced.client.get("/bug", headers=headers).status_code == 500
    assert failed(collector, trace) == (ERROR, 500, "500")
    trace, _, headers = parent()
    with pytest.raises(httpx.RemoteProtocolError):
        traced.client.get("/late-bug", headers=headers)
    assert failed(collector, trace) == (ERROR, 200, "ZeroDivisionError")
    logged_errors.clear()


def test_a_client_that_goes_leaves_what_was_computed_for_it(
    traced: Serving, collector: Collector
) -> None:
    """Its sequence ends a step after its reply."""
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


def test_what_shutdown_ends_is_an_error(checkpoint_path: Path, collector: Collector) -> None:
    """The client is told in the stream, and the collector before the process has ended."""
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


# Which requests


def test_a_client_decides_and_else_the_ratio(
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


def test_the_standard_variables_name_the_service_and_carry_keys(
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


# A collector that is away


@pytest.mark.slow
def test_without_a_collector_requests_are_answered_and_the_log_says_it_once(
    checkpoint_path: Path,
) -> None:
    """Four spans each, so that more are made than wait."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # held, and not listened at
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
            assert time.monotonic() - before < otlp.FLUSH_SECONDS + 2
            lines = [line for line in process.output.splitlines() if "logitd.traces" in line]
            assert f"traces do not reach {url}/v1/traces: " in lines[0]
            assert len(lines) <= 2, "one now and then, and one at the end"
            assert "opentelemetry" not in process.output


def test_a_collector_that_never_answers_does_not_hold_the_shutdown(checkpoint_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ServedProcess(str(checkpoint_path), "--otlp-endpoint", url) as process:
            assert httpx.get(f"{process.url}/version").status_code == 200
            before = time.monotonic()
            process.signal(signal.SIGTERM)
            assert process.exit_code() == 0
            assert time.monotonic() - before < otlp.FLUSH_SECONDS + 2
            assert f"the last traces did not reach {url}/v1/traces in 3 s" in process.output


# Whether there are any


def test_without_an_endpoint_nothing_is_imported() -> None:
    """No module that is loaded anyway imports the packages while it is loaded."""
    for package in ("model", "service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path == Path(otlp.__file__).resolve():
                continue
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    assert "opentelemetry" not in ast.unparse(statement), path
                    assert "logitd.service.tracing.otlp" not in ast.unparse(statement), path


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"trace_ratio": 0.5}, "need otlp-endpoint"),
        ({"otlp_endpoint": "http://host", "trace_ratio": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeSettings(_env_file=None, **settings)


def test_every_line_of_json_carries_the_trace(
    traced: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    trace, _, headers = parent()
    with caplog.at_level(logging.INFO, logger="logitd.http"):
        traced.client.get("/version", headers=headers)
        eventually(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert json.loads(json.dumps(record.fields))["trace_id"] == trace  # type: ignore[attr-defined]
