"""Load a checkpoint and choose its dtype and decoder. Engine and cache are made elsewhere.

The order matters. First the shape is checked against the header of the weights and the free memory,
so that nothing is allocated for a false size. Then the dtype is chosen, the weights are read, and
the decoder is chosen.
"""

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
from logitd.model.inference.memory import Shape, SlotBudget, slots_for
from logitd.model.inference.options import ComputeOptions
from logitd.model.memory import Available, available, check_weights_fit, model_bytes
from logitd.model.transformer.gpt import GPT


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's weights on their device, the options, and the choices that follow from
    them."""

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
    slots: SlotBudget | None = None,
    log: Callable[[str], None],
) -> LoadedModel:
    """Read a checkpoint and choose how to compute it. Also makes this process keep memory that it
    frees (`keep_freed_memory`). The thread that computes must set the number of torch's threads
    (`use_threads`).

    `log` gets a line for the chosen checkpoint of a run, and one when native kernels are built.
    Raises CheckpointError and KernelError; DeviceError, before it reads the weights, if they and
    the `slots` do not fit.
    """
    keep_freed_memory()
    checkpoint = read_checkpoint(path)
    if is_run(path):
        log(f"reading checkpoint {checkpoint.path.name} of the run {path}")
    check_header(checkpoint)  # from here on the sizes in the config are known to be true
    choice = choose_dtype(checkpoint.config, choose_device(options.device), options, log=log)
    placement = choose_placement(options.device, choice.name, options.threads)
    memory, item_bytes = available(placement.device), placement.dtype.itemsize
    check_weights_fit(checkpoint.config, item_bytes, memory)
    if slots is not None:
        check_kv_cache_dtype(options.kv_cache_dtype, placement.device)
        left = replace(memory, free=memory.free - model_bytes(checkpoint.config, item_bytes))
        _count_slots(slots, checkpoint, placement, left, options)
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
    """Read another checkpoint of the served model, on the same device and in the same dtype. The
    served weights stay in memory. `log` gets the size of the new weights before they are read.
    Raises CheckpointError; DeviceError if they do not fit."""
    checkpoint = read_checkpoint(path)
    if checkpoint.weights_sha256 != weights_sha256:
        raise CheckpointError(f"{path} was replaced while it was being loaded")
    check_replacement(served, checkpoint)
    check_header(checkpoint)
    item_bytes = placement.dtype.itemsize
    check_weights_fit(checkpoint.config, item_bytes, available(placement.device))
    log(
        f"loading {path}: {model_bytes(checkpoint.config, item_bytes) / 2**20:,.0f} MiB next to "
        "the served weights, until it replaces them"
    )
    return load_weights(checkpoint, device=placement.device, dtype=placement.dtype)


def check_replacement(served: CheckpointInfo, other: CheckpointInfo) -> None:
    """Raise CheckpointError unless a checkpoint has the shape of the served one, on which the cache
    depends, and the same vocabulary, because prompts are encoded before the swap."""
    if other.config != served.config:
        ours, theirs = served.config.to_dict(), other.config.to_dict()
        name = next(name for name in theirs if ours.get(name) != theirs[name])
        raise CheckpointError(
            f"{other.path} has a different shape from the served {served.path} ({name} is "
            f"{theirs[name]!r}, not {ours.get(name)!r}): start another server for it"
        )
    vocabularies = [
        (checkpoint.tokenizer.description(), checkpoint.files.get(RANKS))
        for checkpoint in (served, other)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise CheckpointError(
            f"{other.path} has a different vocabulary from the served {served.path}: start "
            "another server for it"
        )


def choose_slots(loaded: LoadedModel, budget: SlotBudget) -> tuple[int, Available]:
    """Number of slots for a loaded model, and the memory that its weights leave free. Raises
    DeviceError if the slots do not fit."""
    checkpoint, placement = loaded.checkpoint, loaded.placement
    memory = available(placement.device)
    return _count_slots(budget, checkpoint, placement, memory, loaded.options), memory


def _count_slots(
    budget: SlotBudget,
    checkpoint: CheckpointInfo,
    placement: Placement,
    memory: Available,
    options: ComputeOptions,
) -> int:
    name, item_bytes = checkpoint.path.name, placement.dtype.itemsize
    shape = Shape(name, checkpoint.config, item_bytes, options.kv_cache_dtype)
    return slots_for([shape], budget, memory, gpu=placement.device.type == "cuda")[0]
