"""Reloader: replaces the served checkpoint without interrupting service.

The new checkpoint is read and compared with the served one. The engine then loads the new weights
while still using the old ones, and switches to them after a step (`AsyncEngine.reload`). Only one
reload runs at a time. If anything fails, the old checkpoint stays in use, and the log and a metric
report the failure. A reload is requested by POST /admin/reload, or by `follow`, which watches a
training run for new checkpoints.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    RANKS,
    WEIGHTS,
    CheckpointError,
    CheckpointInfo,
    read_checkpoint,
)
from logitd.model.checkpoint.run_folder import checkpoint_of, is_run
from logitd.model.inference.load import check_replacement
from logitd.service.engine.async_engine import AsyncEngine, ReloadError
from logitd.service.metrics.model_metrics import ModelMetrics, ReloadResult
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


Files = tuple[tuple[int, int, int], ...]
"""The inode, size and time of change of each file of a checkpoint that exists."""


class Reloader:
    """Reloads the checkpoint of one model. Use it only on the event loop."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: AsyncEngine,
        checkpoints: MutableMapping[int, CheckpointInfo],
        metrics: ModelMetrics,
        reload_lock: asyncio.Lock,
    ) -> None:
        """`settings` are this model's settings. `checkpoints` maps each version of the engine's
        weights to its checkpoint; a reload adds one. `reload_lock` is shared by all models, so that
        only one of them has a second set of weights in memory."""
        self._settings = settings
        self._engine = engine
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._reload_lock = reload_lock
        self._chosen: Path | None = None  # by the administrator

    @property
    def _checkpoint(self) -> CheckpointInfo:
        return self._checkpoints[self._engine.version]

    async def follow(self) -> None:
        """Serve each checkpoint that the run saves, until cancelled.

        A checkpoint chosen by the administrator takes precedence. A checkpoint is loaded
        again after its files have changed and then stayed the same for an interval, because a run
        may be replaced by another one, and a copy of a run has its links before its checkpoints.
        """
        settings = self._settings
        seen = self._checkpoint.path
        files = tried = files_of(seen)
        logger.info("following %s of %s", settings.follow, settings.source.path)
        while True:
            await asyncio.sleep(settings.follow_interval)
            before = files
            try:
                wanted = self._wanted()
                files = files_of(wanted)
            except OSError as error:  # the link is being replaced, or its disk is unavailable
                logger.warning("cannot look for new checkpoints of the run: %s", error)
                continue
            if wanted == seen and (files == tried or files != before):
                continue
            changed = wanted == seen
            seen, tried = wanted, files
            if changed or wanted != self._checkpoint.path:  # equal if `choose` has just loaded it
                with contextlib.suppress(ReloadError):  # already logged and counted
                    await self._reload(self._wanted)

    async def choose(self, name: str | None) -> bool:
        """Serve the checkpoint with this name until another one is chosen; None means the
        checkpoint given at the start. Returns False if it is already served. Raises ReloadError if
        the old checkpoint stays in use."""
        swapped = await self._reload(self._default if name is None else partial(self._named, name))
        self._chosen = None if name is None else self._checkpoint.path
        return swapped

    def _wanted(self) -> Path:
        return self._chosen or self._default()

    def _default(self) -> Path:
        return checkpoint_of(self._settings.source.path, self._settings.follow)

    def _named(self, name: str) -> Path:
        """The path of the checkpoint with this name. It belongs to the served run, or is in the
        same folder as the served checkpoint."""
        path = self._settings.source.path
        folder = path if is_run(path) else path.resolve().parent
        names = {child.name for child in folder.iterdir() if (child / "config.json").is_file()}
        if name not in names:
            raise ReloadError(
                f"there is no checkpoint {name[:80]!r} to load; the available checkpoints are: "
                f"{', '.join(sorted(names)[:20]) or 'none'}"
            )
        return folder / name

    async def _reload(self, find: Callable[[], Path]) -> bool:
        """Serve the checkpoint that `find` returns once reloads in progress have ended, because
        the administrator may choose one meanwhile. Returns when the old one is no longer used."""
        async with self._reload_lock:
            try:
                path = find()
                swapped = await self._swap(path)
            except (CheckpointError, OSError, ReloadError) as error:
                self._metrics.reloads[ReloadResult.REFUSED].inc()
                logger.error("reload refused, %s stays: %s", self._checkpoint.path, error)
                raise ReloadError(str(error)) from error
        result = ReloadResult.SWAPPED if swapped else ReloadResult.UNCHANGED
        self._metrics.reloads[result].inc()
        return swapped

    async def _swap(self, path: Path) -> bool:
        before = self._checkpoint
        checkpoint = await asyncio.to_thread(read_checkpoint, path)
        check_replacement(before, checkpoint)
        if _is_same(before, checkpoint):
            return False
        # Both are equal, but the old tokenizer has cached facts about its tokens, and the old shape
        # has the features of autoencoders.
        checkpoint = replace(checkpoint, tokenizer=before.tokenizer, shape=before.shape)
        version = self._engine.version + 1
        self._checkpoints[version] = checkpoint  # before the first request to that version
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
            "%s (step %d) replaces %s (step %d)",
            checkpoint.path, checkpoint.training.step, before.path, before.training.step,
        )  # fmt: skip
        return True


def _is_same(before: CheckpointInfo, now: CheckpointInfo) -> bool:
    """True if a checkpoint with the same shape and vocabulary gives the same replies."""
    templates = [each.chat_template and each.chat_template.source for each in (before, now)]
    return before.files == now.files and templates[0] == templates[1]


def files_of(path: Path) -> Files:
    """Identify the files of a checkpoint that exist."""
    found = []
    for name in (CONFIG, RANKS, WEIGHTS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = (path / name).stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
