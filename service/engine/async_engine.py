"""AsyncEngine: the engine as the event loop sees it, driven by a thread of its own.

Requests go in as commands of a driver (`driver.py`), which hands them to the engine before each
step. Events come back, at most one wake-up of the event loop per step (`wakeup.py`), into the
mailbox of the submission they belong to (`submission.py`). Admission is decided before
(`admission.py`). Weights can be replaced while requests run (`versions.py`); a request is answered
by one version of them. Knows no HTTP, no text and no checkpoint.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.engine.validation import check_request
from logitd.service.engine.admission import AdmissionController, Load
from logitd.service.engine.driver import EngineDriver, StepReport
from logitd.service.engine.submission import REPLACED, EngineStopped, Submission
from logitd.service.engine.usage import Usage
from logitd.service.engine.versions import Lease, ReloadError, State, WeightsVersion
from logitd.service.engine.wakeup import WakeupThrottle

logger = logging.getLogger("logitd.engine")

FAILED = "the engine failed; the log says why"
SHUTTING_DOWN = "the server is shutting down"


class Reservation:
    """Requests that run one after another, admitted as one: neither a full queue nor the beginning
    of a drain rejects the later ones. Belongs to the event loop; its owner must release it."""

    def __init__(self, owner: "AsyncEngine", requests: Sequence[Request], lease: Lease) -> None:
        self._owner = owner
        self._waiting = list(requests)
        self._lease: Lease | None = lease

    def submit_next(self) -> Submission:
        """Queue the next request. Raises EngineStopped if it will not be answered."""
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
    """Owns the engine's driver. Must be made on the event loop that uses it."""

    def __init__(
        self,
        driver: EngineDriver,
        admission: AdmissionController,
        *,
        stall_timeout: float,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self.admission = admission
        self.failed = asyncio.Event()  # the engine stopped by itself
        self.decoding = False  # tokens were decoded in the last step
        self._driver = driver
        self._stall_timeout = stall_timeout
        self._on_step = on_step
        self._open: dict[str, _OpenRequest] = {}
        self._draining = False  # no new requests
        self._closed = False  # no reserved ones either
        self._current = WeightsVersion(0, State.CURRENT)
        self._other: WeightsVersion | None = None  # LOADING, RETIRING or SEALED
        self._loop = asyncio.get_running_loop()
        self._reports = WakeupThrottle(self._deliver)
        self._stopped = asyncio.Event()
        # A daemon, so that a step that hangs does not keep a process that must end.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Number of the version of the weights that answers new requests."""
        return self._current.number

    @property
    def failure(self) -> str | None:
        """The reason why the engine stopped by itself, if it did."""
        return FAILED if self.failed.is_set() else None

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

    def stalled(self) -> float | None:
        """Seconds that the present step has taken, if that is longer than `stall_timeout`."""
        began = self._driver.step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        return seconds if seconds > self._stall_timeout else None

    def now(self) -> float:
        """The engine's clock, on which deadlines are given."""
        return self._driver.now()

    def lease(self, usage: Usage | None = None) -> Lease:
        """Keep the current weights until `end_lease`."""
        self._current.leases += 1
        return Lease(self._current, usage or Usage())

    def end_lease(self, lease: Lease) -> None:
        """End a lease: nothing else will be submitted by it."""
        lease.version.leases -= 1
        self._seal_when_unleased()

    def submit(self, requests: Sequence[Request], lease: Lease | None = None) -> Submission:
        """Queue requests, all or none, to be answered by the weights of the lease, or else by the
        current ones. Raises InvalidRequest for what the model cannot compute or the queue can never
        hold, EngineStopped, or QueueFull."""
        lease = lease or Lease(self._current)
        self._check(requests, lease.version)
        return self._enqueue(requests, self.admission.admit(requests), lease)

    def reserve(self, requests: Sequence[Request], lease: Lease | None = None) -> Reservation:
        """Keep room for requests that are to run one after another. The lease becomes the
        reservation's. Raises as `submit` does."""
        self._check(requests, self._current if lease is None else lease.version)
        self.admission.reserve(requests)
        return Reservation(self, requests, lease or self.lease())

    def submit_reserved(self, request: Request, lease: Lease) -> Submission:
        """Queue a reserved request; called by its Reservation."""
        self._check_open(lease.version, closed=self._closed)
        return self._enqueue([request], [self.admission.admit_reserved(request)], lease)

    async def reload(self, path: Path, weights_sha256: str, timeout: float) -> None:
        """Replace the weights by those of a checkpoint, without a break (`versions.py`). The old
        ones have `timeout` seconds to answer what was submitted to them; what is left then ends
        with an error. Returns when nothing is computed by them any more. Raises ReloadError if the
        new ones do not take over."""
        if self.failure is not None or self._draining:
            raise ReloadError(self.failure or SHUTTING_DOWN)
        if self._other is not None:
            raise ReloadError("another checkpoint is being loaded")
        old = self._current
        new = self._other = WeightsVersion(old.number + 1)
        self._driver.load_weights(path, weights_sha256, self._loaded)
        await new.reach(State.CURRENT)
        try:
            async with asyncio.timeout(timeout):
                await old.reach(State.GONE)
        except TimeoutError:
            self._end_requests_of(old)
            await old.reach(State.GONE)

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
                self._driver.abort(request_id)
        self._driver.stop()
        await self._stopped.wait()
        self._thread.join()

    def _check(self, requests: Sequence[Request], version: WeightsVersion) -> None:
        """Raise unless the model can compute the requests and the engine accepts new ones."""
        for request in requests:
            check_request(request, self._driver.model_config)
        self._check_open(version, closed=self._draining)

    def _check_open(self, version: WeightsVersion, *, closed: bool) -> None:
        if self.failure is not None:
            raise EngineStopped(self.failure)
        if closed:
            raise EngineStopped(SHUTTING_DOWN)
        if not version.accepts:
            raise EngineStopped(REPLACED)

    def _enqueue(
        self, requests: Sequence[Request], loads: Sequence[Load], lease: Lease
    ) -> Submission:
        """Give admitted requests to the engine."""
        ids, sequences = [r.request_id for r in requests], sum(load.sequences for load in loads)
        lease.usage.begin(requests, sequences)
        submission = Submission(self._driver, ids, sequences, lease.usage)
        for request, load in zip(requests, loads, strict=True):
            opened = _OpenRequest(submission, load.sequences, load, request.caller, lease.version)
            self._open[request.request_id] = opened
            self._driver.add(request, lease.version.number)
        return submission

    # The engine's thread

    def _run(self) -> None:
        """Make steps until the last command is done."""
        try:
            while (report := self._driver.run_once(self._reports.wake)) is not None:
                urgent = report.result.prefilled_tokens > 0 or not report.has_work
                self._reports.put(report, urgent=urgent)
                if not report.has_work:
                    self._reports.wake()  # otherwise when the next step computes
        except BaseException:  # everyone who waits is told, whatever it was
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failed)
        finally:
            self._driver.close()
            self._loop.call_soon_threadsafe(self._on_stopped)

    def _loaded(self, refusal: str | None) -> None:
        self._loop.call_soon_threadsafe(self._on_loaded, refusal)

    # Back on the event loop

    def _deliver(self, report: StepReport) -> None:
        """Put a step's events into the mailboxes they belong to."""
        for event in report.events:
            request = self._open[event.request_id]
            request.submission.deliver(event)
            if isinstance(event, FinishEvent):
                request.open -= 1
                if not request.open:
                    del self._open[event.request_id]
                    self.admission.end_request(request.load, request.caller)
                self.admission.end_sequence(event, request.caller)
        if self._other is not None and report.weights > self._other.number:
            self._other.enter(State.GONE)
            self._other = None
        self.admission.set_begun(report.stats.begun_tokens)
        self.decoding = report.result.decoded_sequences > 0
        self._on_step(report)

    def _on_loaded(self, refusal: str | None) -> None:
        """The driver has loaded other weights, or refuses to."""
        new = self._other
        assert new is not None
        if refusal is not None:
            self._other = None
            new.fail(refusal)
            return
        self._other, self._current = self._current, new
        self._other.enter(State.RETIRING)
        new.enter(State.CURRENT)
        self._seal_when_unleased()

    def _seal_when_unleased(self) -> None:
        other = self._other
        if other is not None and other.state is State.RETIRING and not other.leases:
            self._seal(other)

    def _seal(self, retiring: WeightsVersion) -> None:
        """Let the current weights take over; the engine itself waits for what was submitted."""
        retiring.enter(State.SEALED)
        self._driver.swap_weights()

    def _end_requests_of(self, old: WeightsVersion) -> None:
        """End the requests of the old weights: the current ones have waited long enough."""
        ids = [name for name, request in self._open.items() if request.version is old]
        logger.warning("new weights take over: %d requests of the old ones are ended", len(ids))
        for request_id in ids:
            self._driver.abort(request_id, reason=FinishReason.REPLACED)
        if old.state is State.RETIRING:
            self._seal(old)

    def _on_failed(self) -> None:
        """Nothing that is submitted will be computed; what was, is delivered first."""
        self.failed.set()
        self._reports.deliver()
        for request in self._open.values():
            request.submission.fail(FAILED)
        self._open.clear()
        self.admission.clear()
        if self._other is not None:
            self._other.fail(FAILED)

    def _on_stopped(self) -> None:
        """The thread has ended; what it left is delivered first."""
        self._reports.deliver()
        if self._other is not None:
            self._other.fail(SHUTTING_DOWN)
        self._stopped.set()


@dataclass(slots=True)
class _OpenRequest:
    submission: Submission
    open: int  # sequences that have not ended
    load: Load
    caller: str
    version: WeightsVersion  # that answers it
