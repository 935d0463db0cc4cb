"""ModelMetrics: the Prometheus series of one served model.

Each series has the label `model`, the model's name at the start of the server. `observe_step` is
called after each engine step, on the event loop. The series of the whole server are in
`metrics.py`.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.events import FinishEvent, FinishReason, StepResult, TokenEvent
from logitd.service.engine.admission import AdmissionController
from logitd.service.engine.driver import StepReport
from logitd.service.metrics.counted_histogram import CountedHistogram

CONSTRAINT_OUTCOMES = ("kept", "compiled", "refused", "timed_out", "busy")

Metric = TypeVar("Metric", bound=MetricWrapperBase | CountedHistogram)
Key = TypeVar("Key", bound=str)


class ReloadResult(StrEnum):
    """Result of a request to serve another checkpoint."""

    SWAPPED = "swapped"
    UNCHANGED = "unchanged"  # this checkpoint is already served
    REFUSED = "refused"  # damaged, too large, or of another shape; the old one stays


class StepKind(StrEnum):
    """The kind of work in an engine step."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # prefill and decode
    ATTRIBUTION = "attribution"  # one piece of an attribution and nothing else


# 0.1 ms to about 105 s, each bucket twice the one before.
_LATENCY = tuple(0.0001 * 2**i for i in range(21))
_TOKENS = tuple(2**i for i in range(18))
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Families:
    """The metric families of one registry, each registered at its first use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._known: dict[str, Any] = {}

    def get(self, kind: type[Metric], name: str, text: str, *labels: str, **options: Any) -> Metric:
        """The family with this name. `options` are arguments of the constructor of `kind`."""
        if name not in self._known:
            self._known[name] = kind(name, text, labels, registry=self._registry, **options)
        family: Metric = self._known[name]
        return family


class ModelMetrics:
    """The series of one model."""

    def __init__(self, families: Families, model: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return families.get(Counter, name, text, "model").labels(model)

        def gauge(name: str, text: str) -> Gauge:
            return families.get(Gauge, name, text, "model").labels(model)

        def histogram(name: str, text: str, buckets: Iterable[float] = _LATENCY) -> Histogram:
            family = families.get(Histogram, name, text, "model", buckets=tuple(buckets))
            return family.labels(model)

        def counters(name: str, text: str, label: str, values: Iterable[Key]) -> dict[Key, Counter]:
            """A counter for each value of a label. All counters exist from the start, so that
            alerts can refer to them."""
            family = families.get(Counter, name, text, "model", label)
            return {value: family.labels(model, value) for value in values}

        self.finished = counters(
            "logitd_sequences_finished", "Sequences ended", "reason", FinishReason
        )
        self.running = gauge("logitd_num_sequences_running", "Sequences that have a slot")
        self.waiting = gauge("logitd_num_sequences_waiting", "Sequences waiting for a slot")
        self.paused = gauge(
            "logitd_num_sequences_paused",
            "Sequences without a slot until their slow readers have caught up",
        )
        self.attribution_pieces = counter(
            "logitd_attribution_pieces", "Blocks computed for attributions, forward or backward"
        )
        self.evicted = counter(
            "logitd_sequences_evicted", "Times that a sequence lost its slot to another one"
        )
        self.open_elements = gauge(
            "logitd_queue_elements",
            "Output elements (positions x width) of waiting and running requests",
        )
        self.slots = gauge("logitd_kv_slots", "Slots of the KV cache")
        self.slots_used = gauge("logitd_kv_slots_used", "Slots in use")
        self.queue_limit = gauge(
            "logitd_queue_limit_sequences", "Sequences that may wait for a slot (--max-queue)"
        )
        self.cache_use = gauge(
            "logitd_kv_cache_use_ratio", "Share of the slots that are in use: 0 to 1"
        )
        self.prompt_tokens = counter(
            "logitd_prompt_tokens", "Prompt tokens of ended sequences, counted once even if n > 1"
        )
        self.cached_tokens = counter(
            "logitd_prompt_tokens_cached",
            "Prompt tokens copied from another slot, counted in logitd_prompt_tokens too",
        )
        self.prefilled = counter("logitd_prefill_tokens", "Prompt tokens computed")
        self.generated = counter("logitd_generation_tokens", "Tokens generated")
        self.drafted = counter("logitd_draft_tokens", "Tokens drafted and verified")
        self.accepted = counter(
            "logitd_draft_tokens_accepted",
            "Accepted draft tokens; each saved a decode step",
        )
        steps = families.get(
            Histogram,
            "logitd_step_seconds",
            "Seconds of one engine step, by the kind of its work",
            "model",
            "kind",
            buckets=_LATENCY,
        )
        self.step_running = gauge(
            "logitd_step_running_seconds", "Seconds that the running engine step has taken, or 0"
        )
        self.steps = {kind: steps.labels(model, kind.value) for kind in StepKind}
        self.batch = histogram("logitd_step_batch_size", "Sequences decoded in one step", _BATCH)
        self.chunk = histogram(
            "logitd_step_prefill_tokens", "Prompt tokens computed in one step, if any", _TOKENS
        )
        self.ttft = histogram(
            "logitd_time_to_first_token_seconds",
            "Seconds from the arrival of a sequence to its first token",
        )
        self.inter_token = families.get(
            CountedHistogram,
            "logitd_inter_token_latency_seconds",
            "Seconds from one token of a sequence to the next",
            "model",
            buckets=_LATENCY,
        ).labels(model)
        self.queue_time = histogram(
            "logitd_sequence_queue_seconds", "Seconds from a sequence's arrival to its admission"
        )
        self.prefill_time = histogram(
            "logitd_sequence_prefill_seconds",
            "Seconds from a sequence's admission until its prompt was computed",
        )
        self.decode_time = histogram(
            "logitd_sequence_decode_seconds",
            "Seconds from the computed prompt to the end of a sequence",
        )
        self.sequence_time = histogram(
            "logitd_sequence_seconds", "Seconds from the arrival to the end of a sequence"
        )
        self.prompt_length = histogram(
            "logitd_sequence_prompt_tokens", "Prompt length of a sequence", _TOKENS
        )
        self.completion_length = histogram(
            "logitd_sequence_generation_tokens", "Tokens generated by a sequence", _TOKENS
        )
        self.constraints = counters(
            "logitd_constraints",
            "Constraints of requests, by outcome",
            "outcome",
            CONSTRAINT_OUTCOMES,
        )
        self.constraints_kept = gauge("logitd_constraints_kept", "Compiled constraints in memory")
        self.constraint_compile = histogram(
            "logitd_constraint_compile_seconds", "Compilation of one constraint"
        )
        self.reloads = counters(
            "logitd_reloads", "Requests to serve another checkpoint", "result", ReloadResult
        )
        self._checkpoints = families.get(
            Gauge,
            "logitd_checkpoint_info",
            "The checkpoint being served",
            "model",
            "name",
            "step",
            "weights_sha256",
        )
        self.ready = gauge(
            "logitd_model_ready", "1 if the model was loaded, 0 if it could not be loaded"
        )
        self._model = model
        self._checkpoint: tuple[str, ...] | None = None  # labels of the served one
        self._slots = 0
        self._last_token: dict[tuple[str, int], float] = {}

    def serving(
        self,
        checkpoint: CheckpointInfo,
        admission: AdmissionController,
        step_seconds: Callable[[], float],
    ) -> None:
        """Report that the model is loaded. The number of output elements of waiting and running
        requests, and the duration of the running step, are read at each scrape, because they also
        change between steps."""
        self.served(checkpoint)
        self.slots.set(admission.slots)
        self.queue_limit.set(admission.limits.sequences)
        self._slots = admission.slots
        self.open_elements.set_function(lambda: admission.elements)
        self.step_running.set_function(step_seconds)
        self.ready.set(1)

    def served(self, checkpoint: CheckpointInfo) -> None:
        """Report the checkpoint that answers new requests."""
        if self._checkpoint is not None:
            self._checkpoints.remove(*self._checkpoint)
        step = str(checkpoint.training.step)
        self._checkpoint = (self._model, checkpoint.name, step, checkpoint.weights_sha256)
        self._checkpoints.labels(*self._checkpoint).set(1)

    def observe_step(self, report: StepReport) -> None:
        """Count one step, and report how many sequences are running, waiting and paused."""
        self.running.set(report.stats.running)
        self.waiting.set(report.stats.waiting)
        self.paused.set(report.stats.paused)
        self.slots_used.set(report.stats.slots_used)
        self.cache_use.set(report.stats.slots_used / self._slots if self._slots else 0)
        self.count_step(report)

    def count_step(self, report: StepReport) -> None:
        """Count one step. A token's time is the end of its step, not the time of its delivery."""
        result = report.result
        self.evicted.inc(result.evicted_sequences)
        self.attribution_pieces.inc(result.attribution_pieces)
        self.prefilled.inc(result.prefilled_tokens)
        self.drafted.inc(result.drafted_tokens)
        self.accepted.inc(result.accepted_tokens)
        if (kind := _kind(result)) is not None:
            self.steps[kind].observe(report.seconds)
        if result.prefilled_tokens:
            self.chunk.observe(result.prefilled_tokens)
        if result.decoded_sequences:
            self.batch.observe(result.decoded_sequences)
        tokens, now, last_token = 0, report.ended, self._last_token
        before: dict[float | None, int] = {}  # tokens by the time of the one before
        for event in report.events:
            if isinstance(event, TokenEvent):
                tokens += 1
                key = (event.request_id, event.index)
                last = last_token.get(key)
                before[last] = before.get(last, 0) + 1
                last_token[key] = now
            elif isinstance(event, FinishEvent):
                self._observe_finish(event)
        self.generated.inc(tokens)
        for last, count in before.items():
            if last is not None:
                self.inter_token.observe(now - last, count)

    def _observe_finish(self, event: FinishEvent) -> None:
        self._last_token.pop((event.request_id, event.index), None)
        times = event.times
        self.finished[event.reason].inc()
        if event.counts_prompt:
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
    if result.prefilled_tokens and result.decoded_sequences:
        return StepKind.MIXED
    if result.prefilled_tokens:
        return StepKind.PREFILL
    if result.decoded_sequences:
        return StepKind.DECODE
    return StepKind.ATTRIBUTION if result.attribution_pieces else None
