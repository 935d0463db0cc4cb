"""AsyncEngine: the engine for the event loop, with a thread that takes its turns.

Requests go in through the inbox of `turns`, which is emptied before each step; events come back by
one wake-up of the event loop per step or fewer, into the mailbox of the submission they belong to
(`submission`). Who is refused because too much waits already is decided before, by `queue_room`.
Whether the turns compute in this thread or in a process of their own (`engine_process`) is not
known here.

To write a token takes Python as long as a small model takes to compute it, and takes it from the
same interpreter and processors. So after each hand-over the event loop has REST times as long for
other things as that one took, whoever it woke included; what the steps in between give is handed
over together. A model whose steps are longer than that is never waited with; nor is what a prompt
gives, first tokens and rows, nor the last that there is to hand over.

Knows no HTTP and no text.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.inference.engine.events import FinishEvent, FinishReason
from model.inference.engine.requests import Request
from model.inference.engine.validation import check_request
from service.engine.admission import QueueLimits, QueueRoom, sequence_count
from service.engine.driver import Abort, Add, Grant, StepReport, Turns
from service.engine.submission import EngineStopped, Submission

logger = logging.getLogger("logitd.engine")

FAILED = "the engine failed; the log says why"
SHUTTING_DOWN = "the server is shutting down"

REST = 7
"""Handing over takes an eighth of the event loop's time at most."""
MOST_REST = 0.02
"""Seconds that a token waits for others at most: half a frame of a film."""
LEAST_LOOK = 0.002
"""Seconds to the look at what the thread has left behind; event loops count in milliseconds."""


class Reservation:
    """Requests that run one after the other, and the room for those still to come. Accepted as one:
    neither a full queue nor the beginning of a drain refuses the later ones. Belongs to the event
    loop; whoever has it releases it."""

    def __init__(self, owner: "AsyncEngine", requests: Sequence[Request]) -> None:
        self._owner = owner
        self._waiting = list(requests)

    def submit_next(self) -> Submission:
        """Queue the next request. Raises EngineStopped when there will be no answer to it."""
        submission = self._owner.submit_reserved(self._waiting[0])
        del self._waiting[0]
        return submission

    def release(self) -> None:
        """Give up the room of the requests that were not submitted."""
        self._owner.release(self._waiting)
        self._waiting.clear()


