"""Constraints: compiled off the event loop, within a time limit, once for equal sources.

Each is compiled first in a sandbox, a process that can be killed, and then here. Compiled ones are
cached. One is compiled at a time, the others wait. A client that leaves meanwhile stops waiting;
the compilation goes on for the others.

Not here: what a constraint is (`model/inference/constraints/compiler.py`), the sandbox
(`sandbox.py`) and the cache (`cache.py`) beside it, and the masks of the sampler
(`model/inference/sampling/`).
"""

import asyncio
import time
from dataclasses import dataclass, field

from model.inference.constraints.cache import ConstraintCache
from model.inference.constraints.compiler import (
    Compiler,
    Constraint,
    ConstraintsUnavailable,
    Source,
)
from model.inference.constraints.sandbox import Checker
from model.inference.errors import ConstraintError
from service.core.errors import ApiError, bad_request
from service.core.metrics import Metrics
from service.engine.build import Unavailable

MAX_COMPILING = 16
"""Different constraints that are being compiled, or wait to be."""


class _TooSlow(ConstraintError):
    """Compiling took more than its time."""


@dataclass(slots=True)
class _Compiling:
    task: "asyncio.Task[Constraint]"
    started: asyncio.Event = field(default_factory=asyncio.Event)  # its turn has come


class Constraints:
    """The constraints of one checkpoint's vocabulary. Made and used on the event loop."""

    def __init__(
        self,
        compiler: Compiler | Unavailable,
        checker: Checker,
        *,
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self._compiler = compiler
        self._checker = checker
        self._timeout = timeout
        self._metrics = metrics
        self._cache = ConstraintCache()
        self._compiling: dict[Source, _Compiling] = {}
        self._turn = asyncio.Lock()

    async def compiled(self, source: Source) -> Constraint:
        """Take it from the cache, compile it, or wait until another request has compiled it.
        ApiError where it cannot be compiled, or not in time."""
        if (constraint := self.cached(source)) is not None:
            return constraint
        compiling = self._compiling.get(source) or self._begin(source)
        try:
            async with asyncio.timeout(self._timeout):
                await compiling.started.wait()
        except TimeoutError as error:
            raise self._busy() from error
        try:
            constraint = await asyncio.shield(compiling.task)
        except _TooSlow as error:
            raise self._rejected(source, str(error), "timed_out") from error
        except (ConstraintError, ConstraintsUnavailable) as error:
            raise self._rejected(source, str(error)) from error
        self._metrics.constraints.labels("compiled").inc()
        return constraint

    def close(self) -> None:
        """End the sandbox; nothing can be compiled after this."""
        self._checker.close()

    def cached(self, source: Source) -> Constraint | None:
        """The constraint, if it was compiled before and is still in the cache."""
        constraint = self._cache.get(source)
        if constraint is not None:
            self._metrics.constraints.labels("kept").inc()
        self._metrics.constraints_kept.set(len(self._cache))
        return constraint

    def _begin(self, source: Source) -> _Compiling:
        if isinstance(self._compiler, Unavailable):
            raise self._rejected(source, self._compiler.reason)
        if len(self._compiling) >= MAX_COMPILING:
            raise self._busy()
        task = asyncio.create_task(self._compile(source, self._compiler))
        # All who waited may be gone: an error that nobody retrieves is not worth a warning.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        compiling = self._compiling[source] = _Compiling(task)
        return compiling

    async def _compile(self, source: Source, compiler: Compiler) -> Constraint:
        try:
            async with self._turn:
                self._compiling[source].started.set()
                began = time.monotonic()
                size = await self._check(source)
                constraint = await asyncio.to_thread(compiler.compile, source)
                self._metrics.constraint_compile.observe(time.monotonic() - began)
        finally:
            del self._compiling[source]
        constraint.size = max(size, len(source.text))
        self._cache.put(constraint)
        self._metrics.constraints_kept.set(len(self._cache))
        return constraint

    async def _check(self, source: Source) -> int:
        """Compile in the sandbox; the bytes that it took, or ConstraintError."""
        await asyncio.to_thread(self._checker.start)
        checking = asyncio.create_task(asyncio.to_thread(self._checker.check, source))
        await asyncio.wait({checking}, timeout=self._timeout)
        if not checking.done():
            self._checker.kill()  # which ends the check
            await asyncio.wait({checking})
            checking.exception()
            raise _TooSlow(
                f"it took more than {self._timeout:g} s to compile; make it simpler, or raise "
                "--constraint-timeout"
            )
        return checking.result()

    def _rejected(self, source: Source, reason: str, outcome: str = "refused") -> ApiError:
        self._metrics.constraints.labels(outcome).inc()
        return bad_request(f"{source.kind}: {reason}", source.kind)

    def _busy(self) -> ApiError:
        self._metrics.constraints.labels("busy").inc()
        return ApiError(
            429,
            "rate_limit_error",
            f"{len(self._compiling)} other constraints are being compiled; try again in about 1 s",
            None,
            "queue_full",
            1,
        )
