"""Constraints: compiled off the event loop, within a limit of processor time, once for equal
sources.

Each is tried in a process of its own first (`model/inference/constraints/sandbox.py`), and then
compiled here. Trials run side by side, so slow ones delay others only for moments. A trial ends
when its time is over, or when its last client has left. Compiled constraints are cached.

Does not know what a constraint is (`model/inference/constraints/compiler.py`).
"""

import asyncio
import socket
import time
from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass

from logitd.model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Source,
)
from logitd.model.inference.constraints.sandbox import (
    ANSWER_BYTES,
    LONG_SECONDS,
    Sandbox,
    TooSlow,
    check,
    request_of,
)
from logitd.model.inference.errors import ConstraintError
from logitd.service.engine.build import Unavailable
from logitd.service.errors import ApiError, bad_request
from logitd.service.metrics.model_metrics import ModelMetrics

MAX_COMPILING = 8
"""Different constraints that are compiled at once. A caller with less than an equal share of them
is served beyond that, up to twice as many."""
MAX_CACHED = 32
MAX_PREPARED = 64
"""Sequences of a request for which a constraint that is slow is compiled ahead."""
PATIENCE = 20
"""How many times its processor time a trial may last, on a machine that does other things."""


@dataclass(eq=False, slots=True)
class _Compiling:
    """A compilation; `task` is none for a moment only."""

    source: Source
    caller: str  # who asked first
    task: "asyncio.Task[Constraint] | None" = None
    waiters: int = 0


class Constraints:
    """The constraints of one checkpoint's vocabulary. Made and used on the event loop."""

    def __init__(
        self,
        compiler: Compiler | Unavailable,
        sandbox: Sandbox,
        *,
        timeout: float,
        metrics: ModelMetrics,
    ) -> None:
        self._compiler = compiler
        self._sandbox = sandbox
        self._starting, self._slow = asyncio.Lock(), asyncio.Lock()
        self._timeout = timeout
        self._metrics = metrics
        self._cache: OrderedDict[Source, Constraint] = OrderedDict()  # the oldest use first
        self._compiling: dict[Source, _Compiling] = {}
        self._trials: set[socket.socket] = set()

    async def compiled(self, source: Source, sequences: int = 1, caller: str = "") -> Constraint:
        """The constraint for a request of so many sequences. ApiError if it cannot be compiled."""
        constraint = self.cached(source) or await self._compiled_now(source, caller)
        if constraint.is_quick:
            return constraint
        constraint = constraint.without_starts()
        for _ in range(min(sequences, MAX_PREPARED)):
            async with self._slow:
                await asyncio.to_thread(constraint.prepare)
        return constraint

    async def _compiled_now(self, source: Source, caller: str) -> Constraint:
        """Compile it, or wait until another request has compiled it."""
        compiling = self._compiling.get(source) or self._begin(source, caller)
        assert compiling.task is not None
        compiling.waiters += 1
        try:
            constraint = await asyncio.shield(compiling.task)
        except TooSlow as error:
            reason = f"it took more than {self._timeout:g} s to compile; make it simpler, or raise "
            raise self._rejected(source, f"{reason}--constraint-timeout", "timed_out") from error
        except (ConstraintError, ConstraintsUnavailable) as error:
            raise self._rejected(source, str(error)) from error
        finally:
            compiling.waiters -= 1
            if not compiling.waiters and not compiling.task.done():  # everybody has left
                self._forget(compiling)
                compiling.task.cancel()
        self._metrics.constraints["compiled"].inc()
        return constraint

    def close(self) -> None:
        """End the sandbox and its trials; nothing can be compiled after this."""
        for trial in self._trials:
            trial.shutdown(socket.SHUT_RDWR)
        self._sandbox.close()

    def cached(self, source: Source) -> Constraint | None:
        """The constraint, if it is cached."""
        constraint = self._cache.get(source)
        if constraint is not None:
            self._cache.move_to_end(source)
            self._metrics.constraints["kept"].inc()
        return constraint

    def _keep(self, constraint: Constraint) -> None:
        """Cache a constraint, and drop the least recently used one above the limit."""
        self._cache[constraint.source] = constraint
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        self._metrics.constraints_kept.set(len(self._cache))

    def _begin(self, source: Source, caller: str) -> _Compiling:
        if isinstance(self._compiler, Unavailable):
            raise self._rejected(source, self._compiler.reason)
        if len(self._compiling) >= MAX_COMPILING:
            counts = Counter(compiling.caller for compiling in self._compiling.values())
            counts[caller] += 1
            most = 2 * MAX_COMPILING
            if counts[caller] > MAX_COMPILING // len(counts) or counts.total() > most:
                raise self._busy()
        compiling = self._compiling[source] = _Compiling(source, caller)
        task = compiling.task = asyncio.create_task(self._compile(compiling, self._compiler))
        # All who waited may be gone: an error that nobody retrieves is not worth a warning.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return compiling

    def _forget(self, compiling: _Compiling) -> None:
        if self._compiling.get(compiling.source) is compiling:
            del self._compiling[compiling.source]

    async def _compile(self, compiling: _Compiling, compiler: Compiler) -> Constraint:
        """Try a source, and compile it here; the slow ones one after the other."""
        source, began = compiling.source, time.monotonic()
        try:
            await self._try(source)
            slow = time.monotonic() - began > LONG_SECONDS
            async with self._slow if slow else nullcontext():
                constraint = await asyncio.to_thread(compiler.compile, source)
        finally:
            self._forget(compiling)
        self._metrics.constraint_compile.observe(time.monotonic() - began)
        self._keep(constraint)
        return constraint

    async def _try(self, source: Source) -> None:
        """Try a source in the sandbox. Raises ConstraintError if it is refused,
        ConstraintsUnavailable, and ApiError if the machine has no time for it. The trial has ended
        when this returns, also if it is cancelled."""
        loop = asyncio.get_running_loop()
        async with self._starting:
            await asyncio.to_thread(self._sandbox.start)
        answer = b""
        try:
            with self._sandbox.begin() as trial:
                trial.setblocking(False)
                self._trials.add(trial)
                try:
                    async with asyncio.timeout(PATIENCE * self._timeout):
                        await loop.sock_sendall(trial, request_of(source, self._timeout))
                        answer = await loop.sock_recv(trial, ANSWER_BYTES)
                finally:
                    self._trials.remove(trial)
        except TimeoutError as error:
            raise self._busy() from error
        except OSError:
            pass  # the trial has ended without an answer
        check(answer)

    def _rejected(self, source: Source, reason: str, outcome: str = "refused") -> ApiError:
        self._metrics.constraints[outcome].inc()
        return bad_request(f"{source.kind}: {reason}", source.kind)

    def _busy(self) -> ApiError:
        self._metrics.constraints["busy"].inc()
        return ApiError(
            429,
            "rate_limit_error",
            f"{len(self._compiling)} other constraints are being compiled; try again in about 1 s",
            None,
            "queue_full",
            1,
        )
