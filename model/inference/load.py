"""Load a checkpoint: from a folder and some options to a model that is ready to decode.

The order matters: the shape is read first, held against the header of the weights and against the
memory there is, because nothing else may be of a size that is not true; then the weights, in the
dtype that is fastest for that shape; then the decoder is chosen. Makes no engine and no cache.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from logitd.model.checkpoint.checkpoint import (
    RANKS,
    CheckpointError,
    CheckpointInfo,
    check_header,
    load_weights,
    read_checkpoint,
)
from logitd.model.checkpoint.run_folder import is_run
from logitd.model.device import (
    Placement,
    choose_device,
    choose_placement,
    disable_cudnn_attention,
    keep_freed_memory,
)
from logitd.model.inference.kernels.select import (
    DecodePath,
    DTypeChoice,
    check_kv_cache_dtype,
    choose_decode_path,
    choose_dtype,
)
from logitd.model.inference.memory import SlotBudget, slots_for
from logitd.model.inference.options import ComputeOptions, SlotDefault
from logitd.model.memory import Available, available, check_weights_fit, model_bytes
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that a KV cache is to have: a budget, and their number if that is empty."""

    budget: SlotBudget
    default: SlotDefault


@dataclass(frozen=True, slots=True)
class ChosenSlots:
    """How many a KV cache gets, and what memory the weights left free for them."""

    count: int
    memory: Available


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's weights where they are computed, the options, and the choices by them."""

    checkpoint: CheckpointInfo
    gpt: GPT
    options: ComputeOptions
    placement: Placement
    dtype: DTypeChoice
    decode_path: DecodePath


def load_model(
    path: Path,
    options: ComputeOptions,
    *,
    batch_invariant: bool = False,
    slots: Slots | None = None,
    log: Callable[[str], None],
) -> LoadedModel:
    """Read a checkpoint and choose how it is computed; what this process frees is kept from then on
    (`keep_freed_memory`). Torch's threads are left to `use_threads`, in the thread that computes.

    `log` is told which checkpoint of a run is read, and when native kernels are being built. Raises
    CheckpointError, DeviceError (weights that do not fit, beside the `slots` that they will have,
    are refused before they are read) and KernelError.
    """
    keep_freed_memory()
    checkpoint = read_checkpoint(path)
    if is_run(path):
        log(f"of the run {path}, the checkpoint {checkpoint.path.name}")
    check_header(checkpoint)  # from here on its sizes are those of the weights
    choice = choose_dtype(checkpoint.config, choose_device(options.device), options, log=log)
    placement = choose_placement(options.device, choice.name, options.threads)
    memory, item_bytes = available(placement.device), placement.dtype.itemsize
    check_weights_fit(checkpoint.config, item_bytes, memory)
    if slots is not None:
        check_kv_cache_dtype(options.kv_cache_dtype, placement.device)
        left = replace(memory, free=memory.free - model_bytes(checkpoint.config, item_bytes))
        _count_slots(slots, checkpoint.config, placement, left, options)
    if placement.device.type == "cuda":
        disable_cudnn_attention()
    gpt = load_weights(checkpoint, device=placement.device, dtype=placement.dtype)
    decode_path = choose_decode_path(
        gpt, options, threads=placement.threads, batch_invariant=batch_invariant, log=log
    )
    return LoadedModel(checkpoint, gpt, options, placement, choice, decode_path)


def load_replacement(
    served: CheckpointInfo,
    path: Path,
    weights_sha256: str,
    placement: Placement,
    *,
    log: Callable[[str], None],
) -> GPT:
    """The weights of another checkpoint of the same model, where and in the dtype in which those of
    `served` are computed, which stay in memory beside them. `log` is told how much they take,
    before they are read. Raises CheckpointError, and DeviceError where they do not fit."""
    checkpoint = read_checkpoint(path)
    if checkpoint.weights_sha256 != weights_sha256:
        raise CheckpointError(f"{path} was replaced while it was being loaded")
    check_replacement(served, checkpoint)
    check_header(checkpoint)
    item_bytes = placement.dtype.itemsize
    check_weights_fit(checkpoint.config, item_bytes, available(placement.device))
    log(
        f"loading {path}: {model_bytes(checkpoint.config, item_bytes) / 2**20:,.0f} MiB beside "
        "the weights that are served, until it takes their place"
    )
    return load_weights(checkpoint, device=placement.device, dtype=placement.dtype)


def check_replacement(served: CheckpointInfo, other: CheckpointInfo) -> None:
    """Raise CheckpointError unless a checkpoint can take the place of another in a server that
    runs: of the same shape, which the cache has, and with the vocabulary in which prompts were
    encoded."""
    if other.config != served.config:
        ours, theirs = served.config.to_dict(), other.config.to_dict()
        name = next(name for name in theirs if ours.get(name) != theirs[name])
        raise CheckpointError(
            f"{other.path} has another shape than {served.path}, which is served ({name} is "
            f"{theirs[name]!r}, not {ours.get(name)!r}): it takes another server"
        )
    vocabularies = [
        (checkpoint.tokenizer.description(), checkpoint.files.get(RANKS))
        for checkpoint in (served, other)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise CheckpointError(
            f"{other.path} has another vocabulary than {served.path}, which is served: it takes "
            "another server"
        )


def choose_slots(loaded: LoadedModel, slots: Slots) -> ChosenSlots:
    """How many slots the KV cache of a loaded model gets. Raises DeviceError where they do not fit
    beside the weights."""
    memory = available(loaded.placement.device)
    config, placement = loaded.checkpoint.config, loaded.placement
    count = _count_slots(slots, config, placement, memory, loaded.options)
    return ChosenSlots(count, memory)


def _count_slots(
    slots: Slots,
    config: GPTConfig,
    placement: Placement,
    memory: Available,
    options: ComputeOptions,
) -> int:
    return slots_for(
        slots.budget,
        config,
        placement.dtype.itemsize,
        memory,
        default=slots.default,
        gpu=placement.device.type == "cuda",
        kept=options.kv_cache_dtype,
    )


def release_memory() -> None:
    """Give the system back what was freed: to open a model frees several copies of its weights, and
    the C library keeps what was taken in pieces. Does nothing where the C library is not GNU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
