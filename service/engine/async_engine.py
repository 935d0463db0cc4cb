"""AsyncEngine: the interface of the engine for code on the event loop.

`admission.py` first decides whether a request is admitted. The request then becomes a command of
the driver, which runs in a separate thread (`driver.py`). A step of the engine wakes the event loop
at most once (`wakeup.py`), and its events are put into the mailboxes of their submissions
(`submission.py`). This module knows nothing about HTTP, text or checkpoints.
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
from logitd.model.inference.engine.validation import check_requests
from logitd.service.engine.admission import AdmissionController, Load
from logitd.service.engine.driver import EngineDriver, StepReport
from logitd.service.engine.submission import REPLACED, EngineStopped, Submission
from logitd.service.engine.usage import Usage
from logitd.service.engine.wakeup import WakeupThrottle

logger = logging.getLogger("logitd.engine")

FAILED = "the engine failed; the log says why"
SHUTTING_DOWN = "the server is shutting down"


class ReloadError(Exception):
    """Raised if new weights cannot be used. The old weights stay in use. The message gives the
    reason."""


@dataclass(eq=False, slots=True)
class WeightsVersion:
    """One version of the weights. A sealed version accepts no more requests.

    A session that will submit more requests to a version holds that version, which prevents
    sealing.
    """

    number: int
    holds: int = 0
    sealed: bool = False


class AsyncEngine:
    """Owns the engine's driver. Create it on the event loop that uses it."""

    def __init__(
        self,
        driver: EngineDriver,
        admission: AdmissionController,
        *,
        stall_timeout: float,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self.admission = admission
        self.failed = asyncio.Event()  # the engine stopped because of an error
        self.decoding = False  # the last step decoded tokens
        self._driver = driver
        self._stall_timeout = stall_timeout
        self._on_step = on_step
        self._open: dict[str, _OpenRequest] = {}
        self._unread: dict[Submission, None] = {}  # have events, and their readers were not woken
        self._draining = False  # no new requests
        self._closed = False  # no further requests of sessions that have begun either
        self._stops_because = SHUTTING_DOWN
        self._weights = WeightsVersion(0)  # for new requests
        self._holds = 0  # of all versions
        self._computing = 0  # number of the version that the engine computes with
        self._reload: asyncio.Task[None] | None = None  # the last one
        self._changed = asyncio.Event()  # set when a condition of a reload may have become true
        self._loop = asyncio.get_running_loop()
        self._reports = WakeupThrottle(self._deliver)
        self._stopped = asyncio.Event()
        # A daemon, so that a hanging step cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Number of the weights version that answers new requests."""
        return self._weights.number

    @property
    def failure(self) -> str | None:
        """The reason why the engine failed; None if it did not."""
        return FAILED if self.failed.is_set() else None

    def stalled(self) -> float | None:
        """The duration of the current step in seconds if it exceeds `stall_timeout`, else None."""
        seconds = self.step_seconds()
        return seconds if seconds > self._stall_timeout else None

    def step_seconds(self) -> float:
        """The duration of the current step so far; 0 between steps."""
        began = self._driver.step_began
        return 0.0 if began is None else time.monotonic() - began

    def now(self) -> float:
        """Current time on the engine's clock, which deadlines refer to."""
        return self._driver.now()

    def hold(self) -> WeightsVersion:
        """Keep the current version of the weights until `end_hold`. A drain waits for this. Raises
        EngineStopped if new requests are rejected."""
        self._check_open(self._weights, closed=self._draining)
        self._weights.holds += 1
        self._holds += 1
        return self._weights

    def end_hold(self, version: WeightsVersion) -> None:
        """End a hold. Nothing else will be submitted to this version."""
        version.holds -= 1
        self._holds -= 1
        self._changed.set()

    def submit(
        self,
        requests: Sequence[Request],
        version: WeightsVersion | None = None,
        usage: Usage | None = None,
    ) -> Submission:
        """Queue all requests or none, for a held version of the weights (default: the current one).
        Raises InvalidRequest if the model cannot compute a request or if the queue can never have
        room for all of them, QueueFull if the queue has no room now, and EngineStopped."""
        if version is None:
            self._check_open(self._weights, closed=self._draining)
            version = self._weights
        self._check(requests, version)
        return self._enqueue(requests, self.admission.admit(requests), version, usage or Usage())

    def reserve(self, requests: Sequence[Request], version: WeightsVersion) -> None:
        """Reserve room in the queue for requests that are submitted one after another, so that a
        full queue does not reject the later ones. Raises the same errors as `submit`."""
        self._check(requests, version)
        self.admission.reserve(requests)

    def submit_reserved(
        self, request: Request, version: WeightsVersion, usage: Usage
    ) -> Submission:
        """Queue a reserved request. Raises EngineStopped."""
        self._check_open(version)
        return self._enqueue([request], [self.admission.admit_reserved(request)], version, usage)

    async def reload(self, path: Path, weights_sha256: str, timeout: float) -> None:
        """Replace the weights with a checkpoint's weights, without interrupting service. Returns
        once the old weights are no longer used.

        Requests to the old weights have `timeout` seconds to finish; then the unfinished ones end
        with an error. If this call is cancelled, the reload continues. Raises ReloadError if the
        new weights cannot be used.
        """
        if self.failure is not None or self._draining:
            raise ReloadError(self.failure or SHUTTING_DOWN)
        if self._reload is not None and not self._reload.done():
            raise ReloadError("another checkpoint is being loaded")
        self._reload = asyncio.create_task(self._replace_weights(path, weights_sha256, timeout))
        await asyncio.shield(self._reload)

    async def stop(self, drain_timeout: float, *, replaced: bool = False) -> None:
        """Reject new requests, let running ones finish for `drain_timeout` seconds, including what
        their sessions still submit, then abort the rest. `replaced` says that another engine
        answers instead, which the errors of these requests then say."""
        if replaced:
            self._stops_because = REPLACED
        self._draining = True
        if self._stopped.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout):
                await self._wait_idle()
        self._closed = True
        if self._open:
            sequences = sum(request.open for request in self._open.values())
            logger.warning("aborting %d sequences: %s", sequences, self._stops_because)
            reason = FinishReason.REPLACED if replaced else FinishReason.ABORT
            for request_id in list(self._open):
                self._driver.abort(request_id, reason=reason)
        self._driver.stop()
        await self._stopped.wait()
        self._thread.join()

    def _check(self, requests: Sequence[Request], version: WeightsVersion) -> None:
        check_requests(requests, self.admission.config)
        self._check_open(version)

    def _check_open(self, version: WeightsVersion, *, closed: bool = False) -> None:
        if self.failure is not None:
            raise EngineStopped(self.failure)
        if closed or self._closed:
            raise EngineStopped(self._stops_because)
        if version.sealed:
            raise EngineStopped(REPLACED)

    def _enqueue(
        self,
        requests: Sequence[Request],
        loads: Sequence[Load],
        version: WeightsVersion,
        usage: Usage,
    ) -> Submission:
        ids, sequences = [r.request_id for r in requests], sum(load.sequences for load in loads)
        usage.begin(requests, sequences)
        submission = Submission(self._driver, ids, sequences, usage)
        for request, load in zip(requests, loads, strict=True):
            opened = _OpenRequest(submission, load.sequences, load, request.caller, version)
            self._open[request.request_id] = opened
            self._driver.add(request, version.number)
        return submission

    async def _wait_idle(self) -> None:
        """Wait until no request is open and no session will submit another one."""
        while self.admission.sequences or self._holds:
            await self.admission.wait_empty()
            if self._holds:
                self._changed.clear()
                await self._changed.wait()

    # Reloading

    async def _replace_weights(self, path: Path, weights_sha256: str, timeout: float) -> None:
        loading = asyncio.wrap_future(self._driver.load_weights(path, weights_sha256))
        loading.add_done_callback(lambda _: self._changed.set())
        await self._wait_until(loading.done)
        if (error := loading.exception()) is not None:
            raise ReloadError(str(error) or type(error).__name__) from error
        # New requests go to the new weights from now on; they wait in the engine until it has
        # finished those for the old ones.
        old, self._weights = self._weights, WeightsVersion(self._weights.number + 1)
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until(lambda: not old.holds)
                self._seal(old)
                await self._wait_until(lambda: self._computing > old.number)
        except TimeoutError:
            self._abort_requests_of(old)
            if not old.sealed:
                self._seal(old)
            await self._wait_until(lambda: self._computing > old.number)

    async def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()` is true, that is, until a reload has reached its next stage.
        Raises ReloadError if the engine ends first."""
        while not reached():
            if self.failed.is_set() or self._stopped.is_set():
                raise ReloadError(self.failure or SHUTTING_DOWN)
            self._changed.clear()
            await self._changed.wait()

    def _seal(self, version: WeightsVersion) -> None:
        version.sealed = True
        self._driver.swap_weights()

    def _abort_requests_of(self, version: WeightsVersion) -> None:
        ids = [name for name, request in self._open.items() if request.version is version]
        logger.warning("new weights take over: ending %d requests to the old weights", len(ids))
        for request_id in ids:
            self._driver.abort(request_id, reason=FinishReason.REPLACED)

    # The engine's thread

    def _run(self) -> None:
        """Run the engine's steps until the driver has handled its last command."""
        try:
            while (report := self._driver.run_once(self._reports.wake)) is not None:
                urgent = report.result.prefilled_tokens > 0 or not report.has_work
                ends = any(isinstance(event, FinishEvent) for event in report.events)
                self._reports.put(report, urgent=urgent or ends)
                if not report.has_work:
                    self._reports.wake()  # if there is work, the next step wakes the loop
        except BaseException:  # whatever it is, waiting clients must get an answer
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failed)
        try:
            self._driver.close()
        except Exception:  # `stop` must not wait forever
            logger.exception("the engine failed to close")
        self._loop.call_soon_threadsafe(self._on_stopped)

    # Back on the event loop

    def _deliver(self, reports: Sequence[StepReport], only_urgent: bool) -> None:
        """Put events into the mailboxes, then wake each reader once for all of its events."""
        for report in reports:
            self._distribute(report)
        for submission in list(self._unread):
            if submission.urgent or not only_urgent:
                del self._unread[submission]
                submission.wake()

    def _distribute(self, report: StepReport) -> None:
        for event in report.events:
            request = self._open[event.request_id]
            request.submission.deliver(event)
            self._unread[request.submission] = None
            if isinstance(event, FinishEvent):
                request.open -= 1
                elements = 0 if request.open else request.load.elements
                self.admission.end_sequence(event, request.caller, elements)
                if not request.open:
                    del self._open[event.request_id]
        if report.weights != self._computing:
            self._computing = report.weights
            self._changed.set()
        self.admission.begun_tokens = report.stats.begun_tokens
        self.decoding = report.result.decoded_sequences > 0
        self._on_step(report)

    def _on_failed(self) -> None:
        """Deliver the results that were computed, and end all other requests with an error."""
        self.failed.set()
        self._reports.deliver()
        for submission in {request.submission for request in self._open.values()}:
            submission.fail(FAILED)
        self._open.clear()
        self.admission.clear()
        self._changed.set()

    def _on_stopped(self) -> None:
        """Deliver the last events after the thread has ended."""
        self._reports.deliver()
        self._stopped.set()
        self._changed.set()


@dataclass(slots=True)
class _OpenRequest:
    submission: Submission
    open: int  # sequences that have not ended
    load: Load
    caller: str
    version: WeightsVersion  # the weights that answer it
