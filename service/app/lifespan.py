"""Loading: from settings to what is served, beside the event loop.

The engine is built, here or in a process of its own (`building`), and whatever the event loop needs
besides; /health answers 503 meanwhile. What goes wrong stays to be read there.
"""

import asyncio
import logging
from dataclasses import dataclass

from model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from model.inference.constraints.compiler import Compiler
from model.inference.constraints.sandbox import Checker
from service.core.constraints import Constraints
from service.core.reply_budget import ByteBudget
from service.core.state import Served, ServiceState
from service.engine.admission import QueueLimits
from service.engine.async_engine import AsyncEngine
from service.engine.build import STARTUP_ERRORS, Computation, build, compiler_for
from service.engine.driver import EngineTurns, Turns
from service.engine.process import EngineProcessError, ProcessTurns
from service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


@dataclass(frozen=True)
class _Loaded:
    checkpoint: CheckpointInfo
    computation: Computation
    turns: Turns
    compiler: Compiler | str  # of constraints, or why there is none


async def load(state: ServiceState) -> None:
    """Load the checkpoint of the settings; well or badly, `state` knows afterwards."""
    settings = state.settings
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
        state.serve(_served(state, loaded, checker))


def _in_this_process(settings: ServeSettings) -> _Loaded:
    built = build(settings)
    turns = EngineTurns(built.engine)
    return _Loaded(built.opened.checkpoint, built.computation, turns, built.compiler)


def _with_process(settings: ServeSettings) -> _Loaded:
    """The weights are read there alone; the vocabulary and what the checkpoint says, here too."""
    turns = ProcessTurns(settings)
    try:
        checkpoint = read_checkpoint(settings.checkpoint)
        if checkpoint.weights_sha256 != turns.computation.weights_sha256:
            raise CheckpointError(f"{settings.checkpoint} was replaced while it was being loaded")
        compiler = compiler_for(checkpoint.tokenizer)
    except BaseException:
        turns.close()
        raise
    return _Loaded(checkpoint, turns.computation, turns, compiler)


def _served(state: ServiceState, loaded: _Loaded, checker: Checker) -> Served:
    settings = state.settings
    return Served(
        checkpoint=loaded.checkpoint,
        computation=loaded.computation,
        engine=AsyncEngine(
            loaded.turns,
            limits=QueueLimits(
                settings.max_queue, settings.max_queue_tokens, settings.max_queue_elements
            ),
            stall_timeout=settings.stall_timeout,
            on_step=state.on_step,
        ),
        constraints=Constraints(
            loaded.compiler,
            checker,
            timeout=settings.constraint_timeout,
            metrics=state.metrics,
        ),
        settings=settings,
        reply_budget=ByteBudget(settings.max_reply_bytes),
        key_names=state.keys.names,
    )
