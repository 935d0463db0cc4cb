"""ModelMetrics: what the service tells Prometheus of each model that it serves.

Each series has the label `model`: one of the names that were given at the start, also where a
reload gives a model another. `observe_step` is called once per engine step on the event loop. Not
here: requests, connections and the process (`metrics.py`).
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.events import FinishEvent, FinishReason, StepResult, TokenEvent
from logitd.service.engine.driver import StepReport

CONSTRAINT_OUTCOMES = ("kept", "compiled", "refused", "timed_out", "busy")


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
_TOKENS = tuple(2**i for i in range(18))
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ModelFamilies:
    """The families of series that every model has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, ("model", *labels), registry=registry)

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(name, text, ("model", *labels), registry=registry)

        def histogram(
            name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()
        ) -> Histogram:
            return Histogram(
                name, text, ("model", *labels), buckets=tuple(buckets), registry=registry
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
        self.prompt_tokens = counter(
            "logitd_prompt_tokens", "Tokens of ended prompts, once whatever their n"
        )
        self.cached_tokens = counter(
            "logitd_prompt_tokens_cached", "The same, copied from another slot"
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
            "logitd_inter_token_latency_seconds",
            "From one token of a sequence to the next",
            _LATENCY,
        )
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
        self.checkpoint = gauge(
            "logitd_checkpoint_info",
            "The checkpoint being served",
            ("name", "step", "weights_sha256"),
        )
        self.ready = gauge(
            "logitd_model_ready", "1 when the model was loaded, 0 when it could not be"
        )


class ModelMetrics:
    """The series of one model."""

    def __init__(self, families: ModelFamilies, model: str) -> None:
        self._model = model
        self.running = families.running.labels(model)
        self.waiting = families.waiting.labels(model)
        self.paused = families.paused.labels(model)
        self.attribution_pieces = families.attribution_pieces.labels(model)
        self.evicted = families.evicted.labels(model)
        self.open_elements = families.open_elements.labels(model)
        self.slots = families.slots.labels(model)
        self.slots_used = families.slots_used.labels(model)
        self.queue_limit = families.queue_limit.labels(model)
        self.cache_use = families.cache_use.labels(model)
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.cached_tokens = families.cached_tokens.labels(model)
        self.prefilled = families.prefilled.labels(model)
        self.generated = families.generated.labels(model)
        self.drafted = families.drafted.labels(model)
        self.accepted = families.accepted.labels(model)
        self.batch = families.batch.labels(model)
        self.chunk = families.chunk.labels(model)
        self.ttft = families.ttft.labels(model)
        self.inter_token = families.inter_token.labels(model)
        self.queue_time = families.queue_time.labels(model)
        self.prefill_time = families.prefill_time.labels(model)
        self.decode_time = families.decode_time.labels(model)
        self.sequence_time = families.sequence_time.labels(model)
        self.prompt_length = families.prompt_length.labels(model)
        self.completion_length = families.completion_length.labels(model)
        self.constraints_kept = families.constraints_kept.labels(model)
        self.constraint_compile = families.constraint_compile.labels(model)
        self.ready = families.ready.labels(model)
        # A series that is there from the start can be alerted on.
        self.finished = {
            reason: families.finished.labels(model, reason.value) for reason in FinishReason
        }
        self.steps = {kind: families.steps.labels(model, kind.value) for kind in StepKind}
        self.constraints = {
            outcome: families.constraints.labels(model, outcome) for outcome in CONSTRAINT_OUTCOMES
        }
        self.reloads = {
            result: families.reloads.labels(model, result.value) for result in ReloadResult
        }
        self._checkpoints = families.checkpoint
        self._checkpoint: tuple[str, ...] | None = None  # labels of the one that is served
        self._slots = 0
        self._last_token: dict[tuple[str, int], float] = {}

    def serving(
        self,
        checkpoint: CheckpointInfo,
        slots: int,
        max_queue: int,
        open_elements: Callable[[], float],
    ) -> None:
        """Requests are answered by it. `open_elements` is called at each scrape: elements are also
        reserved and released without a step."""
        self.served(checkpoint)
        self.slots.set(slots)
        self.queue_limit.set(max_queue)
        self._slots = slots
        self.open_elements.set_function(open_elements)
        self.ready.set(1)

    def served(self, checkpoint: CheckpointInfo) -> None:
        """Whose weights answer what comes now."""
        if self._checkpoint is not None:
            self._checkpoints.remove(*self._checkpoint)
        step = str(checkpoint.training.step)
        self._checkpoint = (self._model, checkpoint.name, step, checkpoint.weights_sha256)
        self._checkpoints.labels(*self._checkpoint).set(1)

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
            self.steps[kind].observe(report.seconds)
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
    """None of a step that computed nothing."""
    if result.prefilled_tokens and result.decoded_sequences:
        return StepKind.MIXED
    if result.prefilled_tokens:
        return StepKind.PREFILL
    if result.decoded_sequences:
        return StepKind.DECODE
    return StepKind.ATTRIBUTION if result.attribution_pieces else None
