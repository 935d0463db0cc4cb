"""Follow: a run is looked at again and again, and what it has saved meanwhile is served.

What is looked at is where the run's link leads, unless the administrator has named a checkpoint. A
checkpoint that was refused is not tried again until the run saves another. Not here: how one takes
the place of the other (`service/models/reloader.py`).
"""

import asyncio
import contextlib
import logging

from logitd.service.models.reloader import ReloadError
from logitd.service.models.served import ServedModel

logger = logging.getLogger("logitd")


async def follow(served: ServedModel) -> None:
    """Serve what the run of a model saves, until cancelled."""
    reloader, settings = served.reloader, served.settings
    seen = reloader.checkpoint.path
    logger.info("following %s of %s", settings.follow, settings.source.path)
    while True:
        await asyncio.sleep(settings.follow_interval)
        try:
            wanted = reloader.wanted()
        except OSError as error:  # the link is being moved, or its disk is away for a moment
            logger.warning("the run cannot be looked at: %s", error)
            continue
        if wanted == seen:
            continue
        seen = wanted
        if wanted == reloader.checkpoint.path:  # the administrator was first
            continue
        with contextlib.suppress(ReloadError):  # which is in the log, and counted
            await reloader.reload(wanted)
