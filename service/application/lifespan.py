"""Lifespan: loads the served models outside the event loop, and then follows their training runs if
requested.

For each model it builds the engine and everything that the event loop needs. Until the models are
loaded, /health answers 503 and says which run's first checkpoint is awaited, or why loading failed.
If only some of the models can be loaded, those are served; loading fails if none can.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.run_folder import HISTORY, checkpoint_of, checkpoints_in, is_run
from logitd.model.device import use_threads
from logitd.model.inference.constraints.sandbox import Sandbox
from logitd.model.inference.load import check_replacement
from logitd.service.engine.admission import MOST_TOKENS, AdmissionController, QueueLimits
from logitd.service.engine.async_engine import AsyncEngine
from logitd.service.engine.build import STARTUP_ERRORS, BuiltEngine, Shares, build, divide_memory
from logitd.service.engine.driver import EngineDriver, StepReport, StepThread
from logitd.service.errors import not_loaded
from logitd.service.models.constraints import Constraints
from logitd.service.models.history import History
from logitd.service.models.reloader import Reloader
from logitd.service.models.served import NotLoaded, ServedModel
from logitd.service.models.state import ServiceState, observe_step
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import HISTORY_SLOTS, ServeSettings

logger = logging.getLogger("logitd")


async def live(state: ServiceState) -> None:
    """Load the models named in the settings, and follow their runs if requested."""
    await _wait_for_first_checkpoints(state)
    await load(state)
    if state.settings.follow is not None:
        await asyncio.gather(*(model.reloader.follow() for model in state.models.served))


async def _wait_for_first_checkpoints(state: ServiceState) -> None:
    """Wait until each followed run has saved a checkpoint. Unlike loading, this wait can be
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
    """Load the models one after another. Then serve those that could be loaded, or record in
    `state` why none could be.

    No engine may compute before all models are loaded: when a Python thread first computes, torch
    fixes the number of threads that its computations use, and while models are loaded that number
    is one.
    """
    settings = state.settings
    steps = StepThread() if settings.history or len(settings.models) > 1 else None
    if len(settings.models) == 1:
        models = [await _load_model(state, settings, steps)]
    else:
        try:
            shares = await asyncio.to_thread(divide_memory, settings)
        except STARTUP_ERRORS as error:
            _cannot_serve(state, str(error))
            return
        assert steps is not None
        models = [await _load_share(state, source, shares, steps) for source in settings.models]
    missing = [model for model in models if isinstance(model, NotLoaded)]
    if len(missing) < len(models):
        for model in missing:
            logger.error("%s is not served, but the other models are: %s", model.name, model.reason)
        state.serve(models, steps)
        return
    if steps is not None:
        steps.close()
    if len(models) == 1:
        _cannot_serve(state, missing[0].reason)
    else:
        reasons = "; ".join(f"{model.name}: {model.reason}" for model in missing)
        _cannot_serve(state, f"none of {len(models)} models could be loaded: {reasons}")


def _cannot_serve(state: ServiceState, reason: str) -> None:
    logger.error("cannot serve: %s", reason)
    state.fail(reason)


async def _load_share(
    state: ServiceState, source: ModelSource, shares: Shares, steps: StepThread
) -> ServedModel | NotLoaded:
    """Load one of several models, with its share of the slots."""
    name = source.served_name
    if (reason := shares.refused.get(name)) is not None:
        return NotLoaded(name, reason)
    settings = state.settings.of(source, slots=shares.slots[name], kv_cache_memory=None)
    return await _load_model(state, settings, steps)


async def _load_model(
    state: ServiceState, settings: ServeSettings, steps: StepThread | None
) -> ServedModel | NotLoaded:
    source = settings.source
    name = source.served_name
    try:
        if settings.history and (problem := _no_history(source.path, settings)) is not None:
            return NotLoaded(name, problem)
        path = checkpoint_of(source.path, settings.follow)
    except OSError as error:
        return NotLoaded(name, f"{error.filename} cannot be read: {error.strerror}")
    try:
        built = await asyncio.to_thread(build, settings.of(replace(source, path=path)))
        sandbox = await asyncio.to_thread(Sandbox, built.checkpoint.tokenizer)
    except STARTUP_ERRORS as error:
        if checkpoint_of(source.path, settings.follow) != path:  # removed by the run in training
            return await _load_model(state, settings, steps)
        return NotLoaded(name, str(error))
    except Exception as error:
        logger.exception("a bug kept %s from being loaded", name)
        return NotLoaded(name, f"{type(error).__name__}: {error}")
    metrics = state.metrics.of(name)
    checkpoints = {0: built.checkpoint}
    engine = _engine(settings, built, steps, metrics.observe_step)
    served = ServedModel(
        name=name,
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
    if not settings.history or steps is None:
        return served
    # Before a step is loaded, which would leave the thread with one torch thread.
    threads = built.computation.placement.threads
    await asyncio.to_thread(steps.call, partial(use_threads, threads))
    load_step = partial(_load_step, served, steps, metrics.count_step)
    return replace(served, history=History(source.path, load_step, settings.history_steps))


def _engine(
    settings: ServeSettings,
    built: BuiltEngine,
    steps: StepThread | None,
    observe: Callable[[StepReport], None],
) -> AsyncEngine:
    longest = settings.max_sequences * built.checkpoint.shape.context_length
    limits = QueueLimits(
        sequences=settings.max_queue,
        tokens=settings.max_queue_tokens,
        elements=settings.max_queue_elements,
        per_request=settings.max_sequences,
        most_tokens=settings.max_request_tokens or max(MOST_TOKENS, longest),
    )
    return AsyncEngine(
        EngineDriver(built.engine, built.load_weights, steps),
        AdmissionController(built.engine.model_config, built.engine.slots, limits),
        stall_timeout=settings.stall_timeout,
        on_step=partial(observe_step, observe),
    )


# Steps of a history


def _no_history(path: Path, settings: ServeSettings) -> str | None:
    """The reason why a path has no history to serve; None if it has one, or if it is a followed
    run, whose history may begin later."""
    if not is_run(path):
        return f"{path} is not a run, so it has no history: serve a run, or leave out --history"
    if settings.follow is None and not checkpoints_in(path / HISTORY):
        return (
            f"the run {path} has no history: train with --keep-every N to keep its steps, or leave "
            "out --history"
        )
    return None


async def _load_step(
    base: ServedModel, steps: StepThread, observe: Callable[[StepReport], None], path: Path
) -> ServedModel:
    """Load a checkpoint of the history of a served model. Raises ApiError."""
    try:
        built = await asyncio.to_thread(_build_step, base, path)
    except STARTUP_ERRORS as error:
        raise not_loaded(f"the step cannot be loaded: {error}", "step") from error
    # Both tokenizers are equal, but the served model's has cached facts about its tokens.
    checkpoint = replace(built.checkpoint, tokenizer=base.checkpoint.tokenizer)
    return replace(
        base,
        checkpoints={0: checkpoint},
        computation=built.computation,
        engine=_engine(base.settings, built, steps, observe),
    )


def _build_step(base: ServedModel, path: Path) -> BuiltEngine:
    check_replacement(base.checkpoint, read_checkpoint(path))
    source = replace(base.settings.source, path=path)
    return build(base.settings.of(source, slots=HISTORY_SLOTS, kv_cache_memory=None))
