"""Metrics: what the service tells Prometheus.

Prefix `logitd_`, base units, no colons; labels only from closed sets. One registry per
application, nothing global. Latency buckets begin at a tenth of a millisecond, because a small
GPT's step takes less than one. `observe_step` is called once per engine step on the event loop.
"""

import platform
from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from model.checkpoint.checkpoint import CheckpointInfo
from model.inference.engine.events import FinishEvent, FinishReason, StepResult, TokenEvent
from model.version import VERSION
from service.engine.admission import Limit
from service.engine.driver import StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS = (
    "/",
    "/generate",
    "/generate_stream",
    "/logits",
    "/probs",
    "/score",
    "/hidden_states",
    "/attention",
    "/activations",
    "/stages",
    "/sweep",
    "/lens",
    "/attributions",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/api/generate",
    "/api/chat",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/version",
    "/info",
    "/card",
    "/version",
    "/admin/reload",
    "/metrics",
    "/health",
    "other",
)
CONSTRAINT_OUTCOMES = ("kept", "compiled", "refused", "timed_out", "busy")


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


class ReloadResult(StrEnum):
    """What came of a checkpoint that was to take another's place."""

    SWAPPED = "swapped"
    UNCHANGED = "unchanged"  # it is the one that is served
    REFUSED = "refused"  # damaged, of another shape, too large; the one before answers


