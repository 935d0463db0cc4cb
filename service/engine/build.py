"""Build: makes an engine from the settings, and divides the slots among several engines.

`build` reads and verifies the checkpoint, chooses a device and a decoder, measures the cost of
quantization, and makes the engine. `model/inference/memory.py` divides the memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from logitd.model.checkpoint.load import check_header
from logitd.model.checkpoint.run_folder import checkpoint_of
from logitd.model.data.errors import DataError
from logitd.model.device import (
    DeviceError,
    Placement,
    choose_device,
    describe,
    one_thread,
    use_threads,
)
from logitd.model.evaluation.quantization import QuantizationCost, measure_quantization
from logitd.model.inference.constraints.compiler import Compiler, ConstraintsUnavailable
from logitd.model.inference.constraints.heap import release_memory
from logitd.model.inference.engine.config import SERVED_TARGET_GAP, SERVED_TARGET_TTFT, EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.load import (
    Network,
    choose_computation,
    choose_slots,
    load_model,
    load_replacement,
)
from logitd.model.inference.memory import Shape, SlotBudget, default_for, divide_slots
from logitd.model.inference.options import (
    SERVED_SLOTS,
    ComputeOptions,
    SlotDefault,
    TargetGap,
    format_target,
    parse_memory,
    parse_target_gap,
    parse_target_ttft,
)
from logitd.model.memory import Available, available, format_bytes
from logitd.model.owner_code.connection import CodeModel
from logitd.model.sae.files import (
    AutoencoderError,
    StoredAutoencoder,
    foreign_weights,
    placed,
    read_autoencoders,
)
from logitd.model.transformer.features import Features
from logitd.model.transformer.size import parameter_count
from logitd.service.engine.driver import WeightsLoader
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")

STARTUP_ERRORS = (
    AutoencoderError,
    CheckpointError,
    DataError,
    DeviceError,
    InvalidRequest,
    KernelError,
)
"""Expected errors of `build`; their messages say what to do."""


@dataclass(frozen=True, slots=True)
class Computation:
    """How a model is computed, for the banner and /info.

    dtype_why      why this dtype was chosen
    decoding       name of the decoder; `decoding_note` says why no faster one is used
    kernels        description of the loaded native kernels; None if there are none
    quantization   None if nothing is quantized
    slots_why      why there are this many slots; None if a setting gives the number
    target_gap     target gap in effect, in the form of --target-gap; `target_ttft` likewise
    """

    weights_sha256: str
    placement: Placement
    device: str
    dtype_why: str
    decoding: str
    decoding_note: str | None
    kernels: str | None
    quantization: QuantizationCost | None
    parameters: int
    kv_cache_bytes: int
    slots_why: str | None
    target_gap: str
    target_ttft: str


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and how it computes. `compiler` compiles constraints for the engine's vocabulary,
    or is the error that says why that is impossible. `load_weights` reads other weights of the same
    shape. The stages of the `checkpoint` include the features of the `autoencoders`."""

    engine: Engine
    computation: Computation
    checkpoint: CheckpointInfo
    compiler: Compiler | ConstraintsUnavailable
    load_weights: WeightsLoader
    autoencoders: Mapping[Features, StoredAutoencoder]


@dataclass(frozen=True, slots=True)
class Shares:
    """The number of slots of each model, by the model's name; and for each model that cannot be
    read, the reason."""

    slots: Mapping[str, int]
    refused: Mapping[str, str]


def build(settings: ServeSettings) -> BuiltEngine:
    """Build the engine of the only model of `settings`. Raises one of STARTUP_ERRORS.

    During the build, only one thread computes. OpenMP keeps a pool of threads for each thread of
    the process that has ever computed in parallel. If all pools together have more threads than
    there are processors, every thread sleeps between two operations: a prefill took two and a half
    times as long after another thread had read the weights in parallel.
    """
    with one_thread():
        built = _build(settings)
    use_threads(built.computation.placement.threads)
    return built


def divide_memory(settings: ServeSettings) -> Shares:
    """Divide the slots among the models of `settings`. Raises DeviceError if the models do not fit
    together."""
    shapes, refused = [], {}
    for source in settings.models:
        try:
            shapes.append(_shape(source, settings))
        except (*STARTUP_ERRORS, OSError) as error:
            refused[source.served_name] = str(error)
    if not shapes:
        return Shares({}, refused)
    device = choose_device(settings.device)
    gpu = device.type == "cuda"
    slots = divide_slots(shapes, _slot_budget(settings), available(device), gpu=gpu)
    return Shares({shape.name: n for shape, n in zip(shapes, slots, strict=True)}, refused)


def _slot_budget(settings: ServeSettings) -> SlotBudget:
    memory = None if settings.kv_cache_memory is None else parse_memory(settings.kv_cache_memory)
    return SlotBudget(settings.slots, memory, SERVED_SLOTS)


