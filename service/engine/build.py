"""Build: from settings to an engine, in the process that computes.

Reads and verifies the checkpoint, chooses a device and a decoder, measures what quantization costs,
and makes the engine. Not here: what drives the engine (`driver.py`), and the event loop.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo
from logitd.model.data.errors import DataError
from logitd.model.device import (
    DeviceError,
    Placement,
    choose_device,
    describe,
    one_thread,
    use_threads,
)
from logitd.model.inference.constraints.compiler import Compiler, ConstraintsUnavailable
from logitd.model.inference.constraints.mask_worker import MaskWorker
from logitd.model.inference.engine.config import SERVED_TARGET_GAP, EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.load import (
    ChosenSlots,
    LoadedModel,
    Slots,
    choose_slots,
    load_model,
    load_replacement,
    release_memory,
)
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import (
    SERVED_SLOTS,
    SlotDefault,
    TargetGap,
    format_target_gap,
    parse_memory,
    parse_target_gap,
)
from logitd.model.memory import format_bytes
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import parameter_count
from logitd.service.engine.driver import WeightsLoader
from logitd.service.engine.quantization import QuantizationCost, measure_quantization
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

STARTUP_ERRORS = (CheckpointError, DeviceError, InvalidRequest, KernelError, DataError)
"""Expected reasons why an engine cannot be built. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Computation:
    """What computes, and how: plain data for the banner and /info."""

    weights_sha256: str
    placement: Placement
    device: str
    dtype_why: str  # why the placement's dtype
    decoding: str  # how decode steps are computed
    decoding_note: str | None  # why that is not faster
    kernels: str | None  # which native kernels were loaded, where some were
    quantization: QuantizationCost | None  # None where nothing is quantized
    parameters: int
    kv_cache_bytes: int
    slots_why: str | None  # why as many slots, where nobody said how many
    target_gap: str  # between tokens, as the setting writes it


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Stands for something that this server cannot offer, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, what the banner says of it, and the compiler of constraints for its vocabulary."""

    engine: Engine
    computation: Computation
    checkpoint: CheckpointInfo
    compiler: Compiler | Unavailable
    load_weights: WeightsLoader


def build(settings: ServeSettings) -> BuiltEngine:
    """Build with one thread, and leave the others to the engine's. Raises STARTUP_ERRORS.

    OpenMP keeps a pool for each thread that ever computed with more than itself. With more of them
    than processors they all sleep between any two operations: measured, a prefill took two and a
    half times as long after weights had been read with a pool in another thread.
    """
    with one_thread():
        built = _build(settings)
    use_threads(built.computation.placement.threads)
    return built


def compiler_for(tokenizer: Tokenizer) -> Compiler | Unavailable:
    """The compiler of constraints, or why requests with a constraint will be rejected."""
    try:
        return Compiler(tokenizer)
    except ConstraintsUnavailable as error:
        return Unavailable(str(error))


def _build(settings: ServeSettings) -> BuiltEngine:
    memory = None if settings.kv_cache_memory is None else parse_memory(settings.kv_cache_memory)
    budget = SlotBudget(settings.slots, memory)
    gpu = choose_device(settings.device).type == "cuda"
    slots = Slots(budget, default_slots(settings, gpu=gpu), settings.kv_cache_dtype)
    model = load_model(
        settings.source.path,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        kernels=settings.kernels,
        kernel_target=settings.kernel_target,
        quantize=settings.quantize,
        batch_invariant=settings.batch_invariant,
        slots=slots,
        log=logger.info,
    )
    path = model.decode_path
    if path.note is not None:
        logger.warning("decoding in plain torch, which is slower: %s", path.note)
    quantization = measure_quantization(
        model,
        settings.quantize,
        settings.validation_text,
        settings.kernel_target,
        kv_cache_dtype=settings.kv_cache_dtype,
        at_most=settings.max_quantization_loss,
    )
    chosen = choose_slots(model, slots)
    config = EngineConfig(
        slots=chosen.count,
        prefill_chunk=settings.prefill_chunk,
        target_gap=_target_gap(settings, model.placement),
        prefix_reuse=settings.prefix_reuse,
        kv_cache_dtype=settings.kv_cache_dtype,
        speculate=settings.speculate,
    )
    compiler = compiler_for(model.checkpoint.tokenizer)
    masks = MaskWorker() if isinstance(compiler, Compiler) else None
    engine = Engine(model.gpt, config, make_decoder=path.make_owner, masks=masks)
    release_memory()
    return BuiltEngine(
        engine,
        _computation(model, engine, quantization, _why_slots(slots, chosen)),
        model.checkpoint,
        compiler,
        partial(_load_weights, model.checkpoint, model.placement),  # not the model: it will go
    )


def default_slots(settings: ServeSettings, *, gpu: bool) -> SlotDefault:
    """How many slots there are where no setting says it. Batch-invariant on CUDA every step takes
    as long as that of all of them, so there they are few."""
    if settings.batch_invariant and gpu:
        return SlotDefault(EngineConfig().slots)
    return SERVED_SLOTS


def _why_slots(slots: Slots, chosen: ChosenSlots) -> str | None:
    """For the banner; None where a setting says how many."""
    budget, default = slots.budget, slots.default
    if budget.slots is not None or budget.memory is not None or default.share is None:
        return None
    if chosen.count == default.most:
        return "as many as are made unasked"
    return f"{default.share} of the {format_bytes(chosen.memory.free)} that the weights leave free"


def _target_gap(settings: ServeSettings, placement: Placement) -> TargetGap | None:
    """What was asked for, or what suits streams, where steps can be timed."""
    if settings.target_gap is not None:
        return parse_target_gap(settings.target_gap)
    return SERVED_TARGET_GAP if placement.device.type == "cpu" else None


def _load_weights(
    served: CheckpointInfo, placement: Placement, path: Path, weights_sha256: str
) -> GPT:
    """The weights of a checkpoint in place of those that are served, in a thread beside the one
    that computes. Raises CheckpointError and DeviceError."""
    with one_thread():
        return load_replacement(served, path, weights_sha256, placement, log=logger.info)


def _computation(
    model: LoadedModel,
    engine: Engine,
    quantization: QuantizationCost | None,
    slots_why: str | None,
) -> Computation:
    return Computation(
        weights_sha256=model.checkpoint.weights_sha256,
        placement=model.placement,
        device=describe(model.placement.device),
        dtype_why=model.dtype.why,
        decoding=model.decode_path.name,
        decoding_note=model.decode_path.note,
        kernels=model.decode_path.kernels,
        quantization=quantization,
        parameters=parameter_count(model.checkpoint.config),
        kv_cache_bytes=engine.kv_cache_bytes,
        slots_why=slots_why,
        target_gap=format_target_gap(engine.target_gap),
    )
