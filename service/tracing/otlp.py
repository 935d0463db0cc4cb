"""OTLP: sends spans with OpenTelemetry's SDK, which is an optional dependency.

A span is created after the reply, from times that the server measures anyway. A thread of the
SDK sends spans in batches from a bounded queue. The SDK reads its own variables
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES). `attributes.py` computes
the attributes.

`opentelemetry-instrumentation-asgi` 0.66b2 is unsuitable: it ends a span before the engine has
reported the end of an aborted sequence, it sends addresses, queries and messages of exceptions, and
it replies 500 to a request whose `User-Agent` is the bytes `\\xff\\x`.
"""

import logging
import threading
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from logitd.model.version import VERSION
from logitd.service.metrics.metrics import endpoint_label
from logitd.service.tracing.attributes import Ended, attributes

logger = logging.getLogger("logitd.traces")
SDK = logging.getLogger("opentelemetry")

POLLED = ("/health", "/metrics")
"""Endpoints that are not traced, because programs poll them."""
FLUSH_SECONDS = 3.0
"""Maximum time in seconds for sending the last spans at shutdown."""
COMPLAIN_SECONDS = 60.0
"""Minimum time between two log lines about a collector that cannot be reached."""
QUEUE = 2048
"""Maximum number of spans waiting to be sent. When there are more, the oldest are dropped."""
SEND_SECONDS = 1.0
"""Maximum time in seconds between two batches of spans."""


class OtlpTraces:
    """Creates and sends spans between `open` and `close`. Use it only on the event loop."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        """`endpoint` is the collector's base address. The trace context of a request decides
        whether the request is traced. Of the requests without one, a fraction of `ratio` is
        traced."""
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._sampler = ParentBased(TraceIdRatioBased(ratio))
        self._tracer: Tracer | None = None

    def open(self) -> None:
        self._complaints = _Complaints(self._url)
        SDK.addHandler(self._complaints)
        SDK.propagate = False
        self._exporter = OTLPSpanExporter(self._url)
        ours = Resource.create({"service.name": "logitd", "service.version": VERSION})
        resource = ours.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(self._sampler, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=QUEUE, schedule_delay_millis=1e3 * SEND_SECONDS
            )
        )
        self._tracer = self._provider.get_tracer("logitd", VERSION)

    def close(self) -> None:
        """Send the waiting spans. Blocks for at most FLUSH_SECONDS."""
        # A daemon thread: a request to a silent collector cannot be interrupted.
        flushing = threading.Thread(target=self._provider.shutdown, name="flush", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._complaints.setLevel(logging.CRITICAL)  # the warning below is enough
            self._exporter.shutdown()  # no further attempts
            logger.warning("the last traces did not reach %s in %g s", self._url, FLUSH_SECONDS)
        else:
            SDK.removeHandler(self._complaints)
            SDK.propagate = True

    def record(self, ended: Ended) -> str | None:
        """Create the spans of a request once the engine has reported the end of all its sequences.
        This may happen after the call returns. Returns the id of the trace; None if the request is
        not traced."""
        if self._tracer is None or endpoint_label(ended.scope["path"]) in POLLED:
            return None
        tracer, usage, now, on_wall = self._tracer, ended.usage, time.monotonic(), _wall_clock()
        span = tracer.start_span(
            " ".join(filter(None, (ended.scope["method"], ended.endpoint))),
            context=_parent(ended),
            kind=SpanKind.SERVER,
            start_time=on_wall(now - ended.seconds),
        )
        if not span.is_recording():
            return None

        def finish() -> None:
            span.set_attributes(found := attributes(ended))
            if "error.type" in found:
                span.set_status(StatusCode.ERROR)
            within = set_span_in_context(span, Context())
            for name, begin, end in usage.phases() if usage is not None else ():
                phase = tracer.start_span(name, context=within, start_time=on_wall(begin))
                phase.end(on_wall(end))
            span.end(on_wall(now))

        if usage is None:
            finish()
        else:
            usage.when_settled(finish)
        return f"{span.get_span_context().trace_id:032x}"


def _parent(ended: Ended) -> Context:
    """The trace context in the request's headers; empty if absent or invalid."""
    carried = {
        name.decode(): value.decode("latin-1")
        for name, value in ended.scope["headers"]
        if name in (b"traceparent", b"tracestate")
    }
    context: Context = TraceContextTextMapPropagator().extract(carried, Context())
    return context


def _wall_clock() -> Callable[[float], int]:
    """A function that converts the engine's clock (monotonic seconds) to nanoseconds since 1970."""
    ahead = time.time_ns() - time.monotonic_ns()
    return lambda moment: ahead + int(1e9 * moment)


class _Complaints(logging.Handler):
    """Replaces the SDK's log lines with at most one line every COMPLAIN_SECONDS."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._quiet_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAIN_SECONDS
            first_line = record.getMessage().partition("\n")[0][:300]
            logger.warning("traces do not reach %s: %s", self._url, first_line)
