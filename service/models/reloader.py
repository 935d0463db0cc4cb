"""Reloader: another checkpoint in place of the one that is served, without a break.

What is asked for is read and held against what is served; the engine then loads the weights beside
its own and swaps them between two steps (`AsyncEngine.reload`). One at a time. Whatever goes wrong,
the checkpoint before answers on, and the log and a metric say so. Asked for by a run that is
followed and by POST /admin/reload. A checkpoint that the administrator named stays until another is
named or none: a run that is followed does not replace it.
"""

import asyncio
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from logitd.model.checkpoint.run_folder import checkpoint_of, is_run
from logitd.model.inference.load import check_replacement
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.versions import ReloadError
from logitd.service.metrics.model_metrics import ModelMetrics, ReloadResult
from logitd.service.settings.serve import ServeSettings

__all__ = ["ReloadError", "Reloaded", "Reloader"]

logger = logging.getLogger("logitd")


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What answers now, and whether that is another checkpoint than before."""

    checkpoint: CheckpointInfo
    swapped: bool


class Reloader:
    """Puts checkpoints in place of the one that is served. Belongs to the event loop."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: AsyncEngine,
        checkpoints: MutableMapping[int, CheckpointInfo],
        metrics: ModelMetrics,
        reload_lock: asyncio.Lock,
    ) -> None:
        """`settings` are of this model alone. `checkpoints` has what each version of the engine's
        weights is called: the one that is served, and after each reload one more.
        `reload_lock` is shared by the models of a server, so that no two of them have other
        weights beside their own at once."""
        self._settings = settings
        self._engine = engine
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._reload_lock = reload_lock
        self._chosen: Path | None = None  # named by the administrator

    @property
    def checkpoint(self) -> CheckpointInfo:
        """Whose weights answer what comes now."""
        return self._checkpoints[self._engine.version]

    def wanted(self) -> Path:
        """The checkpoint to serve now: the one that was chosen by name, or else the one that the
        server was started to serve, of a run its best or the one that is followed."""
        return self._chosen or self._started()

    async def choose(self, name: str | None) -> Reloaded:
        """Serve the checkpoint of a name until another is chosen; None returns to the one that the
        server was started to serve. Raises OSError, and ReloadError as `reload` does."""
        reloaded = await self.reload(self._started() if name is None else self._named(name))
        self._chosen = None if name is None else reloaded.checkpoint.path
        return reloaded

    def _started(self) -> Path:
        return checkpoint_of(self._settings.source.path, self._settings.follow)

    def _named(self, name: str) -> Path:
        """A checkpoint in the folder that is served from: the run, or where the checkpoint lies.
        Raises ReloadError for any other name."""
        path = self._settings.source.path
        folder = path if is_run(path) else path.resolve().parent
        names = {child.name for child in folder.iterdir() if (child / "config.json").is_file()}
        if name not in names:
            raise ReloadError(
                f"{name[:80]!r} is not a checkpoint beside the one that is served; there are "
                f"{', '.join(sorted(names)[:20]) or 'none'}"
            )
        return folder / name

    async def reload(self, path: Path) -> Reloaded:
        """Serve the checkpoint at a path. Returns once nothing is answered by the one before.
        Raises ReloadError when that answers on."""
        async with self._reload_lock:
            try:
                reloaded = await self._reload(path)
            except (CheckpointError, OSError, ReloadError) as error:
                self._metrics.reloads[ReloadResult.REFUSED].inc()
                logger.error(
                    "%s does not take the place of %s, which answers on: %s",
                    path, self.checkpoint.path, error,
                )  # fmt: skip
                raise ReloadError(str(error)) from error
        result = ReloadResult.SWAPPED if reloaded.swapped else ReloadResult.UNCHANGED
        self._metrics.reloads[result].inc()
        return reloaded

    async def _reload(self, path: Path) -> Reloaded:
        before = self.checkpoint
        checkpoint = await asyncio.to_thread(read_checkpoint, path)
        if checkpoint.weights_sha256 == before.weights_sha256:
            return Reloaded(before, swapped=False)
        check_replacement(before, checkpoint)
        # The same tokenizer: what it has learned about its tokens stays.
        checkpoint = replace(checkpoint, tokenizer=before.tokenizer)
        version = self._engine.version + 1
        self._checkpoints[version] = checkpoint  # before a request can be of that version
        try:
            await self._engine.reload(
                path.absolute(), checkpoint.weights_sha256, self._settings.reload_timeout
            )
        except ReloadError:
            if self._engine.version < version:
                del self._checkpoints[version]
            raise
        self._metrics.served(checkpoint)
        logger.info(
            "%s (step %d) answers in place of %s (step %d)",
            checkpoint.path, checkpoint.training.step, before.path, before.training.step,
        )  # fmt: skip
        return Reloaded(checkpoint, swapped=True)
