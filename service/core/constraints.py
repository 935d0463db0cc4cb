"""Constraints: compiled beside the event loop, within a time, once for all who ask for the same.

Each is compiled in a process of its own first, which may be killed, and then here. What was
compiled is kept (`kept_constraints`). Not here: what a constraint is
(`model/inference/constraints/compiler.py`), that process
(`model/inference/constraints/sandbox.py`), and how a constraint reaches the sampler
(`model/engine/`).

One is compiled at a time and others wait for their turn. A client that leaves meanwhile has no part
in any of this.
"""

import asyncio
import json
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
from service.schemas.generate import GenerateRequest

MAX_COMPILING = 16
"""Different constraints that are being compiled, or wait to be."""


def source_of(body: GenerateRequest) -> Source | None:
    """What a body wants its text to be, or None; ApiError for a schema that is no JSON."""
    if body.regex is not None:
        return Source("regex", body.regex)
    if body.grammar is not None:
        return Source("grammar", body.grammar)
    if body.choice is not None:
        return Source("choice", json.dumps(body.choice))
    if body.json_schema is None:
        return None
    try:
        return Source("json_schema", json.dumps(body.json_schema, allow_nan=False))
    except ValueError as error:
        raise bad_request("json_schema holds a number that is too large", "json_schema") from error


class _TooSlow(ConstraintError):
    """Compiling took more than its time."""


@dataclass(slots=True)
class _Compiling:
    task: "asyncio.Task[Constraint]"
    started: asyncio.Event = field(default_factory=asyncio.Event)  # its turn has come


class Constraints:
    """The constraints of one checkpoint's vocabulary. Made and used on the event loop.

    `compiler` may be the reason why there is none.
    """

    def __init__(
        self, compiler: Compiler | str, checker: Checker, *, timeout: float, metrics: Metrics
    ) -> None:
        self._compiler = compiler
        self._checker = checker
        self._timeout = timeout
        self._metrics = metrics
        self._kept = ConstraintCache()
        self._compiling: dict[Source, _Compiling] = {}
        self._turn = asyncio.Lock()

    def kept(self, source: Source) -> Constraint | None:
        """The constraint, if it was compiled before and is still there."""
        constraint = self._kept.get(source)
        if constraint is not None:
            self._metrics.constraints.labels("kept").inc()
        self._metrics.constraints_kept.set(len(self._kept))
        return constraint

    async def compiled(self, source: Source) -> Constraint:
        """Compile, or wait for whoever compiles the same already. ApiError for what is refused."""
        if (constraint := self.kept(source)) is not None:
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
            raise self._refused(source, str(error), "timed_out") from error
        except (ConstraintError, ConstraintsUnavailable) as error:
            raise self._refused(source, str(error)) from error
        self._metrics.constraints.labels("compiled").inc()
        return constraint

    def close(self) -> None:
        """End the process; nothing is compiled any more."""
        self._checker.close()

    def _begin(self, source: Source) -> _Compiling:
        if isinstance(self._compiler, str):
            raise self._refused(source, self._compiler)
        if len(self._compiling) >= MAX_COMPILING:
            raise self._busy()
        task = asyncio.create_task(self._compile(source, self._compiler))
        # Whoever waited may be gone: an error that nobody takes is no news.
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
        self._kept.keep(constraint)
        self._metrics.constraints_kept.set(len(self._kept))
        return constraint

    async def _check(self, source: Source) -> int:
        """Compile in the process; the bytes that it took, or ConstraintError."""
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

    def _refused(self, source: Source, reason: str, outcome: str = "refused") -> ApiError:
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
