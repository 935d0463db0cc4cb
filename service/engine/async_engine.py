"""AsyncEngine: the engine as the event loop sees it, driven by a thread of its own.

Requests go in as commands of a driver (`driver.py`), which hands them to the engine before each
step. Events come back, at most one wake-up of the event loop per step (`wakeup.py`), into the
mailbox of the submission they belong to (`submission.py`). Whether a request is admitted is decided
before (`admission.py`). Whether the engine computes in this process or in one of its own
(`process.py`) is not known here, but that it can be lost: then all who wait are told, new requests
are rejected, and another takes its place (`restarts.py`).

Weights can be replaced (`reload`): what was submitted before ends on the old ones, what comes after
waits for that. A lease keeps a version of the weights for whoever submits several times
(`session.py`). Knows no HTTP, no text and no checkpoint.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.validation import check_request
from logitd.service.engine.admission import AdmissionController, Load
from logitd.service.engine.driver import (
    Abort,
    Add,
    EngineDriver,
    EngineLost,
    Grant,
    Notice,
    PrepareWeights,
    StepReport,
    SwapWeights,
    WeightsReady,
    WeightsRefused,
    WeightsSwapped,
)
from logitd.service.engine.restarts import Restarts
from logitd.service.engine.submission import REPLACED, EngineStopped, Submission
from logitd.service.engine.usage import Usage
from logitd.service.engine.wakeup import WakeupThrottle

logger = logging.getLogger("logitd.engine")

FAILED = "the engine failed; the log says why"
LOST = "the engine's process has ended, and what it computed is lost; ask again in a moment"
RESTARTING = "the engine's process has ended and is being started again; try again in a moment"
SHUTTING_DOWN = "the server is shutting down"


class ReloadError(Exception):
    """Other weights did not take over; those that were there answer. The message says why."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to submit requests that a version of the weights answers, until it is ended."""

    version: int
    usage: Usage = field(default_factory=Usage)  # of whoever has it