def _build(settings: ServeSettings) -> BuiltEngine:
    budget = _slot_budget(settings)
    model = load_model(
        settings.source.path,
        ComputeOptions.of(settings),
        batch_invariant=settings.batch_invariant,
        slots=budget,
        log=logger.info,
    )
    if isinstance(model.network, CodeModel) and settings.speculate != "none":
        raise KernelError(
            f"speculate is {settings.speculate}, but drafts save no time in this model, because "
            "its owner's code computes each row separately: set speculate to none"
        )
    path = model.decode_path
    if path.note is not None:
        logger.warning("decoding in plain torch, which is slower: %s", path.note)
    quantization = measure_quantization(
        model, settings.validation_text, at_most=settings.max_quantization_loss
    )
    if quantization is not None:
        level = logging.WARNING if quantization.deserves_warning else logging.INFO
        logger.log(level, "%s", quantization.sentence())
    folders = {each.served_name: each.path for each in settings.sae}
    autoencoders = read_autoencoders(folders, model.checkpoint)
    for features, stored in autoencoders.items():
        if (warning := foreign_weights(stored, model.checkpoint)) is not None:
            logger.warning("--sae %s: %s", features.name, warning)
    slots, memory = choose_slots(model, budget)
    gap = _target_gap(settings, model.placement)
    config = EngineConfig(
        slots=slots,
        prefill_chunk=settings.prefill_chunk,
        target_gap=gap,
        target_ttft=_target_ttft(settings, gap),
        prefix_reuse=settings.prefix_reuse,
        kv_cache_dtype=settings.kv_cache_dtype,
        speculate=settings.speculate,
    )
    compiler: Compiler | ConstraintsUnavailable
    try:
        compiler = Compiler(model.checkpoint.tokenizer)
    except ConstraintsUnavailable as error:
        compiler = ConstraintsUnavailable(str(error))  # the traceback would keep the model alive
    engine = Engine(
        model.network,
        config,
        make_decoder=path.make_owner,
        autoencoders=placed(autoencoders, model.placement.device),
    )
    release_memory()
    computation = Computation(
        weights_sha256=model.checkpoint.weights_sha256,
        placement=model.placement,
        device=describe(model.placement.device),
        dtype_why=model.dtype.why,
        decoding=path.name,
        decoding_note=path.note,
        kernels=path.kernels,
        quantization=quantization,
        parameters=parameter_count(model.checkpoint.shape),
        kv_cache_bytes=engine.kv_cache_bytes,
        slots_why=_why_slots(
            slots, budget, default_for(model.checkpoint.shape, budget.default), memory
        ),
        target_gap=format_target(config.target_gap),
        target_ttft=format_target(config.target_ttft),
    )
    # Without a reference to the model, so that a reload frees its weights.
    load_weights = partial(_load_weights, model.checkpoint, model.placement, settings.batch_code)
    checkpoint = replace(model.checkpoint, shape=engine.model_config)
    return BuiltEngine(engine, computation, checkpoint, compiler, load_weights, autoencoders)


def _why_slots(
    slots: int, budget: SlotBudget, default: SlotDefault, memory: Available
) -> str | None:
    if budget.slots is not None or budget.memory is not None or default.share is None:
        return None
    if slots == default.most:
        return "the default"
    return f"{default.share} of the {format_bytes(memory.free)} that the weights leave free"


def _target_gap(settings: ServeSettings, placement: Placement) -> TargetGap | None:
    """The target gap in the settings. If it is not set, this is the default on a CPU, and None on
    other devices, where the time that prompts take cannot be measured."""
    if settings.target_gap is not None:
        return parse_target_gap(settings.target_gap)
    return SERVED_TARGET_GAP if placement.device.type == "cpu" else None


def _target_ttft(settings: ServeSettings, gap: TargetGap | None) -> float | None:
    if settings.target_ttft is not None:
        return parse_target_ttft(settings.target_ttft)
    return None if gap is None else SERVED_TARGET_TTFT


def _load_weights(
    served: CheckpointInfo, placement: Placement, batch_code: bool, path: Path, weights_sha256: str
) -> Network:
    """Read the weights of another checkpoint, in one thread, because the engine continues to
    compute with the served weights. Raises CheckpointError and DeviceError."""
    with one_thread():
        return load_replacement(
            served, path, weights_sha256, placement, together=batch_code, log=logger.info
        )


def _shape(source: ModelSource, settings: ServeSettings) -> Shape:
    """The shape of the checkpoint that would be loaded now. Its weights are not read."""
    checkpoint = read_checkpoint(checkpoint_of(source.path, settings.follow))
    check_header(checkpoint)
    options = ComputeOptions.of(settings)
    _, placement = choose_computation(checkpoint, options, log=logger.info)
    return Shape(
        source.served_name, checkpoint.shape, placement.dtype.itemsize, options.kv_cache_dtype
    )
