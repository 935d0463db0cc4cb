"""Constraints: compiled off the event loop, within a time limit, once for equal sources.

Each is compiled first in a sandbox, a process that can be killed, and then here. Compiled ones are
cached. There are two sandboxes, each with one compilation at a time, for which callers take turns
(`fair_lock.py`). In the first, a compilation has FIRST_SECONDS. If that is not enough it begins
again in the second, with its whole time: so slow constraints delay others only for moments. A
client that leaves stops waiting, and a compilation that nobody waits for any more ends, with the
process if need be.

Not here: what a constraint is (`model/inference/constraints/compiler.py`), the sandbox
(`sandbox.py`) and the cache (`cache.py`) beside it, and the masks of the sampler
(`model/inference/sampling/`).
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from logitd.model.inference.constraints.cache import ConstraintCache
from logitd.model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Source,
)
from logitd.model.inference.constraints.sandbox import Checker
from logitd.model.inference.errors import ConstraintError
from logitd.service.engine.build import Unavailable
from logitd.service.errors import ApiError, bad_request
from logitd.service.metrics.model_metrics import ModelMetrics
from logitd.service.models.fair_lock import FairLock

MAX_COMPILING = 16
"""Different constraints that are being compiled, or wait to be. A caller with less than its share
of them, in equal parts, is served beyond that, up to twice as many."""
FIRST_SECONDS = 0.25
"""Time of a constraint before it makes way for others. Those of ordinary requests take
milliseconds."""
KILL_INTERVAL = 1.0
"""Seconds after which a process that should have ended is killed again: it may have been starting
when it was killed before."""


class _TooSlow(ConstraintError):
    """Compiling took more than its time."""


class _NoTurn(Exception):
    """No sandbox was free in time."""


@dataclass(slots=True)
class _Sandbox:
    checker: Checker
    lock: FairLock = field(default_factory=FairLock)


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
        checker: Checker,
        *,
        timeout: float,
        metrics: ModelMetrics,
    ) -> None:
        self._compiler = compiler
        self._first, self._second = _Sandbox(checker), _Sandbox(checker.twin())
        self._timeout = timeout
        self._metrics = metrics
        self._cache = ConstraintCache()
        self._compiling: dict[Source, _Compiling] = {}

    async def compiled(self, source: Source, caller: str = "") -> Constraint:
        """Take it from the cache, compile it, or wait until another request has compiled it.
        ApiError where it cannot be compiled, or not in time."""
        if (constraint := self.cached(source)) is not None:
            return constraint
        compiling = self._compiling.get(source) or self._begin(source, caller)
        assert compiling.task is not None
        compiling.waiters += 1
        try:
            constraint = await asyncio.shield(compiling.task)
        except _NoTurn as error:
            raise self._busy() from error
        except _TooSlow as error:
            raise self._rejected(source, str(error), "timed_out") from error
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
        """End the sandboxes; nothing can be compiled after this."""
        self._first.checker.close()
        self._second.checker.close()

    def cached(self, source: Source) -> Constraint | None:
        """The constraint, if it was compiled before and is still in the cache."""
        constraint = self._cache.get(source)
        if constraint is not None:
            self._metrics.constraints["kept"].inc()
        self._metrics.constraints_kept.set(len(self._cache))
        return constraint

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
        try:
            constraint = await self._compile_within(
                self._first, compiling, compiler, min(FIRST_SECONDS, self._timeout)
            )
            if constraint is None and self._timeout > FIRST_SECONDS:
                constraint = await self._compile_within(
                    self._second, compiling, compiler, self._timeout
                )
        finally:
            self._forget(compiling)
        if constraint is None:
            raise _TooSlow(
                f"it took more than {self._timeout:g} s to compile; make it simpler, or raise "
                "--constraint-timeout"
            )
        self._cache.put(constraint)
        self._metrics.constraints_kept.set(len(self._cache))
        return constraint

    async def _compile_within(
        self, sandbox: _Sandbox, compiling: _Compiling, compiler: Compiler, seconds: float
    ) -> Constraint | None:
        """Compile in a sandbox and then here, if the sandbox does not need more than that; None
        otherwise. Raises _NoTurn or ConstraintError."""
        source = compiling.source
        try:
            async with sandbox.lock.held_by(compiling.caller, self._timeout):
                began = time.monotonic()
                size = await _check(sandbox.checker, source, seconds)
                if size is None:
                    return None
                constraint = await asyncio.to_thread(compiler.compile, source)
                self._metrics.constraint_compile.observe(time.monotonic() - began)
        except TimeoutError as error:
            raise _NoTurn from error
        constraint.size = max(size, len(source.text))
        return constraint

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


async def _check(checker: Checker, source: Source, seconds: float) -> int | None:
    """Compile in a sandbox; the bytes that it took, or None when it takes more than so many
    seconds. Raises ConstraintError. The sandbox has come to an end of it, also when this call is
    cancelled."""
    checking: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(checker.start))
    try:
        await asyncio.shield(checking)
        checking = asyncio.ensure_future(asyncio.to_thread(checker.check, source))
        await asyncio.wait({checking}, timeout=seconds)
        if checking.done():
            size: int = checking.result()
            return size
    except asyncio.CancelledError:
        await _end(checker, checking)
        raise
    return await _end(checker, checking)


async def _end(checker: Checker, checking: "asyncio.Future[Any]") -> int | None:
    """Kill a sandbox, which ends what it is asked, and wait for that; the answer, if there was one
    all the same. Goes on when the caller is cancelled meanwhile."""
    cancelled = False
    while not checking.done():
        checker.kill()
        try:
            await asyncio.wait({checking}, timeout=KILL_INTERVAL)
        except asyncio.CancelledError:
            cancelled = True
    error = checking.exception()  # asked for even when nobody waits: else asyncio logs it
    if cancelled:
        raise asyncio.CancelledError
    if error is not None:
        return None
    size: int | None = checking.result()
    return size
