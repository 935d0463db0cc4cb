"""Constraints: compiles constraints outside the event loop and caches them.

The source of a constraint is first compiled as a trial, in a separate process with a limit on
processor time (`model/inference/constraints/sandbox.py`). If that succeeds, it is compiled in this
process. Trials run in parallel, so a slow trial hardly delays the others. A trial ends when its
time is over, or when no client is waiting for its result. Equal sources are compiled only once.
"""

import asyncio
import socket
import time
from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

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
from logitd.service.engine.admission import Limit
from logitd.service.errors import ApiError, bad_request, queue_full
from logitd.service.metrics.model_metrics import ModelMetrics
from logitd.service.models.turns import CallerTurns
from logitd.service.threads import to_thread_until_done

MAX_COMPILING = 8
"""Maximum number of constraints compiled at the same time. Callers that have less than an equal
share of the running compilations may exceed this limit, until twice this number are running."""
MAX_CACHED = 32
PATIENCE = 20
"""Maximum duration of a trial, as a multiple of its limit on processor time. A trial takes longer
than its processor time if the machine is busy."""


@dataclass(eq=False, slots=True)
class _Compiling:
    """A running compilation. `caller` is the first caller that requested it."""

    task: asyncio.Task[Constraint]
    caller: str
    waiters: int = 0


class Constraints:
    """The constraints for one vocabulary. Use it only on the event loop."""

    def __init__(
        self,
        compiler: Compiler | ConstraintsUnavailable,
        sandbox: Sandbox,
        *,
        timeout: float,
        metrics: ModelMetrics,
    ) -> None:
        self._compiler = compiler
        self._sandbox = sandbox
        self._starting, self._slow = asyncio.Lock(), CallerTurns()
        self._timeout = timeout
        self._metrics = metrics
        self._cache: OrderedDict[Source, Constraint] = OrderedDict()  # least recently used first
        self._compiling: dict[Source, _Compiling] = {}
        self._trials: set[socket.socket] = set()

    async def compiled(self, source: Source, caller: str = "") -> Constraint:
        """The compiled constraint. Raises ApiError if it cannot be compiled."""
        return self.cached(source) or await self._compiled_now(source, caller)

    async def _compiled_now(self, source: Source, caller: str) -> Constraint:
        """Compile a constraint, or wait until another request has compiled it."""
        compiling = self._compiling.get(source) or self._begin(source, caller)
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
            if not compiling.waiters and not compiling.task.done():  # every client has left
                compiling.task.cancel()
                self._ended(source, compiling.task)
        self._metrics.constraints["compiled"].inc()
        return constraint

    def close(self) -> None:
        """End the sandbox and its trials. Nothing can be compiled afterwards."""
        for trial in self._trials:
            trial.shutdown(socket.SHUT_RDWR)
        self._sandbox.close()

    def cached(self, source: Source) -> Constraint | None:
        constraint = self._cache.get(source)
        if constraint is not None:
            self._cache.move_to_end(source)
            self._metrics.constraints["kept"].inc()
        return constraint

    def _begin(self, source: Source, caller: str) -> _Compiling:
        if isinstance(self._compiler, ConstraintsUnavailable):
            raise self._rejected(source, str(self._compiler))
        if len(self._compiling) >= MAX_COMPILING:
            counts = Counter(compiling.caller for compiling in self._compiling.values())
            counts[caller] += 1
            most = 2 * MAX_COMPILING
            if counts[caller] > MAX_COMPILING // len(counts) or counts.total() > most:
                raise self._busy()
        task = asyncio.create_task(self._compile(source, self._compiler, caller))
        task.add_done_callback(partial(self._ended, source))
        compiling = self._compiling[source] = _Compiling(task, caller)
        return compiling

    def _ended(self, source: Source, task: asyncio.Task[Constraint]) -> None:
        known = self._compiling.get(source)
        if known is not None and known.task is task:
            del self._compiling[source]
        if task.done() and not task.cancelled():
            task.exception()  # retrieve it, or asyncio warns if every client has left

    async def _compile(self, source: Source, compiler: Compiler, caller: str) -> Constraint:
        """Compile a source as a trial, then in this process, and cache the result. Slow sources are
        compiled one after another, in turn for each caller."""
        began = time.monotonic()
        await self._try(source)
        slow = time.monotonic() - began > LONG_SECONDS
        async with self._slow.turn(caller) if slow else nullcontext():
            constraint = await to_thread_until_done(partial(compiler.compile, source))
        self._metrics.constraint_compile.observe(time.monotonic() - began)
        self._cache[source] = constraint
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        self._metrics.constraints_kept.set(len(self._cache))
        return constraint

    async def _try(self, source: Source) -> None:
        """Compile a source in the sandbox. Raises ConstraintError if the source is refused,
        ConstraintsUnavailable if there is no sandbox, and ApiError if the machine is too busy. The
        trial has ended when this method returns or is cancelled."""
        loop = asyncio.get_running_loop()
        async with self._starting:
            await to_thread_until_done(self._sandbox.start)
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
        return queue_full(
            f"{len(self._compiling)} other constraints are being compiled; try again in about 1 s",
            retry_after=1,
            limit=Limit.CONSTRAINTS,
        )
