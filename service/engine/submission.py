"""Submission: requests that the engine computes, and the mailbox for their events.

`async_engine.py` puts events into the mailbox, then wakes its reader: a task that waits in `take`,
or a callback, which costs less. A reader takes all events at once, so a slow reader gets fewer but
larger batches. Use it only on the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence

from logitd.model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    TokenEvent,
)
from logitd.service.engine.driver import EngineDriver
from logitd.service.engine.usage import Usage

REPLACED = "the model's weights were replaced before the request was answered; send it again"


class EngineStopped(Exception):
    """The engine will not answer requests, because it is shutting down or has failed, or because
    their version of the weights was replaced."""


class Submission:
    """Requests that were submitted together, and the mailbox for their events."""

    def __init__(
        self, driver: EngineDriver, request_ids: Sequence[str], sequences: int, usage: Usage
    ) -> None:
        """`usage` counts each sequence that ends."""
        self.request_ids = tuple(request_ids)
        self.urgent = False  # has an event other than a second or later token
        self.reader: Callable[[], bool] | None = None
        """Called when there are events. If it returns True, the task in `take` is not woken. If it
        raises an error, `take` raises that error."""
        self._driver = driver
        self._usage = usage
        self._sequences = sequences
        self._open = sequences  # number of sequences that have not ended
        self._events: list[Event] = []
        self._begun: set[tuple[str, int]] = set()  # sequences of which a token was delivered
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """True if every sequence has ended, and `take` has nothing to return or raise."""
        return self._open == 0 and not self._events and self._failure is None

    async def take(self, timeout: float | None = None) -> list[Event]:
        """Wait for events, and return all that arrived since the last call. Returns an empty list
        after `timeout` seconds, or if `reader` took the last events.

        Raises EngineStopped if the engine failed before the last event.
        """
        if not self._events and self._open and self._failure is None:
            await self._wait(timeout)
        if not self._events and self._failure is not None:
            raise self._failure
        return self.take_now()

    def take_now(self) -> list[Event]:
        """Return all events that arrived since the last call."""
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, OutputsChunk):
                self._driver.grant(event.request_id)
        return events

    def abort(self) -> None:
        """End all open sequences. A FinishEvent still arrives for each of them."""
        if self._open:
            for request_id in self.request_ids:
                self._driver.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """End a sequence whose text has reached a stop string. Has no effect if it has already
        ended."""
        self._usage.stop(request_id, index)
        self._driver.abort(request_id, index, FinishReason.STOP)

    def deliver(self, event: Event) -> None:
        """Put an event into the mailbox; called by AsyncEngine."""
        self._events.append(event)
        if not isinstance(event, TokenEvent):
            self.urgent = True
            if isinstance(event, FinishEvent):
                self._open -= 1
                self._usage.end(event)
        elif len(self._begun) < self._sequences:
            sequence = event.request_id, event.index
            self.urgent |= sequence not in self._begun
            self._begun.add(sequence)

    def wake(self) -> None:
        """Wake the reader after events were delivered; called by AsyncEngine."""
        self.urgent = False
        try:
            if self.reader is not None and self.reader():
                return
        except Exception as error:  # of any kind: it must not affect other submissions
            self.reader, self._failure = None, error
        self._wake()

    def fail(self, reason: str) -> None:
        """Close the mailbox: no more events will arrive. Called by AsyncEngine."""
        self._failure = EngineStopped(reason)
        self._usage.lose(self._open)
        self._wake()

    async def _wait(self, timeout: float | None) -> None:
        self._waiting = self._loop.create_future()
        # asyncio.timeout would take three times as long.
        alarm = None if timeout is None else self._loop.call_later(timeout, self._wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if alarm is not None:
                alarm.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