class Reservation:
    """Requests that run one after another, with room for those still to come. Admitted as one:
    neither a full queue nor the beginning of a drain rejects the later ones. Belongs to the event
    loop; whoever has it releases it."""

    def __init__(self, owner: "AsyncEngine", requests: Sequence[Request], lease: Lease) -> None:
        self._owner = owner
        self._waiting = list(requests)
        self._lease: Lease | None = lease

    def submit_next(self) -> Submission:
        """Queue the next request. Raises EngineStopped when there will be no answer to it."""
        assert self._lease is not None
        submission = self._owner.submit_reserved(self._waiting[0], self._lease)
        del self._waiting[0]
        if not self._waiting:
            self._end_lease()
        return submission

    def release(self) -> None:
        """Give up the room of the requests that were not submitted."""
        self._owner.admission.release(self._waiting)
        self._waiting.clear()
        self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._owner.end_lease(self._lease)
            self._lease = None


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
        self.version = 0
        """Of the weights that answer what is submitted now."""
        self._oldest = 0  # version that the engine still has
        self._first = 0  # version of the present driver's engine
        self._leases: Counter[int] = Counter()  # that are not ended, by version
        self._reload: _Reload | None = None
        self._swapping = False  # the driver was told to
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

    def lease(self, usage: Usage | None = None) -> Lease:
        """Keep the newest weights until `end_lease`. What is submitted by it counts in `usage`."""
        self._leases[self.version] += 1
        return Lease(self.version, usage or Usage())

    def end_lease(self, lease: Lease) -> None:
        """Nothing else will be submitted by it."""
        if self._leases[lease.version]:  # those of weights that had to go were forgotten
            self._leases[lease.version] -= 1
            self._swap_when_unleased()

    def submit(self, requests: Sequence[Request], lease: Lease | None = None) -> Submission:
        """Queue requests: all, or none. They are answered by the weights of the lease, or the
        newest.

        Raises InvalidRequest for what the model cannot compute or the queue never holds,
        EngineStopped, or QueueFull.
        """
        lease = lease or Lease(self.version)
        self._check(requests, lease.version)
        return self._enqueue(requests, self.admission.admit(requests), lease)

    def reserve(self, requests: Sequence[Request], lease: Lease | None = None) -> "Reservation":
        """Room for requests that are to run one after another, answered by the weights of the
        lease, which becomes the reservation's, or the newest. Raises as `submit` does."""
        self._check(requests, self.version if lease is None else lease.version)
        self.admission.reserve(requests)
        return Reservation(self, requests, lease or self.lease())

    def submit_reserved(self, request: Request, lease: Lease) -> Submission:
        """Queue a reserved request; called by its Reservation."""
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._restarting:
            raise EngineStopped(RESTARTING)
        if self._closed:
            raise EngineStopped(SHUTTING_DOWN)
        self._check_version(lease.version)
        return self._enqueue([request], [self.admission.admit_reserved(request)], lease)

    async def reload(self, path: Path, weights_sha256: str, timeout: float) -> None:
        """Load the weights of a checkpoint beside those that compute, and let them take over: from
        when they are loaded, `version` is one more. Returns when nothing is computed by the old
        ones any more, which have `timeout` seconds to end what was submitted before; what is left
        then is ended with an error. Raises ReloadError."""
        if self._reload is not None:
            raise ReloadError("another checkpoint is being loaded")
        if self._failure is not None or self._restarting or self._draining:
            raise ReloadError(self._failure or (RESTARTING if self._restarting else SHUTTING_DOWN))
        reload = self._reload = _Reload(self._loop.create_future(), self._loop.create_future())
        try:
            self._driver.put(PrepareWeights(path, weights_sha256))
            await reload.ready
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(reload.swapped)
            except TimeoutError:
                self._end_old()
                await reload.swapped
        finally:
            self._reload = None

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

    def _check(self, requests: Sequence[Request], version: int) -> None:
        """Raise unless the model can compute the requests and the engine accepts new ones."""
        for request in requests:
            check_request(request, self._driver.model_config)
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._restarting:
            raise EngineStopped(RESTARTING)
        if self._draining:
            raise EngineStopped(SHUTTING_DOWN)
        self._check_version(version)

    def _check_version(self, version: int) -> None:
        """Raise EngineStopped where the engine may have forgotten the weights: from when it was
        told to let others take over, be their lease ended or not."""
        if version < (self.version if self._swapping else self._oldest):
            raise EngineStopped(REPLACED)

    def _enqueue(
        self, requests: Sequence[Request], loads: Sequence[Load], lease: Lease
    ) -> Submission:
        """Give admitted requests to the engine."""
        ids, sequences = [r.request_id for r in requests], sum(load.sequences for load in loads)
        lease.usage.begin(requests, sequences)
        submission = Submission(self, ids, sequences, lease.usage)
        for request, load in zip(requests, loads, strict=True):
            opened = _OpenRequest(submission, load.sequences, load, request.caller, lease.version)
            self._open[request.request_id] = opened
            self._driver.put(Add(request, self.now(), lease.version - self._first))
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
            while (report := self._driver.run_once(self._reports.wake)) is not None:
                urgent = report.result.prefilled_tokens > 0 or not report.has_work
                self._reports.put(report, urgent=urgent)
                if not report.has_work:
                    self._reports.wake()  # else when the next step computes
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
        for notice in report.notices:
            self._on_notice(notice)
        self.admission.set_begun(report.stats.begun_tokens)
        self._decoding = report.result.decoded_sequences > 0
        self._on_step(report)

    def _on_notice(self, notice: Notice) -> None:
        """The driver has got on with a reload. It is for whoever awaits it, if they still do."""
        reload = self._reload
        match notice:
            case WeightsReady():
                self.version += 1
                if reload is not None:
                    reload.settle(reload.ready)
                self._swap_when_unleased()
            case WeightsRefused(reason):
                if reload is not None:
                    reload.fail(reason)
            case WeightsSwapped():
                self._oldest, self._swapping = self.version, False
                if reload is not None:
                    reload.settle(reload.swapped)

    def _swap_when_unleased(self) -> None:
        """Let the newest weights take over, unless somebody will yet submit to those before. The
        engine itself waits for what was submitted."""
        if self._swapping or self._oldest == self.version or self._leases[self._oldest]:
            return
        self._swapping = True
        self._driver.put(SwapWeights())

    def _end_old(self) -> None:
        """End what the old weights still answer: others have waited for it long enough."""
        old = [name for name, request in self._open.items() if request.version == self._oldest]
        logger.warning("new weights take over: %d requests of the old ones are ended", len(old))
        for request_id in old:
            self.abort(request_id, reason=FinishReason.REPLACED)
        self._leases[self._oldest] = 0
        self._swap_when_unleased()

    def _end(self, event: FinishEvent, request: "_OpenRequest") -> None:
        request.open -= 1
        if not request.open:
            del self._open[event.request_id]
            self.admission.end_request(request.load, request.caller)
        self.admission.end_sequence(event, request.caller)

    def _stop(self) -> None:
        """The thread has ended: what it left is delivered first."""
        self._reports.deliver()
        if self._reload is not None:
            self._reload.fail(SHUTTING_DOWN)
        self._stopped.set()

    def _lose(self, told: threading.Event) -> None:
        self._restarting = True
        self._tell_all(LOST)
        if self._reload is not None:
            self._reload.fail(LOST)
        told.set()

    def _go_on(self, driver: EngineDriver, back: threading.Event) -> None:
        self._driver = driver
        self._first = self._oldest = self.version
        self._swapping = False
        self._restarting = False
        if self._closed:  # the last command went to the driver before
            driver.put(None)
        back.set()

    def _fail(self) -> None:
        self._failure = FAILED
        self._tell_all(FAILED)
        if self._reload is not None:
            self._reload.fail(FAILED)
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
    version: int  # of the weights that answer it


@dataclass(frozen=True, slots=True)
class _Reload:
    """Weights that are on their way: loaded, and alone."""

    ready: asyncio.Future[None]
    swapped: asyncio.Future[None]

    def settle(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def fail(self, reason: str) -> None:
        for future in (self.ready, self.swapped):
            if not future.done():
                future.set_exception(ReloadError(reason))
                future.exception()  # one of them is awaited, which is enough
