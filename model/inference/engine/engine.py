"""Engine: a synchronous object that one thread drives by calling `step`.

In each step the scheduler chooses the work, the runner computes it, and the engine turns the
results into events. A sequence ends at a stop token, a complete constraint, max_tokens, an abort, a
deadline or an error, or if its reader is too far behind. The last event of each accepted sequence
is its only `FinishEvent`.

A drafted token is accepted if it equals the token sampled at the position before it. Then the token
sampled after it is the one that the next step would have sampled. So drafts change how many tokens
a step yields, but never which tokens.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from logitd.model.device import refuse_lost_threads
from logitd.model.inference.attribution.task import AttributionTask
from logitd.model.inference.constraints.protocol import TokenMatcher
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.cost import prices, step_cost
from logitd.model.inference.engine.events import (
    GRADIENTS_NOT_FINITE,
    AttributionEvent,
    EngineStats,
    Event,
    FinishEvent,
    FinishReason,
    SequenceTimes,
    StepResult,
    TokenEvent,
)
from logitd.model.inference.engine.ngram import Draft
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.runner import (
    DecoderMaker,
    ForwardModel,
    Network,
    Runner,
    StepOutput,
)
from logitd.model.inference.engine.scheduler import Scheduler, StepPlan
from logitd.model.inference.engine.sequence import Group, Sequence, State
from logitd.model.inference.engine.validation import check_request
from logitd.model.inference.errors import ConstraintError, InvalidRequest
from logitd.model.inference.interventions import PARAM
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.sampling.results import (
    ConstraintComplete,
    SampleError,
    SampleResult,
    ScoredToken,
)
from logitd.model.inference.sampling.sampler import NOT_FINITE
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.autoencoder import WITHOUT, Autoencoders
from logitd.model.transformer.features import with_features
from logitd.model.transformer.gpt import GPT


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        network: Network,
        config: EngineConfig,
        *,
        make_decoder: DecoderMaker = PlainDecoder,
        clock: Callable[[], float] = time.monotonic,
        autoencoders: Autoencoders = WITHOUT,
    ) -> None:
        """`autoencoders` must be on the network's device. Their features become stages."""
        self.model_config = with_features(network.config, tuple(autoencoders))
        self.clock = clock
        if isinstance(network.config, CodeConfig):  # its cache has nothing to reuse
            config = replace(config, prefix_reuse=False)
        self._runner = Runner(
            network,
            config.slots,
            make_decoder,
            clock=clock,
            kv_cache_dtype=config.kv_cache_dtype,
            autoencoders=autoencoders,
        )
        if config.target_gap is not None and not self._runner.computes_at_once:
            raise InvalidRequest(
                f"target_gap is {config.target_gap}, but prefill time cannot be measured on "
                f"{self._runner.device}: remove target_gap, and set prefill_chunk",
                "target_gap",
            )
        share_decoded = self._runner.model.decoder.prefill_matches_decode
        self._scheduler = Scheduler(config, share_decoded=share_decoded, clock=clock)
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished, by request
        self._first_deadline = math.inf  # lower bound of all deadlines
        self.weights = 0
        """Version of the weights: the number of swaps."""
        self._next: ForwardModel | None = None  # the model with the weights of the next version
        self._closed = False

    @property
    def kv_cache_bytes(self) -> int:
        return self._runner.cache.nbytes

    @property
    def slots(self) -> int:
        return self._scheduler.slots.total

    def add(self, request: Request) -> None:
        """Check and queue a request. Raises InvalidRequest."""
        check_request(request, self.model_config)
        self.accept(request)

    def accept(
        self, request: Request, arrived: float | None = None, *, weights: int | None = None
    ) -> None:
        """Queue a request that passed `check_request`.

        `arrived` is its time of arrival on the engine's clock (default: now). `weights` is the
        version of the weights that must compute the request: the current one, or the next one, for
        which the request waits (default: the newest). Raises InvalidRequest for any other version,
        and for a request id in use.
        """
        if weights is None:
            weights = self.weights + self.swapping()
        if weights not in (self.weights, self.weights + 1):
            raise InvalidRequest(
                f"version {weights} of the weights is not loaded; the current one is {self.weights}"
            )
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        arrived = self.clock() if arrived is None else arrived
        group = Group(request, weights, step_cost(request, self.model_config))
        sequences = [
            Sequence(group, index, arrived, price)
            for index, price in enumerate(prices(request, self.model_config))
        ]
        self._sequences[request.request_id] = sequences
        if request.deadline is not None:
            self._first_deadline = min(self._first_deadline, request.deadline)
        for sequence in sequences:
            self._scheduler.enqueue(sequence, held=weights > self.weights)

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[Event]:
        """End a request, or one of its sequences; its slot is free at the next step. An unknown or
        finished id is ignored, because the request may have ended in the meantime. `reason` is STOP
        if the caller found a stop string."""
        ended = [s for s in self._sequences.get(request_id, []) if index in (None, s.index)]
        return [self._finish(sequence, reason) for sequence in ended]

    def grant(self, request_id: str) -> None:
        """Allow one more chunk of an OutputsRequest, after its reader has taken a chunk."""
        for sequence in self._sequences.get(request_id, []):
            self._scheduler.grant(sequence)

    def whole_gpt(self) -> GPT:
        """The GPT with all of its matrices, for computations outside the engine. The matrices that
        the decoder had freed are restored and stay in memory."""
        return self._runner.whole_gpt()

    def prepare_weights(self, network: Network) -> ForwardModel:
        """Prepare new weights for `swap_weights`. Old and new weights are both in memory until the
        swap. Raises ValueError if the shape, device or dtype differs, because the cache would not
        fit."""
        return self._runner.prepare(network)

    def swap_weights(self, model: ForwardModel) -> None:
        """Use prepared weights for all later requests.

        All earlier requests, including waiting ones, finish with the old weights; later requests
        wait until they have finished. The swap takes place between two steps and invalidates the
        contents of all slots. Raises ValueError if an earlier swap is still pending.
        """
        if self._next is not None:
            raise ValueError("an earlier swap of weights has not taken effect yet")
        self._next = model
        self._swap_when_idle()

    def swapping(self) -> bool:
        """True while a swap waits for the last request that uses the current weights."""
        return self._next is not None

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished request, on the engine's clock."""
        first = min((deadline for _, deadline in self._deadlines()), default=math.inf)
        self._first_deadline = first
        return None if first == math.inf else first

    def step(self, on_compute: Callable[[], None] | None = None) -> StepResult:
        """Admit, prefill, decode, sample; then compute a piece of an attribution. `on_compute` is
        called after planning: most of the remaining work is native code, during which other threads
        can use the interpreter. Raises DeviceError if a fork has lost the threads."""
        refuse_lost_threads()
        if self._closed:
            raise RuntimeError("the engine is closed and accepts no more requests")
        # 1) End sequences past their deadline, so that their slots are free for this step.
        events = self._expire()
        # 2) Choose the work.
        plan = self._scheduler.plan(self.clock())
        events += [self._finish(sequence, FinishReason.UNREAD) for sequence in plan.given_up]
        if on_compute is not None:
            on_compute()
        prefill_seconds: float | None = 0.0
        together = False
        for part in self._runner.parts(plan):
            try:
                # 3) Compute it.
                output = self._runner.run(part)
            except Exception as error:  # it ends only the sequences of the part
                events += self._fail(part, error)
                prefill_seconds = None
            else:
                # 4) Update the sequences and create events.
                self._account(part, output, events)
                together = output.together
                if prefill_seconds is not None and output.prefill_seconds is not None:
                    prefill_seconds += output.prefill_seconds
                else:
                    prefill_seconds = None
        if plan.attribution is not None:
            events += self._attribute(plan.attribution)
        self._scheduler.stepped(plan, self.clock(), prefill_seconds, together=together)
        return StepResult(
            events=tuple(events),
            prefilled_tokens=sum(chunk.end - chunk.start for chunk in plan.prefill),
            decoded_sequences=len(plan.decode),
            drafted_tokens=sum(len(draft.token_ids) for draft in plan.drafts.values()),
            accepted_tokens=sum(draft.accepted for draft in plan.drafts.values()),
            evicted_sequences=plan.evicted,
            attribution_pieces=int(plan.attribution is not None),
        )

    def stats(self) -> EngineStats:
        scheduler, attributions = self._scheduler, self._scheduler.attributions
        return EngineStats(
            waiting=len(scheduler.waiting) + len(attributions.waiting),
            running=len(scheduler.running) + len(attributions.running),
            paused=len(scheduler.paused),
            begun_tokens=sum(
                sequence.price
                for sequence in (*scheduler.running, *scheduler.paused, *attributions.running)
            ),
            slots=scheduler.slots.total,
            slots_used=scheduler.slots.used,
        )

    def close(self) -> None:
        """Stop the compute threads. Later calls to `step` raise RuntimeError."""
        self._closed = True
        if self._next is not None:
            self._next.close()
        self._runner.close()

    def _swap_when_idle(self) -> None:
        if self._next is None:
            return
        open_versions = {s.group.weights for group in self._sequences.values() for s in group}
        if self.weights not in open_versions:
            self._runner.replace(self._next)
            self._next = None
            self.weights += 1
            self._scheduler.release()

    def _expire(self) -> list[Event]:
        now = self.clock()
        if now < self._first_deadline:
            return []
        expired = [sequence for sequence, deadline in self._deadlines() if deadline <= now]
        events = [self._finish(sequence, FinishReason.TIMEOUT) for sequence in expired]
        self.next_deadline()
        return events

    def _deadlines(self) -> Iterator[tuple[Sequence, float]]:
        for sequences in self._sequences.values():
            for sequence in sequences:
                if (deadline := sequence.request.deadline) is not None:
                    yield sequence, deadline

    def _account(self, plan: StepPlan, output: StepOutput, events: list[Event]) -> None:
        """Update the sequences with the results of a step, and append the events to `events`."""
        now = self.clock()
        for sequence in plan.decode:
            sequence.computed += 1
        for chunk in plan.prefill:
            sequence = chunk.sequence
            self._scheduler.prefilled(chunk, now)
            if sequence in output.unusable:
                events.append(self._not_finite(sequence))
                continue
            events += output.scores.get(sequence, ())
            if (outputs := output.outputs.get(sequence)) is not None:
                self._scheduler.charge(sequence, len(outputs.positions), now)
                events.append(outputs)
            if chunk.completes_prompt and not sequence.tokens_left:
                generates = sequence.generation is not None
                reason = FinishReason.LENGTH if generates else FinishReason.STOP
                events.append(self._finish(sequence, reason))
        for sequence, first in output.sampled.items():
            for step, result in enumerate((first, *output.later.get(sequence, ()))):
                if sequence.state is State.FINISHED:  # its scores may have ended it
                    break
                sequence.computed += step > 0
                self._append(sequence, result, events)
        for sequence, draft in plan.drafts.items():
            self._verify(sequence, draft, output.verified[sequence], events)

    def _attribute(self, sequence: Sequence) -> list[Event]:
        """Compute one piece of a sequence's attributions. Returns the resulting events; before the
        last piece there are none."""
        try:
            attribution = self._runner.attribute(sequence)
        except Exception as error:  # such as too little memory; it ends only this attribution
            message = f"the attribution failed: {type(error).__name__}: {error}"
            return [self._finish_with_error(sequence, message)]
        if attribution is None:
            return []
        if not attribution.is_finite:
            request = sequence.attribution
            task = None if request is None else request.task
            probed = isinstance(task, AttributionTask) and task.probe is not None
            param = "direction" if probed else None
            return [self._finish_with_error(sequence, GRADIENTS_NOT_FINITE, param)]
        event = AttributionEvent(sequence.request_id, sequence.index, attribution)
        return [event, self._finish(sequence, FinishReason.STOP)]

    def _append(self, sequence: Sequence, result: SampleResult, events: list[Event]) -> None:
        """Append a sampled token, which may end the sequence. If the sample is an error or the end
        of a constraint, end the sequence."""
        match result:
            case int(token_id):
                event = TokenEvent(sequence.request_id, sequence.index, token_id)
            case ScoredToken(token_id, chosen, top):
                event = TokenEvent(sequence.request_id, sequence.index, token_id, chosen, top)
            case SampleError() if result == NOT_FINITE:
                events.append(self._not_finite(sequence))
                return
            case SampleError(message, param):
                events.append(self._finish_with_error(sequence, message, param))
                return
            case ConstraintComplete():
                events.append(self._finish(sequence, FinishReason.STOP))
                return
        sequence.tokens.append(token_id)
        events.append(event)
        if token_id in sequence.stop_token_ids:
            events.append(self._finish(sequence, FinishReason.STOP, stop_token_id=token_id))
        elif sequence.matcher is not None and (
            ended := self._end_of_constraint(sequence, sequence.matcher, token_id)
        ):
            events.append(ended)
        elif not sequence.tokens_left:
            events.append(self._finish(sequence, FinishReason.LENGTH))

    def _verify(
        self, sequence: Sequence, draft: Draft, results: list[SampleResult], events: list[Event]
    ) -> None:
        """Append the tokens that were sampled at the positions of a draft, up to the first one that
        differs from the draft or ends the sequence. Later samples are discarded, and so are their
        errors."""
        for token_id, result in zip(draft.token_ids, results, strict=True):
            if sequence.state is State.FINISHED or sequence.tokens[-1] != token_id:
                break
            draft.accepted += 1
            sequence.computed += 1
            self._append(sequence, result, events)
        assert sequence.drafter is not None
        sequence.drafter.learn(draft)

    def _end_of_constraint(
        self, sequence: Sequence, matcher: TokenMatcher, token_id: int
    ) -> Event | None:
        """Advance a sequence's constraint. If the constraint is complete or fails, end the sequence
        and return its last event."""
        constraint = sequence.constraint
        assert constraint is not None
        try:
            matcher.advance(token_id)
            if not sequence.tokens_left:  # no later step sets `complete`
                matcher.allowed()
        except ConstraintError as error:
            return self._finish_with_error(sequence, str(error), constraint.kind)
        except Exception as error:  # a bug of the matcher ends only its own sequence
            message = f"the constraint failed: {type(error).__name__}: {error}"
            return self._finish_with_error(sequence, message)
        return self._finish(sequence, FinishReason.STOP) if matcher.complete else None

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        message = f"the model failed: {type(error).__name__}: {error}"
        computed = [*(chunk.sequence for chunk in plan.prefill), *plan.decode]
        events = [self._finish_with_error(sequence, message) for sequence in computed]
        # The failed step may have written anything into the cache, so no slot may be copied. This
        # comes last, because the end of a sequence shares its slot.
        self._scheduler.slots.forget()
        return events

    def abandon(self) -> list[Event]:
        """End all sequences after a step that raised an error or was interrupted. It may not have
        computed what the slots record, so no slot may be copied."""
        running = [sequence for each in self._sequences.values() for sequence in each]
        events = [self._finish_with_error(each, "a step was interrupted") for each in running]
        self._scheduler.slots.forget()
        return events

    def _not_finite(self, sequence: Sequence) -> Event:
        """End a sequence whose logits are not `usable`. If its request has interventions that may
        be the reason, the `param` of the error names them."""
        message = NOT_FINITE.message
        if not any(change.may_enlarge for change in sequence.request.interventions):
            return self._finish_with_error(sequence, message)
        advice = "use smaller factors and values"
        return self._finish_with_error(sequence, f"{message}; {advice}", PARAM)

    def _finish_with_error(
        self, sequence: Sequence, message: str, param: str | None = None
    ) -> Event:
        return self._finish(sequence, FinishReason.ERROR, error=message, param=param)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        param: str | None = None,
    ) -> Event:
        assert sequence.state is not State.FINISHED
        self._scheduler.remove(sequence)
        if sequence.attribution is not None:
            self._runner.forget(sequence)
        siblings = self._sequences[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request_id]
        self._swap_when_idle()
        times = SequenceTimes(
            sequence.arrived, sequence.admitted, sequence.prefilled, finished=self.clock()
        )
        return FinishEvent(
            request_id=sequence.request_id,
            index=sequence.index,
            reason=reason,
            times=times,
            prompt_tokens=len(sequence.request.token_ids),
            cached_tokens=sequence.cached,
            completion_tokens=len(sequence.tokens) - sequence.prompt_length,
            stop_token_id=stop_token_id,
            error=error,
            param=param,
            price=sequence.price,
        )
