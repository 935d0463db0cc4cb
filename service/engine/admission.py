"""AdmissionController: limits the work that may wait for the engine.

Three amounts have limits: sequences, prompt tokens, and output elements. A request counts from the
time when its texts are encoded (`hold`) until its last sequence ends. Requests that run one after
another all count from the start (`reserve`), so that none of them is rejected halfway.

When the queue is full, a caller below its fair share is still admitted. The share is the limit
divided by the number of callers with requests in the queue. All callers together never exceed
FULLEST times the limits. A single caller may fill the whole queue. A request that costs more tokens
than the limit is admitted if the queue is empty. When other requests are admitted after it, it
counts as if it cost exactly the limit.

Use it only on the event loop. The scheduler, not this module, decides which request runs next.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from logitd.model.inference.engine.cost import output_elements, prices
from logitd.model.inference.engine.events import FinishEvent
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.plural import pluralize
from logitd.model.transformer.config import ModelConfig

MOST_TOKENS = 2**20
"""Default of the maximum cost of a request, in tokens. With the bundled checkpoint, a request of
this cost takes minutes on one processor."""
FULLEST = 2
"""Maximum of each amount for all callers together, as a multiple of its limit."""


class Limit(StrEnum):
    """The limit reached by a rejected request."""

    SEQUENCES = "queue_sequences"
    TOKENS = "queue_tokens"
    ELEMENTS = "queue_elements"
    REPLIES = "reply_elements"  # in memory for all replies together
    STEPS = "history_steps"  # of a run, in memory at once
    CONSTRAINTS = "constraints"  # compiled at the same time
    KEY_PER_MINUTE = "key_per_minute"  # requests of one API key
    KEY_AT_ONCE = "key_at_once"


class QueueFull(Exception):
    """Raised if the queue has no room for a request now; try again in `retry_after` seconds."""

    def __init__(self, waiting: str, holds: int, retry_after: int, limit: Limit) -> None:
        super().__init__(f"the queue has no room: {waiting}, limit {holds}")
        self.retry_after = retry_after
        self.limit = limit


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The largest amounts that are admitted.

    sequences    waiting sequences
    tokens       prompt tokens of waiting sequences
    elements     output elements of all requests, waiting or running
    per_request  sequences of one request
    most_tokens  cost of one request in tokens (`model/inference/engine/cost.py`)
    """

    sequences: int
    tokens: int
    elements: int
    per_request: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """A request's share of the queue: sequences, their cost in tokens, and output elements."""

    sequences: int = 0
    tokens: int = 0
    elements: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.elements + other.elements,
        )

    def __neg__(self) -> "Load":
        return Load(-self.sequences, -self.tokens, -self.elements)


class _Tally:
    """Sums of loads, in total and by caller."""

    def __init__(self) -> None:
        self.total = Load()
        self.by_caller: dict[str, Load] = {}  # callers without a load are absent

    def of(self, caller: str) -> Load:
        return self.by_caller.get(caller, Load())

    def add(self, caller: str, load: Load) -> None:
        self.total += load
        own = self.of(caller) + load
        if own == Load():
            self.by_caller.pop(caller, None)
        else:
            self.by_caller[caller] = own


