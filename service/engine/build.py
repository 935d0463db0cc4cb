"""Building: from settings to an engine, in the process that computes.

The checkpoint is read and verified, a place and a decoder are chosen, what rounding costs is
measured, and the engine is made. Does not know whose turns the engine takes (`turns`), and nothing
of the event loop.
"""

import logging
from dataclasses import dataclass

from model.checkpoint.checkpoint import CheckpointError
from model.data.errors import DataError
from model.device import DeviceError, Placement, describe, one_thread, use_threads
from model.inference.constraints.compiler import Compiler, ConstraintsUnavailable
from model.inference.constraints.mask_worker import MaskWorker
from model.inference.engine.config import EngineConfig
from model.inference.engine.engine import Engine
from model.inference.errors import InvalidRequest
from model.inference.kernels.select import KernelError
from model.inference.load import LoadedModel, choose_slots, load_model, release_memory
from model.inference.memory import SlotBudget
from model.text.tokenizer import Tokenizer
from service.engine.quantization import Rounding, measure_rounding
from service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

STARTUP_ERRORS = (CheckpointError, DeviceError, InvalidRequest, KernelError, DataError)
"""Why an engine cannot be built, where it is nobody's bug: the message says what to do."""


@dataclass(frozen=True, slots=True)
class Computation:
    """What computes, and how: plain data, for people."""

    weights_sha256: str
    placement: Placement
    device: str
    dtype_why: str  # why the placement's dtype
    decoding: str  # how decode steps are computed
    decoding_note: str | None  # why that is not faster
    rounding: Rounding | None  # what quantizing costs
    parameters: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, what to say of it, and the compiler of constraints for its vocabulary, or why
    there is none."""

    engine: Engine
    computation: Computation
    opened: LoadedModel
    compiler: Compiler | str


def build(settings: ServeSettings) -> Built:
    """Build with one thread, and leave the others to the engine's. Raises STARTUP_ERRORS.

    OpenMP keeps a pool for each thread that ever computed with more than itself. With more of them
    than processors they all sleep between any two operations: measured, a prefill took two and a
    half times as long after weights had been read with a pool in another thread.
    """
    with one_thread():
        built = _build(settings)
    use_threads(built.opened.placement.threads)
    return built


def compiler_for(tokenizer: Tokenizer) -> Compiler | str:
    """The compiler of constraints, or why requests that have one will be refused."""
    try:
        return Compiler(tokenizer)
    except ConstraintsUnavailable as error:
        return str(error)


def _build(settings: ServeSettings) -> Built:
    opened = load_model(
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
    wish = SlotBudget(settings.slots, settings.kv_cache_bytes, settings.gpu_memory_utilization)
    config = EngineConfig(
        slots=choose_slots(opened, wish, EngineConfig().slots),
        prefill_chunk=settings.prefill_chunk,
        prefix_reuse=settings.prefix_reuse,
        speculate=settings.speculate,
    )
    compiler = compiler_for(opened.checkpoint.tokenizer)
    masks = MaskWorker() if isinstance(compiler, Compiler) else None
    engine = Engine(opened.gpt, config, make_decoder=path.make_decoder, masks=masks)
    release_memory()
    return Built(engine, _computation(opened, engine, rounding), opened, compiler)


def _computation(opened: LoadedModel, engine: Engine, rounding: Rounding | None) -> Computation:
    return Computation(
        weights_sha256=opened.checkpoint.weights_sha256,
        placement=opened.placement,
        device=describe(opened.placement.device),
        dtype_why=opened.dtype.why,
        decoding=opened.decode_path.name,
        decoding_note=opened.decode_path.note,
        rounding=rounding,
        parameters=opened.gpt.parameter_count(),
        kv_cache_bytes=engine.kv_cache_bytes,
    )
