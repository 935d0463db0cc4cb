"""QueueRoom: what may wait for the engine, and the books of what does.

Three things are counted, because each of them alone can be too much: sequences, prompt tokens, and
the elements of their outputs. Requests that will run one after the other have their room
reserved, so that the later ones are not refused half-way.

Belongs to the event loop. It refuses; who is served next is the engine's to say.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.inference.engine.cost import output_elements
from model.inference.engine.events import FinishEvent
from model.inference.engine.requests import Request, sequence_lengths
from model.inference.errors import InvalidRequest
from model.transformer.config import GPTConfig


class QueueFull(Exception):
    """No room for a request; `retry_after` seconds from now there may be."""

    def __init__(self, waiting: str, limit: int, retry_after: int) -> None:
        super().__init__(f"{waiting}, the queue holds {limit}")
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait besides what runs."""

    sequences: int
    tokens: int  # of prompts
    elements: int  # of outputs; those of running requests count whole


class QueueRoom:
    """Room for requests to an engine of so many slots: asked for, taken, given back."""

    def __init__(
        self,
        config: GPTConfig,
        slots: int,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._slots = slots
        self._limits = limits
        self._open_sequences = 0
        self._open_tokens = 0  # of their prompts
        self._running_tokens = 0  # of these, admitted as of the last step
        self._open_elements = 0  # of their outputs
        self._reserved = 0
        self._reserved_elements = 0
        self._pace = _Pace(clock)

    @property
    def sequences(self) -> int:
        """Sequences submitted and not yet ended, and those that have room reserved."""
        return self._open_sequences + self._reserved

    @property
    def elements(self) -> int:
        """Numbers of the rows of requests submitted and not yet ended, and of those that have room
        reserved."""
        return self._open_elements + self._reserved_elements

    @property
    def is_empty(self) -> bool:
        """Whether nothing is submitted, and nothing will be that has its room."""
        return not self.sequences

    def check(self, requests: Sequence[Request]) -> None:
        """Raise QueueFull unless there is room for these now, and InvalidRequest where there never
        will be."""
        elements = self.elements_of(requests)
        if elements > self._limits.elements:
            raise InvalidRequest(
                f"the request asks for {elements} output elements (positions times width), "
                f"the queue never holds more than {self._limits.elements}. Ask for fewer prompts "
                "or positions at once, or raise --max-queue-elements"
            )
        sequences = sum(map(sequence_count, requests))
        self.check_counts(sequences, sum(map(prompt_tokens, requests)), elements)

    def check_counts(self, sequences: int, tokens: int = 0, elements: int = 0) -> None:
        """Raise QueueFull unless there is room for as much now.

        An empty queue takes a request of any number of tokens: it will be computed next.
        """
        waiting = max(0, self.sequences - self._slots)
        retry_after = self._pace.seconds_for(waiting + 1)
        if self.sequences + sequences > self._slots + self._limits.sequences:
            raise QueueFull(f"{waiting} sequences are waiting", self._limits.sequences, retry_after)
        queued = max(0, self._open_tokens - self._running_tokens)
        if waiting and queued + tokens > self._limits.tokens:
            raise QueueFull(f"{queued} prompt tokens are waiting", self._limits.tokens, retry_after)
        if self.elements + elements > self._limits.elements:
            raise QueueFull(
                f"{self.elements} output elements are waiting or being computed and the "
                f"request asks for {elements}",
                self._limits.elements,
                retry_after,
            )

    def elements_of(self, requests: Sequence[Request]) -> int:
        """Numbers of all their rows."""
        return sum(output_elements(request, self._config) for request in requests)

    def reserve(self, requests: Sequence[Request]) -> None:
        """Keep room for requests to come."""
        self._reserved += sum(map(sequence_count, requests))
        self._reserved_elements += self.elements_of(requests)

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give up reserved room, or take it by `enter`."""
        self._reserved -= sum(map(sequence_count, requests))
        self._reserved_elements -= self.elements_of(requests)

    def enter(self, request: Request) -> None:
        """Take the room of a request that is submitted."""
        self._open_sequences += sequence_count(request)
        self._open_tokens += prompt_tokens(request)
        self._open_elements += self.elements_of([request])

    def stepped(self, running_tokens: int) -> None:
        """The engine has made a step, and runs sequences with so many prompt tokens."""
        self._running_tokens = running_tokens

    def end_sequence(self, event: FinishEvent) -> None:
        """One sequence has ended."""
        self._pace.finished(queued=self._open_sequences > self._slots)
        self._open_sequences -= 1
        self._open_tokens -= event.prompt_tokens

    def end_request(self, elements: int) -> None:
        """The last sequence of a request with so many elements has ended."""
        self._open_elements -= elements

    def clear(self) -> None:
        """Nothing that was submitted will be computed. What is reserved is still to be given up."""
        self._open_sequences = self._open_tokens = self._open_elements = 0


class _Pace:
    """The time between two finished sequences while others wait, smoothed."""

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
        """Whole seconds until so many will have finished, from 1 to 60."""
        return min(60, max(1, math.ceil(self._seconds * sequences)))


def sequence_count(request: Request) -> int:
    """Sequences that a request will run as."""
    return len(sequence_lengths(request))


def prompt_tokens(request: Request) -> int:
    """Prompt tokens that the sequences of a request hold in the queue."""
    return sum(sequence_lengths(request))