class AdmissionController:
    """Admits requests to an engine with `slots` slots, and counts them until they end."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.slots = slots
        self.limits = limits
        self._open = _Tally()  # submitted and not ended
        self._reserved = _Tally()  # not submitted yet
        self.begun_tokens = 0  # prompt tokens of open sequences that have had a slot
        self._pace = _Pace(clock)
        self._emptied = asyncio.Event()  # set whenever the last sequence ends

    @property
    def sequences(self) -> int:
        return self._open.total.sequences + self._reserved.total.sequences

    @property
    def elements(self) -> int:
        return self._open.total.elements + self._reserved.total.elements

    async def wait_empty(self) -> None:
        """Wait until no sequence is open or reserved."""
        while self.sequences:
            self._emptied.clear()
            await self._emptied.wait()

    def load_of(self, request: Request) -> Load:
        tokens = prices(request, self.config)
        return Load(len(tokens), sum(tokens), output_elements(request, self.config))

    def check_capacity(self, load: Load, param: str | None = None, caller: str = "") -> None:
        """Raise QueueFull if there is no room for a caller's `load` now, or InvalidRequest if there
        never will be.

        `param` is the field that sets the number of sequences. The limit on tokens applies only if
        sequences are waiting; otherwise the engine computes the request next.
        """
        self.check_possible(load, param)
        limits, present = self.limits, self._open.total
        own = self._open.of(caller) + self._reserved.of(caller) + load
        callers = len({caller} | self._open.by_caller.keys() | self._reserved.by_caller.keys())
        waiting = max(0, self.sequences - self.slots)

        def check(limit: Limit, holds: int, queued: int, own: int, present: str) -> None:
            """Check one limit. `queued` is the amount that would be in the queue, and `own` is the
            caller's part of it."""
            in_its_share = own <= holds // callers and queued <= FULLEST * holds
            if queued > holds and not in_its_share:
                raise QueueFull(present, holds, self._pace.seconds_for(waiting + 1), limit)

        check(
            Limit.SEQUENCES,
            limits.sequences,
            self.sequences + load.sequences - self.slots,
            own.sequences,
            f"{pluralize(waiting, 'sequence')} waiting",
        )
        if waiting:
            tokens = max(0, present.tokens - self.begun_tokens)
            loads = self._open.by_caller.values()
            counted = min(tokens, sum(min(each.tokens, limits.tokens) for each in loads))
            check(
                Limit.TOKENS,
                limits.tokens,
                counted + load.tokens,
                own.tokens,
                f"{pluralize(tokens, 'prompt token')} waiting",
            )
        check(
            Limit.ELEMENTS,
            limits.elements,
            self.elements + load.elements,
            own.elements,
            f"{self.elements} output elements waiting or in progress, {load.elements} requested",
        )

    @contextmanager
    def hold(self, sequences: int, param: str, caller: str = "") -> Iterator[None]:
        """Reserve room in the queue for sequences while the texts of a request are encoded. Raises
        the same errors as `check_capacity`, and InvalidRequest for more sequences than one request
        may have.

        The caller submits the requests directly after the `with` block. The event loop runs nothing
        else in between, so no other request can take the room.
        """
        if sequences > self.limits.per_request:
            raise InvalidRequest(
                f"the request has {_sequences(sequences, param)}, but the limit of one request "
                f"is {self.limits.per_request}. Send fewer, or raise --max-sequences",
                param,
            )
        load = Load(sequences=sequences)
        self.check_capacity(load, param, caller)
        self._reserved.add(caller, load)
        try:
            yield
        finally:
            self._release(caller, load)

    def reserve(self, requests: Sequence[Request]) -> None:
        """Reserve room in the queue for requests that a caller will submit later. Raises the same
        errors as `check_capacity`."""
        caller, loads = self._loads(requests)
        total = sum(loads, Load())
        self.check_capacity(total, caller=caller)
        self._reserved.add(caller, total)

    def release(self, requests: Sequence[Request]) -> None:
        """End the reservations that `reserve` made for these requests."""
        caller, loads = self._loads(requests)
        self._release(caller, sum(loads, Load()))

    def admit(self, requests: Sequence[Request]) -> list[Load]:
        """Count a caller's requests as open, all or none of them. Returns the load of each. Raises
        the same errors as `check_capacity`."""
        caller, loads = self._loads(requests)
        total = sum(loads, Load())
        self.check_capacity(total, caller=caller)
        self._open.add(caller, total)
        return loads

    def admit_reserved(self, request: Request) -> Load:
        load = self.load_of(request)
        self._reserved.add(request.caller, -load)
        self._open.add(request.caller, load)
        return load

    def end_sequence(self, event: FinishEvent, caller: str = "", elements: int = 0) -> None:
        """Count the end of a sequence. `elements` is the number of output elements of its request
        if this was the request's last sequence, else 0."""
        self._pace.finished(queued=self._open.total.sequences > self.slots)
        price = event.prompt_tokens if event.price is None else event.price
        self._open.add(caller, -Load(1, price, elements))
        self._note_empty()

    def clear(self) -> None:
        """Forget all open requests. Reservations remain until they are released."""
        self._open = _Tally()
        self.begun_tokens = 0
        self._note_empty()

    def check_possible(self, load: Load, param: str | None = None) -> None:
        """Raise InvalidRequest if even an empty queue would reject this load."""
        limits = self.limits
        if load.tokens > limits.most_tokens:
            raise InvalidRequest(
                f"the request costs as much as a prompt of {load.tokens} tokens, but the limit of "
                f"one request is {limits.most_tokens}. Request fewer prompts, completions, "
                "tokens, interventions, steps or cells, or raise --max-request-tokens"
            )
        if load.sequences > self.slots + limits.sequences:
            raise InvalidRequest(
                f"the request has {_sequences(load.sequences, param)}, but only "
                f"{self.slots + limits.sequences} fit: {self.slots} in slots and "
                f"{limits.sequences} in the queue. Send fewer, or raise --max-queue",
                param,
            )
        if load.elements > limits.elements:
            raise InvalidRequest(
                f"the request has {load.elements} output elements (positions times width), "
                f"but the queue never holds more than {limits.elements}. Request fewer prompts "
                "or positions at a time, or raise --max-queue-elements"
            )

    def _loads(self, requests: Sequence[Request]) -> tuple[str, list[Load]]:
        return requests[0].caller if requests else "", [self.load_of(one) for one in requests]

    def _release(self, caller: str, load: Load) -> None:
        self._reserved.add(caller, -load)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self.sequences:
            self._emptied.set()


def _sequences(count: int, param: str | None) -> str:
    """Describe a number of sequences in an error message: the number of prompts, multiplied by the
    field `param` unless that is "prompt" or None."""
    factor = "" if param in (None, "prompt") else f" times {param}"
    return f"{count} sequences (prompts{factor})"


class _Pace:
    """The average time between the ends of two successive sequences, measured while other sequences
    wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 1.0
        self._last: float | None = None

    def finished(self, *, queued: bool) -> None:
        now = self._clock()
        if queued and self._last is not None:
            self._seconds += 0.1 * (now - self._last - self._seconds)
        self._last = now if queued else None

    def seconds_for(self, sequences: int) -> int:
        """Estimated number of seconds until this many more sequences have ended, at least 1 and at
        most 60."""
        return min(60, max(1, math.ceil(self._seconds * sequences)))
