"""Load a checkpoint: from a folder and some options to a model that is ready to decode.

The order matters: the shape is read first, because the fastest dtype depends on it; then the
weights, in that dtype; then the decoder is chosen. Makes no engine and no cache.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.checkpoint import CheckpointInfo, load_weights, read_checkpoint
from model.device import (
    Placement,
    choose_device,
    choose_placement,
    disable_cudnn_attention,
    keep_freed_memory,
)
from model.dtypes import DTypeName
from model.inference.kernels.select import DecodePath, DTypeChoice, choose_decode_path, choose_dtype
from model.inference.memory import SlotBudget, available, check_weights_fit, slots_for
from model.inference.options import KernelChoice, Quantization
from model.transformer.gpt import GPT


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's weights where they are computed, and what was chosen for them."""

    checkpoint: CheckpointInfo
    gpt: GPT
    placement: Placement
    dtype: DTypeChoice
    decode_path: DecodePath


def load_model(
    path: Path,
    *,
    device: str,
    dtype: DTypeName,
    threads: int,
    kernels: KernelChoice,
    quantize: Quantization,
    batch_invariant: bool = False,
    log: Callable[[str], None],
) -> LoadedModel:
    """Read a checkpoint and choose how it is computed; what this process frees is kept from then on
    (`keep_freed_memory`). Torch's threads are left to `use_threads`, in the thread that computes.

    `log` is told when native kernels are being built. Raises CheckpointError, DeviceError (weights
    that do not fit are refused before they are read) and KernelError.
    """
    keep_freed_memory()
    checkpoint = read_checkpoint(path)
    choice = choose_dtype(dtype, checkpoint.config, choose_device(device), kernels=kernels, log=log)
    placement = choose_placement(device, choice.name, threads)
    check_weights_fit(checkpoint.config, placement.dtype.itemsize, available(placement.device))
    if placement.device.type == "cuda":
        disable_cudnn_attention()
    gpt = load_weights(checkpoint, device=placement.device, dtype=placement.dtype)
    decode_path = choose_decode_path(
        gpt,
        kernels=kernels,
        quantize=quantize,
        threads=placement.threads,
        batch_invariant=batch_invariant,
        log=log,
    )
    return LoadedModel(checkpoint, gpt, placement, choice, decode_path)


def choose_slots(loaded: LoadedModel, budget: SlotBudget, default: int) -> int:
    """How many slots the KV cache of a model gets; `default` where the budget is empty. Raises
    DeviceError where they do not fit beside the weights."""
    device, item_bytes = loaded.placement.device, loaded.placement.dtype.itemsize
    memory = available(device, weight_bytes=loaded.gpt.parameter_count() * item_bytes)
    return slots_for(
        budget,
        loaded.checkpoint.config,
        item_bytes,
        memory,
        default=default,
        gpu=device.type == "cuda",
    )


def release_memory() -> None:
    """Give the system back what was freed: to open a model frees several copies of its weights, and
    the C library keeps what was taken in pieces. Does nothing where the C library is not GNU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
