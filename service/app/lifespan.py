"""The life of what is served: loaded off the event loop, then kept up with a run, where one is
followed.

Builds the engine, in this process or in one of its own, and what the event loop needs besides.
/health answers 503 meanwhile, and gives the reason when loading fails.
"""

import asyncio
import logging
from dataclasses import dataclass, replace

from model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from model.checkpoint.run_folder import checkpoint_of
from model.inference.constraints.compiler import Compiler
from model.inference.constraints.sandbox import Checker
from service.app.follow import follow
from service.core.constraints import Constraints
from service.core.reloader import Reloader
from service.core.reply_budget import ReplyBudget
from service.core.state import Served, ServiceState
from service.engine.admission import AdmissionController, QueueLimits
from service.engine.async_engine import AsyncEngine
from service.engine.build import STARTUP_ERRORS, Computation, Unavailable, build, compiler_for
from service.engine.driver import EngineDriver, LocalDriver
from service.engine.process import EngineProcessError, ProcessDriver
from service.engine.restarts import Restarts
from service.engine.session import EngineSession
from service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


@dataclass(frozen=True)
class _Loaded:
    checkpoint: CheckpointInfo
    computation: Computation
    driver: EngineDriver
    compiler: Compiler | Unavailable  # of constraints


async def live(state: ServiceState) -> None:
    """Load the checkpoint of the settings, and follow its run if that is wanted."""
    await load(state)
    if state.served is not None and state.settings.follow is not None:
        await follow(state, state.served.reloader)


async def load(state: ServiceState) -> None:
    """Load the checkpoint of the settings; well or badly, `state` knows afterwards."""
    settings = _resolved(state.settings)
    begin = _with_process if settings.engine == "process" else _in_this_process
    try:
        loaded = await asyncio.to_thread(begin, settings)
        checker = await asyncio.to_thread(Checker, loaded.checkpoint.tokenizer)
    except (*STARTUP_ERRORS, EngineProcessError) as error:
        logger.error("cannot serve: %s", error)
        state.fail(str(error))
    except Exception as error:
        logger.exception("cannot serve")
        state.fail(f"{type(error).__name__}: {error}")
    else:
        served = _served(state, loaded, checker)
        state.serve(served)


def _resolved(settings: ServeSettings) -> ServeSettings:
    """With the checkpoint that is to be read now, in place of its run."""
    path = checkpoint_of(settings.checkpoint, settings.follow)
    return settings.model_copy(update={"checkpoint": path})


def _in_this_process(settings: ServeSettings) -> _Loaded:
    built = build(settings)
    driver = LocalDriver(built.engine, built.load_weights)
    return _Loaded(built.checkpoint, built.computation, driver, built.compiler)


def _with_process(settings: ServeSettings) -> _Loaded:
    """The weights are read there alone; the vocabulary and what the checkpoint says, here too."""
    driver = ProcessDriver(settings)
    try:
        checkpoint = read_checkpoint(settings.checkpoint)
        if checkpoint.weights_sha256 != driver.computation.weights_sha256:
            raise CheckpointError(f"{settings.checkpoint} was replaced while it was being loaded")
        compiler = compiler_for(checkpoint.tokenizer)
    except BaseException:
        driver.close()
        raise
    return _Loaded(checkpoint, driver.computation, driver, compiler)


def _same_again(settings: ServeSettings, checkpoint: CheckpointInfo) -> ProcessDriver:
    """Another process with the weights of a checkpoint. Raises EngineProcessError, and
    CheckpointError where there are others by now: what this server says of itself would be
    wrong."""
    driver = ProcessDriver(settings.model_copy(update={"checkpoint": checkpoint.path}))
    if driver.computation.weights_sha256 != checkpoint.weights_sha256:
        driver.close()
        raise CheckpointError(f"{checkpoint.path} was replaced; it takes a new server to serve")
    return driver


def _served(state: ServiceState, loaded: _Loaded, checker: Checker) -> Served:
    settings, driver = state.settings, loaded.driver
    limits = QueueLimits(
        sequences=settings.max_queue,
        tokens=settings.max_queue_tokens,
        elements=settings.max_queue_elements,
        per_request=settings.max_sequences,
    )
    name = settings.served_model_name or loaded.checkpoint.name
    checkpoints = {0: replace(loaded.checkpoint, name=name)}
    restarts = None
    if settings.engine == "process" and settings.engine_restarts:
        restarts = Restarts(
            lambda: _same_again(settings, checkpoints[engine.version]), settings.engine_restarts
        )
    engine = AsyncEngine(
        driver,
        AdmissionController(driver.model_config, driver.slots, limits),
        stall_timeout=settings.stall_timeout,
        on_step=state.on_step,
        restarts=restarts,
    )
    return Served(
        checkpoints=checkpoints,
        computation=loaded.computation,
        engine=engine,
        session=EngineSession(engine),
        reloader=Reloader(settings, engine, checkpoints, state.metrics),
        constraints=Constraints(
            loaded.compiler,
            checker,
            timeout=settings.constraint_timeout,
            metrics=state.metrics,
        ),
        settings=settings,
        keys=state.keys,
        reply_budget=ReplyBudget(settings.max_reply_elements),
    )
