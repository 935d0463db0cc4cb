"""History: the steps kept by `logitd train --keep-every`, each served as a model.

A request names a step. The step's weights are loaded at their first use, into a separate engine.
The most recently used steps stay in memory. A step is removed from memory only if no request uses
it, its engine has failed, or its files were replaced. So a request to a step runs and ends like a
request to any other model. After a caller was refused a step, all other callers are limited to an
equal share of the steps in memory. `lifespan.py` loads the steps.
"""

import asyncio
import time
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from logitd.model.checkpoint.run_folder import HISTORY, checkpoints_in
from logitd.model.plural import pluralize
from logitd.service.engine.admission import Limit
from logitd.service.engine.async_engine import SHUTTING_DOWN, AsyncEngine
from logitd.service.engine.submission import EngineStopped
from logitd.service.errors import bad_request, client_gone, queue_full, unavailable
from logitd.service.models.reloader import Files, files_of

REMEMBERED_SECONDS = 10.0
"""Time for which a refused caller counts as waiting. The refusal asks it to try again after 1
second."""
NAMED = 2
"""A message about an unknown step lists this many kept steps before it, and as many after it."""


class HasEngine(Protocol):
    """A loaded model."""

    @property
    def engine(self) -> AsyncEngine: ...


Model = TypeVar("Model", bound=HasEngine)


class History(Generic[Model]):
    """The steps of one run. Use it only on the event loop."""

    def __init__(self, run: Path, load: Callable[[Path], Awaitable[Model]], most: int) -> None:
        """`load` loads a checkpoint of the run as a model. At most `most` models are in memory."""
        self._folder = run / HISTORY
        self._load = load
        self._most = most
        self._loaded: OrderedDict[int, Model] = OrderedDict()  # least recently used first
        self._files: dict[int, tuple[Path, Files]] = {}  # that each step was loaded from
        self._uses: Counter[tuple[int, str]] = Counter()  # by step and caller
        self._refused: dict[str, float] = {}  # callers that wait for a step, and when refused
        self._lock = asyncio.Lock()  # held while `_loaded` changes
        self._closed = False

    def steps(self) -> dict[int, Path]:
        """The checkpoints by step, read from the folder each time, because the run may still be in
        progress. Raises ApiError (503) if the folder cannot be read."""
        try:
            return checkpoints_in(self._folder)
        except OSError as error:
            message = f"the history {self._folder} cannot be read: {error.strerror}"
            raise unavailable(message) from error

    async def open(self, step: int, caller: str) -> Model:
        """Return the model at a step, and keep it in memory until `close` is called for this use.
        Raises EngineStopped, and ApiError: 400 if the step was not kept, 429 if requests are using
        all models in memory or the caller is above its share of them, 503 if the step cannot be
        loaded."""
        self._check_share(step, caller)
        self._uses[step, caller] += 1
        try:
            if (model := await self._ready(step)) is None:
                # If this client leaves while the step is loaded, it is kept for the next one.
                loading = asyncio.ensure_future(self._load_step(step, caller))
                # Retrieve its error, or asyncio warns if the client has left.
                loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                model = await asyncio.shield(loading)
        except BaseException:
            self.close(step, caller)
            raise
        self._refused.pop(caller, None)
        return model

    def close(self, step: int, caller: str) -> None:
        """End one use of a step."""
        self._uses[step, caller] -= 1
        if not self._uses[step, caller]:
            del self._uses[step, caller]

    async def stop(self, drain_timeout: float) -> None:
        """Stop loading, and stop the engines as `AsyncEngine.stop` does."""
        self._closed = True
        async with self._lock:
            pass  # the step that is being loaded
        await asyncio.gather(*(m.engine.stop(drain_timeout) for m in self._loaded.values()))

    def _check_share(self, step: int, caller: str) -> None:
        """Raise ApiError if the caller would use more steps than fit into memory. The limit is its
        share of them if other callers wait for a step."""
        oldest = time.monotonic() - REMEMBERED_SECONDS
        self._refused = {name: at for name, at in self._refused.items() if at > oldest}
        callers = {caller, *self._refused, *(name for _, name in self._uses)}
        own = {step, *(used for used, name in self._uses if name == caller)}
        if len(own) > self._most:
            raise queue_full(
                f"with step {step} you would use {len(own)} steps at the same time, but at most "
                f"{self._most} are in memory; try again in about 1 s, or raise --history-steps",
                retry_after=1,
                limit=Limit.STEPS,
            )
        if self._refused.keys() - {caller} and len(own) > max(1, self._most // len(callers)):
            raise queue_full(
                f"another caller waits for one of the {self._most} steps in memory, and with step "
                f"{step} you would use {len(own)} of them; try again in about 1 s, or raise "
                "--history-steps",
                retry_after=1,
                limit=Limit.STEPS,
            )

    async def _ready(self, step: int) -> Model | None:
        """The loaded model of a step; None if it is not loaded, has failed, or was loaded from
        other files than the run has now."""
        model = self._loaded.get(step)
        if model is None or model.engine.failure is not None:
            return None
        path, files = self._files[step]
        if (
            await asyncio.to_thread(_files_now, path) != files
            or self._loaded.get(step) is not model
        ):
            return None
        self._loaded.move_to_end(step)
        return model

    async def _load_step(self, step: int, caller: str) -> Model:
        path = await asyncio.to_thread(self._path, step)
        async with self._lock:
            if self._closed:
                raise EngineStopped(SHUTTING_DOWN)
            if (model := await self._ready(step)) is None:
                if not any(used == step for used, _ in self._uses):
                    raise client_gone()
                if (old := self._loaded.pop(step, None)) is not None:
                    await old.engine.stop(0, replaced=True)
                await self._make_room(caller)
                files = await asyncio.to_thread(_files_now, path)
                model = self._loaded[step] = await self._load(path)
                self._files[step] = path, files
            return model

    def _path(self, step: int) -> Path:
        steps = self.steps()
        if step not in steps:
            kept = sorted(steps)
            at = bisect(kept, step)
            near = ", ".join(map(str, kept[max(0, at - NAMED) : at + NAMED]))
            raise bad_request(
                f"step {step} is not one of the {pluralize(len(kept), 'step')} in the history; the "
                f"nearest are {near or 'none'}. GET /history lists all",
                "step",
            )
        return steps[step]

    async def _make_room(self, caller: str) -> None:
        """Remove models whose engine failed, and the least recently used ones until another model
        fits. Notes that `caller` waits if none does."""
        used = {step for step, _ in self._uses}
        for step, model in list(self._loaded.items()):
            failed = model.engine.failure is not None
            idle = step not in used and not model.engine.admission.sequences
            if failed or (idle and len(self._loaded) >= self._most):
                del self._loaded[step]
                await model.engine.stop(0)
        if len(self._loaded) >= self._most:
            self._refused[caller] = time.monotonic()
            raise queue_full(
                f"requests are using every step in memory, which holds at most {self._most}; try "
                "again in about 1 s, or raise --history-steps",
                retry_after=1,
                limit=Limit.STEPS,
            )


def _files_now(path: Path) -> Files:
    try:
        return files_of(path)
    except OSError:  # loading reports it
        return ()
