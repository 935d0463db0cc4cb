"""AsyncEngine: the engine as the event loop sees it, driven by a thread of its own.

Requests go in as commands of a driver (`driver.py`), which hands them to the engine before each
step. Events come back, at most one wake-up of the event loop per step (`wakeup.py`), into the
mailbox of the submission they belong to (`submission.py`). Whether a request is admitted is decided
before (`admission.py`). Whether the engine computes in this process or in one of its own
(`process.py`) is not known here, but that it can be lost: then all who wait are told, new requests
are rejected, and another takes its place (`restarts.py`).

Knows no HTTP and no text.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.inference.engine.events import FinishEvent, FinishReason
from model.inference.engine.requests import Request
from model.inference.engine.validation import check_request
from service.engine.admission import AdmissionController, Load
from service.engine.driver import Abort, Add, EngineDriver, EngineLost, Grant, StepReport
from service.engine.restarts import Restarts
from service.engine.submission import EngineStopped, Submission
from service.engine.wakeup import WakeupThrottle

logger = logging.getLogger("logitd.engine")

FAILED = "the engine failed; the log says why"
LOST = "the engine's process has ended, and what it computed is lost; ask again in a moment"
RESTARTING = "the engine's process has ended and is being started again; try again in a moment"
SHUTTING_DOWN = "the server is shutting down"


class Reservation:
    """Requests that run one after another, with room for those still to come. Admitted as one:
    neither a full queue nor the beginning of a drain rejects the later ones. Belongs to the event
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
        self._owner.admission.release(self._waiting)
        self._waiting.clear()