class StepKind(StrEnum):
    """What a step of the engine computed."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # both
    ATTRIBUTION = "attribution"  # a piece of one, and nothing else


# 0.1 ms to about 105 s by doubling.
_LATENCY = tuple(0.0001 * 2**i for i in range(21))
# 1 ms to about 262 s: of each endpoint there is one histogram.
_DURATION = tuple(0.001 * 4**i for i in range(10))
_TOKENS = tuple(2**i for i in range(18))
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
        self.finished = counter("logitd_sequences_finished", "Sequences ended", ("reason",))
        self.running = gauge("logitd_num_sequences_running", "Sequences that have a slot")
        self.waiting = gauge("logitd_num_sequences_waiting", "Sequences waiting for a slot")
        self.paused = gauge(
            "logitd_num_sequences_paused",
            "Sequences that lost their slots, because their readers are behind",
        )
        self.attribution_pieces = counter(
            "logitd_attribution_pieces", "Blocks computed, forward or backward, for attributions"
        )
        self.evicted = counter(
            "logitd_sequences_evicted", "Sequences whose slot went to another, as often as it did"
        )
        self.open_elements = gauge(
            "logitd_queue_elements",
            "Output elements (positions x width) of requests waiting or running",
        )
        self.slots = gauge("logitd_kv_slots", "Slots of the KV cache")
        self.slots_used = gauge("logitd_kv_slots_used", "Slots owned by a sequence")
        self.queue_limit = gauge(
            "logitd_queue_limit_sequences", "Sequences that may wait for a slot (--max-queue)"
        )
        self.cache_use = gauge(
            "logitd_kv_cache_use_ratio", "Slots owned by a sequence, as a share of all: 0 to 1"
        )
        self.prompt_tokens = counter("logitd_prompt_tokens", "Prompt tokens of ended sequences")
        self.cached_tokens = counter(
            "logitd_prompt_tokens_cached", "Prompt tokens copied from another slot"
        )
        self.prefilled = counter("logitd_prefill_tokens", "Prompt tokens computed")
        self.generated = counter("logitd_generation_tokens", "Tokens generated")
        self.drafted = counter("logitd_draft_tokens", "Tokens drafted and verified")
        self.accepted = counter(
            "logitd_draft_tokens_accepted", "Drafted tokens that saved a decode step"
        )
        self.steps = histogram(
            "logitd_step_seconds",
            "One step of the engine, by what it computed",
            _LATENCY,
            ("kind",),
        )
        self.batch = histogram("logitd_step_batch_size", "Sequences decoded in one step", _BATCH)
        self.chunk = histogram(
            "logitd_step_prefill_tokens", "Prompt tokens computed in one step that had any", _TOKENS
        )
        self.ttft = histogram(
            "logitd_time_to_first_token_seconds", "Arrival to the first token", _LATENCY
        )
        self.inter_token = histogram(
            "logitd_inter_token_latency_seconds", "From one token of a sequence to the next",
            _LATENCY,
        )  # fmt: skip
        self.queue_time = histogram(
            "logitd_sequence_queue_seconds", "Arrival to admission", _LATENCY
        )
        self.prefill_time = histogram(
            "logitd_sequence_prefill_seconds", "Admission to the computed prompt", _LATENCY
        )
        self.decode_time = histogram(
            "logitd_sequence_decode_seconds", "Computed prompt to the end", _LATENCY
        )
        self.sequence_time = histogram(
            "logitd_sequence_seconds", "Arrival to the end of a sequence", _LATENCY
        )
        self.prompt_length = histogram(
            "logitd_sequence_prompt_tokens", "Prompt length of a sequence", _TOKENS
        )
        self.completion_length = histogram(
            "logitd_sequence_generation_tokens", "Tokens generated by a sequence", _TOKENS
        )
        self.constraints = counter(
            "logitd_constraints", "Constraints of requests, by what came of them", ("outcome",)
        )
        self.constraints_kept = gauge("logitd_constraints_kept", "Compiled constraints in memory")
        self.constraint_compile = histogram(
            "logitd_constraint_compile_seconds", "Compilation of one constraint", _LATENCY
        )
        self.reloads = counter(
            "logitd_reloads", "Checkpoints that were to take another's place", ("result",)
        )
        self.ready = gauge("logitd_ready", "1 when requests are served")
        self.checkpoint = gauge(
            "logitd_checkpoint_info",
            "The checkpoint being served",
            ("name", "step", "weights_sha256"),
        )
        self.build = gauge("logitd_build_info", "What is running", ("version", "python"))
        self.build.labels(VERSION, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        self._steps = {kind: self.steps.labels(kind.value) for kind in StepKind}
        for limit in Limit:
            self.rejected.labels(limit.value)
        for endpoint in ENDPOINTS:
            self.request_time.labels(endpoint)
        for reason in FinishReason:  # a series that is there from the start can be alerted on
            self.finished.labels(reason.value)
        for end in ConnectionEnd:
            self.connections_ended.labels(end.value)
        self.know_callers(callers)
        for result in ReloadResult:
            self.reloads.labels(result.value)
        for outcome in CONSTRAINT_OUTCOMES:
            self.constraints.labels(outcome)
        self._slots = 0
        self._last_token: dict[tuple[str, int], float] = {}

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def serving(
        self,
        checkpoint: CheckpointInfo,
        slots: int,
        max_queue: int,
        open_elements: Callable[[], float],
    ) -> None:
        """Requests are served. `open_elements` is called at each scrape: elements are also
        reserved and released without a step."""
        self.served(checkpoint)
        self.slots.set(slots)
        self.queue_limit.set(max_queue)
        self._slots = slots
        self.open_elements.set_function(open_elements)
        self.ready.set(1)

    def served(self, checkpoint: CheckpointInfo) -> None:
        """Whose weights answer what comes now."""
        self.checkpoint.clear()
        self.checkpoint.labels(
            checkpoint.name, str(checkpoint.training.step), checkpoint.weights_sha256
        ).set(1)

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

    def observe_step(self, report: StepReport) -> None:
        """Count one step. Tokens count from its end, not from when they were delivered."""
        self.running.set(report.stats.running)
        self.waiting.set(report.stats.waiting)
        self.paused.set(report.stats.paused)
        self.slots_used.set(report.stats.slots_used)
        self.cache_use.set(report.stats.slots_used / self._slots if self._slots else 0)
        result = report.result
        if result.evicted_sequences:
            self.evicted.inc(result.evicted_sequences)
        if result.attribution_pieces:
            self.attribution_pieces.inc(result.attribution_pieces)
        if (kind := _kind(result)) is not None:
            self._steps[kind].observe(report.seconds)
        if result.prefilled_tokens:
            self.chunk.observe(result.prefilled_tokens)
            self.prefilled.inc(result.prefilled_tokens)
        if result.decoded_sequences:
            self.batch.observe(result.decoded_sequences)
        if result.drafted_tokens:
            self.drafted.inc(result.drafted_tokens)
            self.accepted.inc(result.accepted_tokens)
        tokens = 0
        for event in report.events:
            if isinstance(event, TokenEvent):
                tokens += 1
                self._observe_token(event, report.ended)
            elif isinstance(event, FinishEvent):
                self._observe_finish(event)
        if tokens:
            self.generated.inc(tokens)

    def _observe_token(self, event: TokenEvent, now: float) -> None:
        key = (event.request_id, event.index)
        if (last := self._last_token.get(key)) is not None:
            self.inter_token.observe(now - last)
        self._last_token[key] = now

    def _observe_finish(self, event: FinishEvent) -> None:
        self._last_token.pop((event.request_id, event.index), None)
        times = event.times
        self.finished.labels(event.reason.value).inc()
        self.prompt_tokens.inc(event.prompt_tokens)
        self.cached_tokens.inc(event.cached_tokens)
        self.prompt_length.observe(event.prompt_tokens)
        self.sequence_time.observe(times.finished - times.arrived)
        if times.admitted is not None:
            self.queue_time.observe(times.admitted - times.arrived)
        if times.admitted is not None and times.prefilled is not None:
            self.prefill_time.observe(times.prefilled - times.admitted)
            self.decode_time.observe(times.finished - times.prefilled)
        if event.completion_tokens and times.prefilled is not None:
            self.completion_length.observe(event.completion_tokens)
            self.ttft.observe(times.prefilled - times.arrived)


def _kind(result: StepResult) -> StepKind | None:
    """None of a step that computed nothing."""
    if result.prefilled_tokens and result.decoded_sequences:
        return StepKind.MIXED
    if result.prefilled_tokens:
        return StepKind.PREFILL
    if result.decoded_sequences:
        return StepKind.DECODE
    return StepKind.ATTRIBUTION if result.attribution_pieces else None


def endpoint_label(path: str) -> str:
    """The label of a path: one of ENDPOINTS, whatever a client sends."""
    for whole in ("/health", "/v1/models"):
        if path == whole or path.startswith(f"{whole}/"):
            return whole
    return path if path in ENDPOINTS else "other"
