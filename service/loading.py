"""Loading: from settings to what is served, beside the event loop.

The checkpoint is read and verified, a place and a decoder are chosen, and the engine is made;
/health answers 503 meanwhile. What goes wrong stays to be read there.
"""

import asyncio
import logging
from dataclasses import dataclass

from model.checkpoint import CheckpointError, CheckpointInfo, load_checkpoint
from model.constraint import Compiler, ConstraintsUnavailable
from model.constraint_check import Checker
from model.device import DeviceError, Placement, choose_placement, describe, use_threads
from model.engine.api import EngineConfig, InvalidRequest
from model.engine.engine import Engine
from model.kernels.choose import DecodePath, KernelError, choose_decode_path
from model.tokenizer import Tokenizer
from service.async_engine import AsyncEngine
from service.constraints import Constraints
from service.numbers.budget import ByteBudget
from service.settings import ServeSettings
from service.state import Served, ServiceState

logger = logging.getLogger("logitd")


@dataclass(frozen=True)
class _Loaded:
    checkpoint: CheckpointInfo
    parameters: int
    engine: Engine
    decode_path: DecodePath
    compiler: Compiler | str  # of constraints, or why there is none


async def load(state: ServiceState) -> None:
    """Load the checkpoint of the settings; well or badly, `state` knows afterwards."""
    settings = state.settings
    try:
        placement = choose_placement(settings.device, settings.dtype, settings.threads)
        loaded = await asyncio.to_thread(_build, settings, placement)
        checker = await asyncio.to_thread(Checker, loaded.checkpoint.tokenizer)
    except (CheckpointError, DeviceError, InvalidRequest, KernelError) as error:
        logger.error("cannot serve: %s", error)
        state.fail(str(error))
    except Exception as error:
        logger.exception("cannot serve")
        state.fail(f"{type(error).__name__}: {error}")
    else:
        state.serve(_served(state, placement, loaded, checker))


def _served(state: ServiceState, placement: Placement, loaded: _Loaded, checker: Checker) -> Served:
    settings = state.settings
    return Served(
        checkpoint=loaded.checkpoint,
        placement=placement,
        device=describe(placement.device),
        decode_path=loaded.decode_path,
        parameters=loaded.parameters,
        kv_cache_bytes=loaded.engine.kv_cache_bytes,
        engine=AsyncEngine(
            loaded.engine,
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens,
            max_queue_numbers=settings.max_queue_numbers,
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


def _build(settings: ServeSettings, placement: Placement) -> _Loaded:
    use_threads(placement.threads)
    checkpoint, gpt = load_checkpoint(
        settings.checkpoint, device=placement.device, dtype=placement.dtype
    )
    decode_path = choose_decode_path(
        gpt,
        kernels=settings.kernels,
        quantize=settings.quantize,
        threads=placement.threads,
        say=logger.info,
    )
    if decode_path.note is not None:
        logger.warning("decoding in plain torch, which is slower: %s", decode_path.note)
    config = EngineConfig(
        slots=settings.slots,
        prefill_chunk=settings.prefill_chunk,
        prefix_reuse=settings.prefix_reuse,
    )
    engine = Engine(gpt, config, make_decoder=decode_path.make_decoder)
    return _Loaded(
        checkpoint, gpt.parameter_count(), engine, decode_path, _compiler(checkpoint.tokenizer)
    )


def _compiler(tokenizer: Tokenizer) -> Compiler | str:
    """The compiler of constraints, or why requests that have one will be refused."""
    try:
        return Compiler(tokenizer)
    except ConstraintsUnavailable as error:
        return str(error)
