"""Loading: from settings to what is served, beside the event loop.

The checkpoint is read and verified, a place and a decoder are chosen, what rounding costs is
measured, and the engine is made; /health answers 503 meanwhile. What goes wrong stays to be read
there.
"""

import asyncio
import logging
from dataclasses import dataclass

from model.checkpoint import CheckpointError
from model.constraint import Compiler, ConstraintsUnavailable
from model.constraint_check import Checker
from model.device import DeviceError, describe, one_thread, use_threads
from model.engine.api import EngineConfig, InvalidRequest
from model.engine.engine import Engine
from model.kernels.choose import KernelError
from model.look_ahead import LookAhead
from model.memory import SlotWish
from model.opening import OpenedModel, choose_slots, open_model, release_memory
from model.tokenizer import Tokenizer
from model.training.config import TrainingError
from service.async_engine import AsyncEngine
from service.constraints import Constraints
from service.numbers.budget import ByteBudget
from service.queue_room import QueueLimits
from service.rounding import Rounding, measure_rounding
from service.settings import ServeSettings
from service.state import Served, ServiceState

logger = logging.getLogger("logitd")


@dataclass(frozen=True)
class _Loaded:
    opened: OpenedModel
    rounding: Rounding | None
    engine: Engine
    compiler: Compiler | str  # of constraints, or why there is none


async def load(state: ServiceState) -> None:
    """Load the checkpoint of the settings; well or badly, `state` knows afterwards."""
    settings = state.settings
    try:
        loaded = await asyncio.to_thread(_build_alone, settings)
        checker = await asyncio.to_thread(Checker, loaded.opened.checkpoint.tokenizer)
    except (CheckpointError, DeviceError, InvalidRequest, KernelError, TrainingError) as error:
        logger.error("cannot serve: %s", error)
        state.fail(str(error))
    except Exception as error:
        logger.exception("cannot serve")
        state.fail(f"{type(error).__name__}: {error}")
    else:
        state.serve(_served(state, loaded, checker))


def _served(state: ServiceState, loaded: _Loaded, checker: Checker) -> Served:
    settings, opened = state.settings, loaded.opened
    return Served(
        checkpoint=opened.checkpoint,
        placement=opened.placement,
        device=describe(opened.placement.device),
        dtype_why=opened.dtype.why,
        decode_path=opened.decode_path,
        rounding=loaded.rounding,
        parameters=opened.gpt.parameter_count(),
        kv_cache_bytes=loaded.engine.kv_cache_bytes,
        engine=AsyncEngine(
            loaded.engine,
            limits=QueueLimits(
                settings.max_queue, settings.max_queue_tokens, settings.max_queue_numbers
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


def _build_alone(settings: ServeSettings) -> _Loaded:
    """Build with one thread, and leave the others to the engine's.

    OpenMP keeps a pool for each thread that ever computed with more than itself. With more of them
    than processors they all sleep between any two operations: measured, a prefill took two and a
    half times as long after weights had been read here with a pool.
    """
    with one_thread():
        loaded = _build(settings)
    use_threads(loaded.opened.placement.threads)
    return loaded


def _build(settings: ServeSettings) -> _Loaded:
    opened = open_model(
        settings.checkpoint,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        kernels=settings.kernels,
        quantize=settings.quantize,
        batch_invariant=settings.batch_invariant,
        say=logger.info,
    )
    path = opened.decode_path
    if path.note is not None:
        logger.warning("decoding in plain torch, which is slower: %s", path.note)
    rounding = measure_rounding(opened, settings.quantize, settings.validation_text)
    wish = SlotWish(settings.slots, settings.kv_cache_bytes, settings.gpu_memory_utilization)
    config = EngineConfig(
        slots=choose_slots(opened, wish, EngineConfig().slots),
        prefill_chunk=settings.prefill_chunk,
        prefix_reuse=settings.prefix_reuse,
        speculate=settings.speculate,
    )
    compiler = _compiler(opened.checkpoint.tokenizer)
    masks = LookAhead() if isinstance(compiler, Compiler) else None
    engine = Engine(opened.gpt, config, make_decoder=path.make_decoder, masks=masks)
    release_memory()
    return _Loaded(opened, rounding, engine, compiler)


def _compiler(tokenizer: Tokenizer) -> Compiler | str:
    """The compiler of constraints, or why requests that have one will be refused."""
    try:
        return Compiler(tokenizer)
    except ConstraintsUnavailable as error:
        return str(error)
