"""OTLP: traces by OpenTelemetry's SDK. A span for each request, below the one that its
`traceparent` names, with a span in it for each phase.

A span is made when its reply has ended, from what was measured anyway, so an open request costs
nothing. Spans wait in a bounded queue for a thread of the SDK's, which sends them in batches: where
the collector is away they are dropped, with a line in the log now and then. Keys for the collector,
the service's name and more are read by the SDK from its own variables (OTEL_EXPORTER_OTLP_HEADERS,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES). Imports packages that are an optional dependency. Not
here: what a span says (`attributes.py`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from logitd.model.version import VERSION
from logitd.service.core.metrics import endpoint_label
from logitd.service.tracing.attributes import (
    Ended,
    computed_attributes,
    error_type,
    http_attributes,
    phases,
    span_name,
)

logger = logging.getLogger("logitd.traces")

POLLED = ("/health", "/metrics")
"""Endpoints without traces: they are asked every few seconds, by machines."""
FLUSH_SECONDS = 3.0
"""What the last spans get at shutdown."""
COMPLAIN_SECONDS = 60.0
"""Between two lines in the log that the collector is away."""
QUEUE = 2048
"""Spans that wait to be sent; above that the oldest are dropped."""
SEND_SECONDS = 1.0
"""Between two batches, unless one is full before."""
CARRIED = (b"traceparent", b"tracestate")


class OtlpTraces:
    """Makes and sends spans, between `open` and `close`. Belongs to the event loop."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        """`endpoint` is the collector's base address; `ratio` the share of requests that are
        traced where their client does not say."""
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._ratio = ratio
        self._complaints = _Complaints(self._url)
        self._sending: _Sending | None = None

    def open(self) -> None:
        """Start the thread that sends."""
        self._complaints.take()
        self._sending = _Sending(self._url, self._ratio)

    def close(self) -> None:
        """Send what waits, for FLUSH_SECONDS at most. Blocks."""
        if self._sending is not None:
            if self._sending.end(FLUSH_SECONDS):
                self._complaints.give_back()
            else:  # what the thread says yet is heard, and not printed
                self._complaints.stop()
                logger.warning("the last traces did not reach %s in %g s", self._url, FLUSH_SECONDS)
            self._sending = None

    def record(self, ended: Ended) -> str | None:
        """Make the spans of a request; the id of its trace, None where it is not traced. What the
        engine has not told yet is waited for, after this call."""
        if self._sending is None or endpoint_label(ended.scope["path"]) in POLLED:
            return None
        tracer, on_wall = self._sending.tracer, _wall_clock()
        now = time.monotonic()
        span = tracer.start_span(
            span_name(ended),
            context=_parent(ended),
            kind=SpanKind.SERVER,
            start_time=on_wall(now - ended.seconds),
        )
        if not span.is_recording():
            return None

        def finish() -> None:
            _finish(tracer, span, ended, on_wall)
            span.end(on_wall(now))

        if ended.usage is None:
            finish()
        else:
            ended.usage.when_settled(finish)
        return f"{span.get_span_context().trace_id:032x}"


class _Sending:
    """A tracer, and the thread that sends its spans."""

    def __init__(self, url: str, ratio: float) -> None:
        self._exporter = OTLPSpanExporter(url)
        ours = Resource.create({"service.name": "logitd", "service.version": VERSION})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=ours.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=QUEUE, schedule_delay_millis=1e3 * SEND_SECONDS
            )
        )
        self.tracer: Tracer = self._provider.get_tracer("logitd", VERSION)

    def end(self, seconds: float) -> bool:
        """Send what waits; False where that took longer, and was given up. Blocks."""
        # A daemon, because a request that the collector does not answer cannot be broken off.
        flushing = threading.Thread(target=self._provider.shutdown, name="flush", daemon=True)
        flushing.start()
        flushing.join(seconds)
        if flushing.is_alive():
            self._exporter.shutdown()  # no further attempts
            return False
        return True


def _finish(tracer: Tracer, span: Span, ended: Ended, on_wall: Callable[[float], int]) -> None:
    """Say all that is known by now, with a span for each phase."""
    span.set_attributes(http_attributes(ended) | computed_attributes(ended))
    if (failed := error_type(ended)) is not None:
        span.set_attribute("error.type", failed)
        span.set_status(StatusCode.ERROR)
    if ended.usage is not None:
        within = set_span_in_context(span, Context())
        for name, begin, end in phases(ended.usage):
            phase = tracer.start_span(name, context=within, start_time=on_wall(begin))
            phase.end(on_wall(end))


def _parent(ended: Ended) -> Context:
    """The context that the headers carry; an empty one where they carry none, or a broken one."""
    carried = {
        name.decode(): value.decode("latin-1")
        for name, value in ended.scope["headers"]
        if name in CARRIED
    }
    context: Context = TraceContextTextMapPropagator().extract(carried, Context())
    return context


def _wall_clock() -> Callable[[float], int]:
    """From moments of the monotonic clock, which is the engine's, to nanoseconds since 1970."""
    ahead = time.time_ns() - time.monotonic_ns()
    return lambda moment: ahead + int(1e9 * moment)


class _Complaints(logging.Handler):
    """What the SDK says while spans do not arrive, as a line now and then."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._quiet_until = 0.0
        self._theirs = logging.getLogger("opentelemetry")

    def take(self) -> None:
        """Hear it in place of whoever else would."""
        self._theirs.addHandler(self)
        self._theirs.propagate = False

    def stop(self) -> None:
        """Hear it, and say nothing more."""
        self._quiet_until = math.inf

    def give_back(self) -> None:
        """Hear nothing more."""
        self._theirs.removeHandler(self)
        self._theirs.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAIN_SECONDS
            said = record.getMessage().partition("\n")[0][:300]
            logger.warning("traces do not reach %s: %s", self._url, said)
