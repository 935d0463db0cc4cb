"""The life of what is served: loaded off the event loop, then kept up with its run, where that is
followed.

Builds the engine of each model, in this process or in one of its own, and what the event loop needs
besides. /health answers 503 meanwhile, and gives the reason when loading fails. Of several models
one that cannot be loaded is left out; only where none can be has loading failed.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from logitd.model.checkpoint.run_folder import checkpoint_of, name_of
from logitd.model.inference.constraints.compiler import Compiler
from logitd.model.inference.constraints.sandbox import Checker
from logitd.service.app.follow import follow
from logitd.service.core.constraints import Constraints
from logitd.service.core.models import NotLoaded, Served
from logitd.service.core.reloader import Reloader
from logitd.service.core.state import ServiceState
from logitd.service.engine.admission import AdmissionController, QueueLimits
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import (
    STARTUP_ERRORS,
    Computation,
    Unavailable,
    build,
    compiler_for,
)
from logitd.service.engine.driver import Compute, EngineDriver, LocalDriver
from logitd.service.engine.process import EngineProcessError, ProcessDriver
from logitd.service.engine.restarts import Restarts
from logitd.service.engine.session import EngineSession
from logitd.service.engine.shares import Shares, divide_memory
from logitd.service.engine.turns import StepThread
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


@dataclass(frozen=True)
class _Loaded:
    checkpoint: CheckpointInfo
    computation: Computation
    driver: EngineDriver
    compiler: Compiler | Unavailable  # of constraints


async def live(state: ServiceState) -> None:
    """Load the models of the settings, and follow their runs if that is wanted."""
    await load(state)
    if state.settings.follow is not None:
        await asyncio.gather(*(follow(served) for served in state.models.served))


async def load(state: ServiceState) -> None:
    """Load the models of the settings, one after the other; well or badly, `state` knows
    afterwards. Nothing is computed before all are there: a thread that computes for the first time
    gets as many of torch's as there are at that moment, and loading has one."""
    sources = state.settings.models
    if len(sources) == 1:
        model = await _load_model(state, state.settings)
        if isinstance(model, NotLoaded):
            _cannot_serve(state, model.reason)
        else:
            state.serve([model])
        return
    try:
        shares = await asyncio.to_thread(divide_memory, state.settings)
    except STARTUP_ERRORS as error:
        _cannot_serve(state, str(error))
        return
    steps = None if state.settings.engine == "process" else StepThread()
    models = [await _load_share(state, source, shares, steps) for source in sources]
    missing = [model for model in models if isinstance(model, NotLoaded)]
    if len(missing) == len(models):
        told = "; ".join(f"{model.name}: {model.reason}" for model in missing)
        _cannot_serve(state, f"none of {len(models)} models could be loaded: {told}")
        if steps is not None:
            steps.close()
        return
    for model in missing:
        logger.error("%s is not served, the others are: %s", model.name, model.reason)
    state.serve(models, steps)


def _cannot_serve(state: ServiceState, reason: str) -> None:
    logger.error("cannot serve: %s", reason)
    state.fail(reason)


async def _load_share(
    state: ServiceState, source: ModelSource, shares: Shares, steps: StepThread | None
) -> Served | NotLoaded:
    """One of several, with the slots that are its share."""
    assert source.name is not None
    if (reason := shares.refused.get(source.name)) is not None:
        return NotLoaded(source.name, reason)
    slots = shares.slots[source.name]
    return await _load_model(
        state, state.settings.of(source, slots=slots, kv_cache_memory=None), steps
    )


async def _load_model(
    state: ServiceState, settings: ServeSettings, steps: StepThread | None = None
) -> Served | NotLoaded:
    """The model of settings that are of one."""
    source = settings.source
    name = source.name or name_of(source.path)
    resolved = settings.of(replace(source, path=checkpoint_of(source.path, settings.follow)))
    try:
        if settings.engine == "process":
            loaded = await asyncio.to_thread(_with_process, resolved)
        else:
            compute = None if steps is None else steps.call
            loaded = await asyncio.to_thread(_in_this_process, resolved, compute)
        checker = await asyncio.to_thread(Checker, loaded.checkpoint.tokenizer)
    except (*STARTUP_ERRORS, EngineProcessError) as error:
        return NotLoaded(name, str(error))
    except Exception as error:
        logger.exception("a bug kept %s from being loaded", name)
        return NotLoaded(name, f"{type(error).__name__}: {error}")
    return _served(state, settings, loaded, checker)


def _in_this_process(settings: ServeSettings, compute: Compute | None) -> _Loaded:
    built = build(settings)
    driver = LocalDriver(built.engine, built.load_weights, compute=compute)
    return _Loaded(built.checkpoint, built.computation, driver, built.compiler)


def _with_process(settings: ServeSettings) -> _Loaded:
    """The weights are read there alone; the vocabulary and what the checkpoint says, here too."""
    driver = ProcessDriver(settings)
    try:
        path = settings.source.path
        checkpoint = read_checkpoint(path)
        if checkpoint.weights_sha256 != driver.computation.weights_sha256:
            raise CheckpointError(f"{path} was replaced while it was being loaded")
        compiler = compiler_for(checkpoint.tokenizer)
    except BaseException:
        driver.close()
        raise
    return _Loaded(checkpoint, driver.computation, driver, compiler)


def _same_again(settings: ServeSettings, checkpoint: CheckpointInfo) -> ProcessDriver:
    """Another process with the weights of a checkpoint. Raises EngineProcessError, and
    CheckpointError where there are others by now: what this server says of itself would be
    wrong."""
    driver = ProcessDriver(settings.of(replace(settings.source, path=checkpoint.path)))
    if driver.computation.weights_sha256 != checkpoint.weights_sha256:
        driver.close()
        raise CheckpointError(f"{checkpoint.path} was replaced; it takes a new server to serve")
    return driver


def _served(
    state: ServiceState, settings: ServeSettings, loaded: _Loaded, checker: Checker
) -> Served:
    driver, metrics = loaded.driver, state.metrics_of(settings.source)
    limits = QueueLimits(
        sequences=settings.max_queue,
        tokens=settings.max_queue_tokens,
        elements=settings.max_queue_elements,
        per_request=settings.max_sequences,
    )
    name = settings.source.name or loaded.checkpoint.name
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
        on_step=partial(state.on_step, metrics),
        restarts=restarts,
    )
    return Served(
        checkpoints=checkpoints,
        computation=loaded.computation,
        engine=engine,
        session=EngineSession(engine),
        reloader=Reloader(settings, engine, checkpoints, metrics, state.one_reload),
        constraints=Constraints(
            loaded.compiler,
            checker,
            timeout=settings.constraint_timeout,
            metrics=metrics,
        ),
        settings=settings,
        keys=state.keys,
        reply_budget=state.reply_budget,
    )
