"""Lifespan: loads the served models outside the event loop, and then follows their training runs if
requested.

For each model it builds the engine and everything that the event loop needs. Meanwhile /health
answers 503 and says which checkpoint of a run is awaited, or why loading failed. If only some of
the models can be loaded, those are served; loading fails if none can.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from logitd.model.checkpoint.run_folder import checkpoint_of, is_run
from logitd.model.inference.constraints.sandbox import Sandbox
from logitd.service.engine.admission import MOST_TOKENS, AdmissionController, QueueLimits
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import STARTUP_ERRORS, BuiltEngine, Shares, build, divide_memory
from logitd.service.engine.driver import EngineDriver, StepThread
from logitd.service.models.constraints import Constraints
from logitd.service.models.reloader import Reloader
from logitd.service.models.served import NotLoaded, ServedModel
from logitd.service.models.state import ServiceState, observe_step
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


async def live(state: ServiceState) -> None:
    """Load the models of the settings, and follow their runs if requested."""
    await _wait_for_first_checkpoints(state)
    await load(state)
    if state.settings.follow is not None:
        await asyncio.gather(*(model.reloader.follow() for model in state.models.served))


async def _wait_for_first_checkpoints(state: ServiceState) -> None:
    """Wait until each followed run has saved a checkpoint. Unlike loading, this can be
    cancelled."""
    follow = state.settings.follow
    for source in state.settings.models if follow else ():
        while not (is_run(source.path) and checkpoint_of(source.path, follow).exists()):
            if state.waits_for is None:
                state.waits_for = f"{source.path}/{follow}, the first checkpoint of the run"
                logger.info("waiting for %s", state.waits_for)
            await asyncio.sleep(state.settings.follow_interval)
        state.waits_for = None


async def load(state: ServiceState) -> None:
    """Load the models one after another. Pass them to `state`, or the reason why none could be
    loaded.

    No engine may compute before all models are loaded: a thread gets its number of torch threads
    when it computes for the first time, and that number is one during loading.
    """
    settings, steps = state.settings, None
    if len(settings.models) == 1:
        models = [await _load_model(state, settings)]
    else:
        try:
            shares = await asyncio.to_thread(divide_memory, settings)
        except STARTUP_ERRORS as error:
            _cannot_serve(state, str(error))
            return
        steps = StepThread()
        models = [await _load_share(state, source, shares, steps) for source in settings.models]
    missing = [model for model in models if isinstance(model, NotLoaded)]
    if len(missing) < len(models):
        for model in missing:
            logger.error("%s is not served, the others are: %s", model.name, model.reason)
        state.serve(models, steps)
    elif steps is None:
        _cannot_serve(state, missing[0].reason)
    else:
        steps.close()
        reasons = "; ".join(f"{model.name}: {model.reason}" for model in missing)
        _cannot_serve(state, f"none of {len(models)} models could be loaded: {reasons}")


def _cannot_serve(state: ServiceState, reason: str) -> None:
    logger.error("cannot serve: %s", reason)
    state.fail(reason)


async def _load_share(
    state: ServiceState, source: ModelSource, shares: Shares, steps: StepThread
) -> ServedModel | NotLoaded:
    """Load one of several models with its share of the slots."""
    name = source.served_name
    if (reason := shares.refused.get(name)) is not None:
        return NotLoaded(name, reason)
    settings = state.settings.of(source, slots=shares.slots[name], kv_cache_memory=None)
    return await _load_model(state, settings, steps)


async def _load_model(
    state: ServiceState, settings: ServeSettings, steps: StepThread | None = None
) -> ServedModel | NotLoaded:
    source = settings.source
    name = source.served_name
    resolved = settings.of(replace(source, path=checkpoint_of(source.path, settings.follow)))
    try:
        built = await asyncio.to_thread(build, resolved)
        sandbox = await asyncio.to_thread(Sandbox, built.checkpoint.tokenizer)
    except STARTUP_ERRORS as error:
        return NotLoaded(name, str(error))
    except Exception as error:
        logger.exception("a bug kept %s from being loaded", name)
        return NotLoaded(name, f"{type(error).__name__}: {error}")
    return _served(state, settings, built, sandbox, steps)


def _served(
    state: ServiceState,
    settings: ServeSettings,
    built: BuiltEngine,
    sandbox: Sandbox,
    steps: StepThread | None,
) -> ServedModel:
    metrics = state.metrics.of(settings.source.served_name)
    longest = settings.max_sequences * built.checkpoint.shape.context_length
    limits = QueueLimits(
        sequences=settings.max_queue,
        tokens=settings.max_queue_tokens,
        elements=settings.max_queue_elements,
        per_request=settings.max_sequences,
        most_tokens=settings.max_request_tokens or max(MOST_TOKENS, longest),
    )
    checkpoints = {0: built.checkpoint}
    engine = AsyncEngine(
        EngineDriver(built.engine, built.load_weights, steps),
        AdmissionController(built.engine.model_config, built.engine.slots, limits),
        stall_timeout=settings.stall_timeout,
        on_step=partial(observe_step, metrics),
    )
    return ServedModel(
        name=settings.source.served_name,
        checkpoints=checkpoints,
        computation=built.computation,
        engine=engine,
        reloader=Reloader(settings, engine, checkpoints, metrics, state.reload_lock),
        constraints=Constraints(
            built.compiler, sandbox, timeout=settings.constraint_timeout, metrics=metrics
        ),
        settings=settings,
        keys=state.keys,
        reply_budget=state.reply_budget,
        autoencoders=built.autoencoders,
    )
