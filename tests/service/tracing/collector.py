"""A collector: an HTTP server that receives OTLP and decodes it with OpenTelemetry's protobuf
classes."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.service.serving import eventually

SERVER, INTERNAL = 2, 1
"""Kinds of spans."""
ERROR = 2
"""Status code of a span with an error. The code 0 means that the status is not set."""


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span. Ids are in hexadecimal, as in `traceparent`; times are in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Received spans, bodies and headers."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Wait for the root span of a trace. Returns its spans, the root first."""

        def found() -> list[ReceivedSpan]:
            return [span for span in list(self.spans) if span.trace_id == trace_id]

        eventually(lambda: any(span.kind == SERVER for span in found()))
        return sorted(found(), key=lambda span: (span.kind != SERVER, span.start, span.end))

    def take(self, headers: dict[str, str], body: bytes) -> None:
        self.headers.append(headers)
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resources in request.resource_spans:
            for scope in resources.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            kind=span.kind,
                            start=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                            status=span.status.code,
                            attributes=_plain(span.attributes),
                            resource=_plain(resources.resource.attributes),
                        )
                    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            headers = {name.lower(): value for name, value in self.headers.items()}
            collector.take(headers, self.rfile.read(int(headers["content-length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="collector")
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
