"""Metrics: what the service tells Prometheus.

Prefix `logitd_`, base units, no colons; labels only from closed sets. One registry per
application, nothing global. Here are requests, connections and the process; what each model has is
in `model_metrics.py`.
"""

import platform
from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from logitd.model.operations.all import OPERATIONS
from logitd.model.version import VERSION
from logitd.service.engine.admission import Limit
from logitd.service.metrics.model_metrics import ModelFamilies, ModelMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS = (
    "/",
    *(operation.path for operation in OPERATIONS),
    "/stages",
    "/tokenizer_info",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/info",
    "/card",
    "/version",
    "/admin/reload",
    "/metrics",
    "/health",
    "other",
)


class ConnectionEnd(StrEnum):
    """Why the server ended a connection before its client did."""

    SILENT = "silent"  # nothing came after it was opened
    IDLE = "idle"  # nothing came after its last reply
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    UNREAD = "unread"
    TOO_LARGE = "too_large"  # the head of a request, or what frames its body
    NOT_HTTP = "not_http"
    MADE_ROOM = "made_room"  # for another, at the bound
    REFUSED = "refused"  # a new one, at the bound


# 1 ms to about 262 s: of each endpoint there is one histogram.
_DURATION = tuple(0.001 * 4**i for i in range(10))


class Metrics:
    """All of logitd's series."""

    def __init__(self, callers: Iterable[str] = ()) -> None:
        """`callers` are the names that requests can have; each has a series from the start."""
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, tuple(labels), registry=self.registry)

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(name, text, tuple(labels), registry=self.registry)

        def histogram(
            name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()
        ) -> Histogram:
            return Histogram(
                name, text, tuple(labels), buckets=tuple(buckets), registry=self.registry
            )

        self.requests = counter(
            "logitd_http_requests", "HTTP requests answered", ("endpoint", "status")
        )
        self.request_time = histogram(
            "logitd_http_request_seconds",
            "HTTP requests, from the head that came to the last byte that went",
            _DURATION,
            ("endpoint",),
        )
        self.rejected = counter(
            "logitd_requests_rejected",
            "Requests answered 429, by the limit that they met",
            ("limit",),
        )
        self.key_requests = counter(
            "logitd_api_key_requests", "HTTP requests by the name of their API key", ("key",)
        )
        self.connections = gauge("logitd_connections", "Open connections")
        self.connections_ended = counter(
            "logitd_connections_ended", "Connections that the server ended", ("reason",)
        )
        self.ready = gauge("logitd_ready", "1 when requests are served")
        self.build = gauge("logitd_build_info", "What is running", ("version", "python"))
        self.build.labels(VERSION, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        self._families = ModelFamilies(self.registry)
        self._models: dict[str, ModelMetrics] = {}
        for limit in Limit:
            self.rejected.labels(limit.value)
        for endpoint in ENDPOINTS:
            self.request_time.labels(endpoint)
        for end in ConnectionEnd:
            self.connections_ended.labels(end.value)
        self.know_callers(callers)

    def of(self, model: str) -> ModelMetrics:
        """The series of a model, which are there from the first call on."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self._families, model)
        return self._models[model]

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def know_callers(self, names: Iterable[str]) -> None:
        """Names that requests can have: a series that is there from the start can be alerted on."""
        for name in names:
            self.key_requests.labels(name)

    def observe_request(
        self,
        endpoint: str,
        status: int,
        seconds: float,
        caller: str | None = None,
        limit: Limit | None = None,
    ) -> None:
        """Count one HTTP request that has ended; `caller` is None where no keys are asked for,
        `limit` is what it met if it was rejected."""
        self.requests.labels(endpoint, str(status)).inc()
        self.request_time.labels(endpoint).observe(seconds)
        if limit is not None:
            self.rejected.labels(limit.value).inc()
        if caller is not None:
            self.key_requests.labels(caller).inc()


def endpoint_label(path: str) -> str:
    """The label of a path: one of ENDPOINTS, whatever a client sends."""
    for whole in ("/health", "/v1/models"):
        if path == whole or path.startswith(f"{whole}/"):
            return whole
    return path if path in ENDPOINTS else "other"