class AsyncEngine:
    """Owns the engine's turns: submit, abort, grant, stop. Made on the event loop it serves."""

    def __init__(
        self,
        turns: Turns,
        *,
        limits: QueueLimits,
        stall_timeout: float,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._turns = turns
        self._room = QueueRoom(turns.model_config, turns.slots, limits)
        self._stall_timeout = stall_timeout
        self._on_step = on_step
        self._open: dict[str, _OpenRequest] = {}
        self._decoding = False  # in the last step
        self._reports: deque[StepReport] = deque()  # not handed over yet; the thread appends
        # When the thread may wake the loop again; never, while it has and the loop is at it.
        self._rest_until = 0.0
        self._look_again: asyncio.TimerHandle | None = None
        self._draining = False  # no new requests
        self._closed = False  # none that have a reservation either
        self._failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = asyncio.Event()
        # A daemon, so that a process that must die is not kept by a step.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, if it did."""
        return self._failure

    @property
    def slots(self) -> int:
        """Sequences that can run at once."""
        return self._turns.slots

    @property
    def open_sequences(self) -> int:
        """Sequences submitted and not yet ended, and those that have room reserved."""
        return self._room.sequences

    @property
    def open_elements(self) -> int:
        """Numbers of the rows of requests submitted and not yet ended, and of those that have room
        reserved."""
        return self._room.elements

    @property
    def decoding(self) -> bool:
        """Whether somebody's tokens were computed in the last step."""
        return self._decoding

    def stalled(self) -> float | None:
        """Seconds that the present step has taken, when that is more than a step can."""
        began = self._turns.step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        return seconds if seconds > self._stall_timeout else None

    def now(self) -> float:
        """The engine's clock, on which deadlines are given."""
        return self._turns.clock()

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Queue requests: all, or none.

        Raises InvalidRequest for what the model cannot compute and for more elements than the queue
        ever holds, EngineStopped, or QueueFull.
        """
        self._check(requests)
        return self._enqueue(requests)

    def check_room(self, sequences: int) -> None:
        """Raise EngineStopped, or QueueFull, unless so many could be queued now."""
        self._check_takes_requests()
        self._room.check_counts(sequences)

    def reserve(self, requests: Sequence[Request]) -> "Reservation":
        """Room for requests that are to run one after the other. Raises as `submit` does."""
        self._check(requests)
        self._room.reserve(requests)
        self._idle.clear()
        return Reservation(self, requests)

    def submit_reserved(self, request: Request) -> Submission:
        """Queue a request that has its room; called by its Reservation."""
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._closed:
            raise EngineStopped(SHUTTING_DOWN)
        self._room.unreserve([request])
        return self._enqueue([request])

    def release(self, requests: Sequence[Request]) -> None:
        """Give up the room of requests; called by a Reservation."""
        self._room.unreserve(requests)
        self._settle()

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End a request or one of its sequences; harmless when it has ended meanwhile."""
        self._turns.put(Abort(request_id, index, reason))

    def grant(self, request_id: str) -> None:
        """Let a OutputsRequest compute one more piece."""
        self._turns.put(Grant(request_id))

    async def stop(self, drain_timeout: float) -> None:
        """Refuse new requests, give the running ones `drain_timeout` seconds, abort the rest."""
        self._draining = True
        if self._stopped.is_set():
            return
        if not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout):
                    await self._idle.wait()
        self._closed = True
        if self._open:
            sequences = sum(request.open for request in self._open.values())
            logger.warning("aborting %d sequences at shutdown", sequences)
            for request_id in list(self._open):
                self.abort(request_id)
        self._turns.put(None)
        await self._stopped.wait()
        self._thread.join()

    def _check(self, requests: Sequence[Request]) -> None:
        """Raise unless the requests could be submitted now."""
        for request in requests:
            check_request(request, self._turns.model_config)
        self._check_takes_requests()
        self._room.check(requests)

    def _check_takes_requests(self) -> None:
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._draining:
            raise EngineStopped(SHUTTING_DOWN)

    def _enqueue(self, requests: Sequence[Request]) -> Submission:
        submission = Submission(self, requests)
        for request in requests:
            self._room.enter(request)
            self._open[request.request_id] = _OpenRequest(
                submission, sequence_count(request), self._room.elements_of([request])
            )
            self._turns.put(Add(request, self.now()))
        self._idle.clear()
        return submission

    def _settle(self) -> None:
        if self._room.is_empty:
            self._idle.set()

    # The thread.

    def _run(self) -> None:
        try:
            while (report := self._turns.turn()) is not None:
                self._leave(report)
        except BaseException:  # whatever it was, the waiters are told
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail)
        finally:
            self._turns.close()
            self._loop.call_soon_threadsafe(self._stop)

    def _leave(self, report: StepReport) -> None:
        """Put down what came of a turn, and wake the loop if that is worth it now."""
        # In this order: what is appended while the loop rests is seen when its rest is over.
        self._reports.append(report)
        rested = time.monotonic() >= self._rest_until
        if rested or report.result.prefilled_tokens or not report.has_work:
            self._rest_until = math.inf
            self._loop.call_soon_threadsafe(self._hand_over)

    # Back on the event loop.

    def _hand_over(self) -> None:
        """Deliver what the thread has left. Those who are woken run before `_rest` does."""
        began = time.thread_time()
        try:
            while self._reports:
                self._deliver(self._reports.popleft())
        finally:
            self._loop.call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        """Have the thread wait with the next wake-up. The time is the processor's: what others
        took meanwhile, the thread's own step above all, was not for handing over."""
        rest = min(REST * (time.thread_time() - began), MOST_REST)
        self._rest_until = time.monotonic() + rest
        if self._look_again is None:
            delay = max(rest, LEAST_LOOK)
            self._look_again = self._loop.call_later(delay, self._look_for_reports)

    def _look_for_reports(self) -> None:
        """Hand over what came while the loop rested, if the thread has no step to end any more."""
        self._look_again = None
        left = self._rest_until - time.monotonic()
        if left <= 0:
            if self._reports:
                self._hand_over()
        elif left < math.inf:
            delay = max(left, LEAST_LOOK)
            self._look_again = self._loop.call_later(delay, self._look_for_reports)

    def _deliver(self, report: StepReport) -> None:
        for event in report.events:
            request = self._open[event.request_id]
            request.submission.deliver(event)
            if isinstance(event, FinishEvent):
                self._end(event, request)
        self._room.stepped(report.stats.running_tokens)
        self._decoding = report.result.decoded_sequences > 0
        self._on_step(report)

    def _end(self, event: FinishEvent, request: "_OpenRequest") -> None:
        self._room.end_sequence(event)
        request.open -= 1
        if not request.open:
            del self._open[event.request_id]
            self._room.end_request(request.elements)
        self._settle()

    def _stop(self) -> None:
        """The thread has ended: whatever it left is handed over first."""
        self._hand_over()
        self._stopped.set()

    def _fail(self) -> None:
        self._hand_over()
        self._failure = FAILED
        for request in self._open.values():
            request.submission.fail(FAILED)
        self._open.clear()
        self._room.clear()
        self._settle()


@dataclass(slots=True)
class _OpenRequest:
    submission: Submission
    open: int  # sequences that have not ended
    elements: int  # of its rows
