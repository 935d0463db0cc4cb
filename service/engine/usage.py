"""Usage: the tokens and times of one HTTP request, summed over its sequences.

They appear in the log, in traces, in the header `Server-Timing` and in a reply's timings. Use it
only on the event loop.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.engine.requests import GenerationRequest, Request

ANSWERS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
"""Finish reasons that are not failures of the server, including ABORT, which means that the client
has left."""
PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class Usage:
    """Sums over the sequences that have ended. Times are seconds on the engine's clock; a time is
    infinite if no sequence has reached that phase.

    arrived    arrival of the first sequence
    admitted   first admission to a slot
    prefilled  end of the first computation of a prompt
    finished   end of the last sequence
    first      first engine request; None before one is submitted
    open       sequences that were submitted and have not ended
    reasons    finish reason of each generated sequence, in the order of the reply
    stopped    sequences whose text reached a stop string
    failures   sequences that ended for a reason that is not in ANSWERS
    lost       True if the engine failed before all sequences had ended
    """

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    arrived: float = math.inf
    admitted: float = math.inf
    prefilled: float = math.inf
    finished: float = 0.0
    first: Request | None = None
    open: int = 0
    reasons: dict[tuple[str, int], FinishReason | None] = field(default_factory=dict)
    stopped: set[tuple[str, int]] = field(default_factory=set)
    failures: list[FinishEvent] = field(default_factory=list)
    lost: bool = False
    _when_settled: Callable[[], None] | None = None

    @property
    def failed(self) -> FinishEvent | None:
        """The first failed sequence whose text had not reached a stop string."""
        unanswered = (e for e in self.failures if (e.request_id, e.index) not in self.stopped)
        return next(unanswered, None)

    def begin(self, requests: Sequence[Request], sequences: int) -> None:
        """Count requests as submitted. `sequences` is the number of their sequences."""
        self.first = self.first or requests[0]
        self.open += sequences
        for request in requests:
            if isinstance(request, GenerationRequest):
                for index in range(request.n):
                    self.reasons[request.request_id, index] = None

    def stop(self, request_id: str, index: int) -> None:
        """Record that the text of a sequence reached a stop string. Its reason is STOP, even if the
        engine ends it for another reason, before or after this call."""
        self.stopped.add((request_id, index))
        self.reasons[request_id, index] = FinishReason.STOP

    def end(self, event: FinishEvent) -> None:
        """Count the end of a submitted sequence."""
        self.add(event)
        sequence = event.request_id, event.index
        if sequence in self.reasons and sequence not in self.stopped:
            self.reasons[sequence] = event.reason
        if event.reason not in ANSWERS:
            self.failures.append(event)
        self._close(1)

    def lose(self, sequences: int) -> None:
        """Count the sequences that were still open when the engine failed."""
        self.lost = self.lost or sequences > 0
        self._close(sequences)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no sequence is open, or immediately if none is open now. After a
        client leaves, its sequences stay open until the end of the next step."""
        if self.open:
            self._when_settled = call
        else:
            call()

    def _close(self, sequences: int) -> None:
        self.open -= sequences
        if not self.open and self._when_settled is not None:
            call, self._when_settled = self._when_settled, None
            call()

    def add(self, event: FinishEvent) -> None:
        """Add the tokens and times of a sequence that has ended."""
        times = event.times
        self.sequences += 1
        if event.counts_prompt:
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
        self.completion_tokens += event.completion_tokens
        self.arrived = min(self.arrived, times.arrived)
        self.finished = max(self.finished, times.finished)
        if times.admitted is not None:
            self.admitted = min(self.admitted, times.admitted)
        if times.prefilled is not None:
            self.prefilled = min(self.prefilled, times.prefilled)

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Name, start and end of each phase that was reached. `queue` lasts from the first arrival
        to the first admission, `prefill` from there until the first prompt is computed, and
        `decode` until the last sequence ends."""
        if self.sequences:
            moments = (self.arrived, self.admitted, self.prefilled, self.finished)
            for name, begin, end in zip(PHASES, moments, moments[1:], strict=False):
                if begin <= self.finished:
                    yield name, begin, min(end, self.finished)

    def milliseconds(self) -> dict[str, float]:
        """Duration of each phase; 0 if it was not reached."""
        took = {name: 1e3 * (end - begin) for name, begin, end in self.phases()}
        return dict.fromkeys(PHASES, 0.0) | took
