"""Metrics: the Prometheus series of requests, connections and the process.

Names begin with `logitd_`, use base units and contain no colons. Each label has a fixed set of
values. Each application has its own registry. The series of one model are in `model_metrics.py`.
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
from logitd.service.metrics.model_metrics import Families, ModelMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS = (
    "/",
    *(operation.path for operation in OPERATIONS),
    "/stages",
    "/weights",
    "/features",
    "/history",
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
    """Reason why the server, not the client, ended a connection."""

    SILENT = "silent"  # no request came
    IDLE = "idle"  # no request came after the last reply
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    UNREAD = "unread"
    HELD = "held"  # unread replies took too much memory, and this one had been read for longest
    TOO_LARGE = "too_large"  # the headers, chunk sizes or trailers of a request were too large
    NOT_HTTP = "not_http"
    MADE_ROOM = "made_room"  # a new connection came at the limit --max-connections
    REFUSED = "refused"  # this connection came at the limit --max-connections


# 1 ms to about 262 s. Buckets are few because each endpoint has a histogram.
_DURATION = tuple(0.001 * 4**i for i in range(10))


class Metrics:
    """All of logitd's series."""

    def __init__(self, callers: Iterable[str] = ()) -> None:
        """`callers` are all possible names of callers."""
        self.registry = CollectorRegistry()
        self._families = Families(self.registry)
        self._models: dict[str, ModelMetrics] = {}
        metric = self._families.get
        self.requests = metric(
            Counter, "logitd_http_requests", "HTTP requests answered", "endpoint", "status"
        )
        self.request_time = metric(
            Histogram,
            "logitd_http_request_seconds",
            "HTTP requests, from the received headers to the last byte sent",
            "endpoint",
            buckets=_DURATION,
        )
        self.rejected = metric(
            Counter,
            "logitd_requests_rejected",
            "Requests answered with 429, by the limit",
            "limit",
        )
        self.key_requests = metric(
            Counter, "logitd_api_key_requests", "HTTP requests by the name of their API key", "key"
        )
        self.connections = metric(Gauge, "logitd_connections", "Open connections")
        self.connections_ended = metric(
            Counter, "logitd_connections_ended", "Connections that the server ended", "reason"
        )
        self.ready = metric(Gauge, "logitd_ready", "1 while the server answers requests, else 0")
        build = metric(
            Gauge, "logitd_build_info", "Versions of logitd and Python", "version", "python"
        )
        build.labels(VERSION, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        for limit in Limit:
            self.rejected.labels(limit.value)
        for endpoint in ENDPOINTS:
            self.request_time.labels(endpoint)
        for end in ConnectionEnd:
            self.connections_ended.labels(end.value)
        self.know_callers(callers)

    def of(self, model: str) -> ModelMetrics:
        """The series of a model. The first call creates them."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self._families, model)
        return self._models[model]

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def know_callers(self, names: Iterable[str]) -> None:
        """Create the series of these callers now, so that alerts can refer to them before the first
        request."""
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
        """Count one completed HTTP request. `caller` is None if the server has no API keys. `limit`
        is the limit that rejected the request, if any."""
        self.requests.labels(endpoint, str(status)).inc()
        self.request_time.labels(endpoint).observe(seconds)
        if limit is not None:
            self.rejected.labels(limit.value).inc()
        if caller is not None:
            self.key_requests.labels(caller).inc()


def endpoint_label(path: str) -> str:
    for whole in ("/health", "/v1/models", "/weights", "/features"):
        if path == whole or path.startswith(f"{whole}/"):
            return whole
    return path if path in ENDPOINTS else "other"