class AsyncEngine:
    """Owns the engine's driver: submit, abort, grant, stop. Made on the event loop it serves."""

    def __init__(
        self,
        driver: EngineDriver,
        admission: AdmissionController,
        *,
        stall_timeout: float,
        on_step: Callable[[StepReport], None],
        restarts: Restarts | None = None,
    ) -> None:
        self.admission = admission
        self.failed = asyncio.Event()  # the engine stopped by itself, for good
        self._restarts = restarts
        self._restarting = False
        self._driver = driver
        self._stall_timeout = stall_timeout
        self._on_step = on_step
        self._open: dict[str, _OpenRequest] = {}
        self._decoding = False  # in the last step
        self._draining = False  # no new requests
        self._closed = False  # no reserved ones either
        self._failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._reports = WakeupThrottle(self._deliver)
        self._stopped = asyncio.Event()
        # A daemon, so that a process that must die is not kept by a step.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, if it did."""
        return self._failure

    @property
    def restarting(self) -> bool:
        """Whether the engine was lost, and another is on its way."""
        return self._restarting

    @property
    def slots(self) -> int:
        """Sequences that can run at once."""
        return self._driver.slots

    @property
    def open_sequences(self) -> int:
        """Sequences that are submitted and have not ended, and those that are reserved."""
        return self.admission.sequences

    @property
    def open_elements(self) -> int:
        """Output elements of the requests that have not ended, and of those that are reserved."""
        return self.admission.elements

    @property
    def decoding(self) -> bool:
        """Whether tokens were decoded in the last step."""
        return self._decoding

    def stalled(self) -> float | None:
        """Seconds that the present step has taken, when that is more than a step can."""
        began = self._driver.step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        return seconds if seconds > self._stall_timeout else None

    def now(self) -> float:
        """The engine's clock, on which deadlines are given."""
        return self._driver.clock()

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Queue requests: all, or none.

        Raises InvalidRequest for what the model cannot compute or the queue never holds,
        EngineStopped, or QueueFull.
        """
        self._check(requests)
        return self._enqueue(requests, self.admission.admit(requests))

    def reserve(self, requests: Sequence[Request]) -> "Reservation":
        """Room for requests that are to run one after another. Raises as `submit` does."""
        self._check(requests)
        self.admission.reserve(requests)
        return Reservation(self, requests)

    def submit_reserved(self, request: Request) -> Submission:
        """Queue a reserved request; called by its Reservation."""
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._restarting:
            raise EngineStopped(RESTARTING)
        if self._closed:
            raise EngineStopped(SHUTTING_DOWN)
        return self._enqueue([request], [self.admission.admit_reserved(request)])

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End a request or one of its sequences; harmless when it has ended meanwhile."""
        self._driver.put(Abort(request_id, index, reason))

    def grant(self, request_id: str) -> None:
        """Let an OutputsRequest compute one more chunk."""
        self._driver.put(Grant(request_id))

    async def stop(self, drain_timeout: float) -> None:
        """Reject new requests, give the running ones `drain_timeout` seconds, abort the rest."""
        self._draining = True
        if self._stopped.is_set():
            return
        if not self.admission.is_empty:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout):
                    await self.admission.wait_empty()
        self._closed = True
        if self._open:
            sequences = sum(request.open for request in self._open.values())
            logger.warning("aborting %d sequences at shutdown", sequences)
            for request_id in list(self._open):
                self.abort(request_id)
        if self._restarts is not None:
            self._restarts.leave()
        self._driver.put(None)
        await self._stopped.wait()
        self._thread.join()

    def _check(self, requests: Sequence[Request]) -> None:
        """Raise unless the model can compute the requests and the engine accepts new ones."""
        for request in requests:
            check_request(request, self._driver.model_config)
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._restarting:
            raise EngineStopped(RESTARTING)
        if self._draining:
            raise EngineStopped(SHUTTING_DOWN)

    def _enqueue(self, requests: Sequence[Request], loads: Sequence[Load]) -> Submission:
        """Give admitted requests to the engine."""
        submission = Submission(
            self, [r.request_id for r in requests], sum(load.sequences for load in loads)
        )
        for request, load in zip(requests, loads, strict=True):
            opened = _OpenRequest(submission, load.sequences, load, request.caller)
            self._open[request.request_id] = opened
            self._driver.put(Add(request, self.now()))
        return submission

    # The thread.

    def _run(self) -> None:
        try:
            while self._drive_until_lost():
                if not self._replace():
                    return
        except BaseException:  # whatever it was, the waiters are told
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail)
        finally:
            self._driver.close()
            self._loop.call_soon_threadsafe(self._stop)

    def _drive_until_lost(self) -> bool:
        """Make steps until the last command is done (False), or the engine is lost (True)."""
        try:
            while (report := self._driver.run_once()) is not None:
                urgent = report.result.prefilled_tokens > 0 or not report.has_work
                self._reports.put(report, urgent=urgent)
        except EngineLost as error:
            if self._restarts is None:
                raise
            logger.error("the engine is lost: %s", error)
            return True
        return False

    def _replace(self) -> bool:
        """Another driver in place of one whose engine is lost; False where the server ends."""
        assert self._restarts is not None
        # Only when all open requests are told: none of them may reach another engine.
        told = threading.Event()
        self._loop.call_soon_threadsafe(self._lose, told)
        told.wait()
        self._driver.close()
        driver = self._restarts.another()
        if driver is None:
            return False
        back = threading.Event()
        self._loop.call_soon_threadsafe(self._go_on, driver, back)
        back.wait()
        return True

    # Back on the event loop.

    def _deliver(self, report: StepReport) -> None:
        """Put a step's events into the mailboxes they belong to."""
        for event in report.events:
            request = self._open[event.request_id]
            request.submission.deliver(event)
            if isinstance(event, FinishEvent):
                self._end(event, request)
        self.admission.set_begun(report.stats.begun_tokens)
        self._decoding = report.result.decoded_sequences > 0
        self._on_step(report)

    def _end(self, event: FinishEvent, request: "_OpenRequest") -> None:
        request.open -= 1
        if not request.open:
            del self._open[event.request_id]
            self.admission.end_request(request.load, request.caller)
        self.admission.end_sequence(event, request.caller)

    def _stop(self) -> None:
        """The thread has ended: what it left is delivered first."""
        self._reports.deliver()
        self._stopped.set()

    def _lose(self, told: threading.Event) -> None:
        self._restarting = True
        self._tell_all(LOST)
        told.set()

    def _go_on(self, driver: EngineDriver, back: threading.Event) -> None:
        self._driver = driver
        self._restarting = False
        if self._closed:  # the last command went to the driver before
            driver.put(None)
        back.set()

    def _fail(self) -> None:
        self._failure = FAILED
        self._tell_all(FAILED)
        self.failed.set()

    def _tell_all(self, reason: str) -> None:
        """Whatever was submitted will not be computed; what was, is delivered first."""
        self._reports.deliver()
        for request in self._open.values():
            request.submission.fail(reason)
        self._open.clear()
        self.admission.clear()


@dataclass(slots=True)
class _OpenRequest:
    submission: Submission
    open: int  # sequences that have not ended
    load: Load
    caller: str
