"""Load a checkpoint and choose its dtype and decoder. Engine and cache are created elsewhere.

The order matters. First the shape is checked against the header of the weights and the free memory,
so that no memory is allocated for weights of the wrong size. Then the dtype is chosen, the weights
are read, and the decoder is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from logitd.model.checkpoint.checkpoint import (
    RANKS,
    CheckpointError,
    CheckpointInfo,
    read_checkpoint,
)
from logitd.model.checkpoint.load import check_header, load_weights, read_sources
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
    KernelError,
    check_kv_cache_dtype,
    choose_decode_path,
    choose_dtype,
    code_path,
)
from logitd.model.inference.memory import Shape, SlotBudget, slots_for
from logitd.model.inference.options import ComputeOptions
from logitd.model.memory import Available, available, check_weights_fit, model_bytes
from logitd.model.owner_code.config import CodeConfig
from logitd.model.owner_code.connection import CodeError, CodeModel
from logitd.model.transformer.gpt import GPT

Network = GPT | CodeModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint: the model on its device (or in the process of its owner's code), the
    options, and the choices that follow from them."""

    checkpoint: CheckpointInfo
    network: Network
    options: ComputeOptions
    placement: Placement
    dtype: DTypeChoice
    decode_path: DecodePath

    @property
    def gpt(self) -> GPT:
        """The GPT. Raises CheckpointError if the model is computed by its owner's code."""
        shape = self.checkpoint.config  # raises CheckpointError
        assert isinstance(self.network, GPT), shape
        return self.network


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

    Calls `log` with a line of text when it has chosen the checkpoint of a run, before it runs the
    owner's code, and before it builds native kernels. Raises CheckpointError and KernelError. Also
    raises DeviceError, before it reads the weights, if the weights and the `slots` do not fit into
    memory.
    """
    keep_freed_memory()
    checkpoint = read_checkpoint(path)
    if is_run(path):
        log(f"reading checkpoint {checkpoint.path.name} of the run {path}")
    check_header(checkpoint)  # checks the sizes in the config
    choice, placement = choose_computation(checkpoint, options, log=log)
    memory, item_bytes = available(placement.device), placement.dtype.itemsize
    check_weights_fit(checkpoint.shape, item_bytes, memory)
    if slots is not None:
        check_kv_cache_dtype(options.kv_cache_dtype, placement.device)
        left = replace(memory, free=memory.free - model_bytes(checkpoint.shape, item_bytes))
        _count_slots(slots, checkpoint, placement, left, options)
    if isinstance(checkpoint.shape, CodeConfig):
        log(f"running the owner's code of {checkpoint.path}, {checkpoint.shape.code}")
        model = load_code(checkpoint, placement, together=options.batch_code)
        by_code = code_path(describe_code(model))
        return LoadedModel(checkpoint, model, options, placement, choice, by_code)
    if placement.device.type == "cuda":
        disable_cudnn_attention()
    gpt = load_weights(checkpoint, device=placement.device, dtype=placement.dtype)
    decode_path = choose_decode_path(
        gpt, options, threads=placement.threads, batch_invariant=batch_invariant, log=log
    )
    return LoadedModel(checkpoint, gpt, options, placement, choice, decode_path)


def choose_computation(
    checkpoint: CheckpointInfo, options: ComputeOptions, *, log: Callable[[str], None]
) -> tuple[DTypeChoice, Placement]:
    """Choose the dtype and the device. Raises KernelError and DeviceError. Also raises
    CheckpointError if the checkpoint has code that the user has not allowed to run."""
    config = checkpoint.shape
    if isinstance(config, CodeConfig):
        _check_code_options(checkpoint, config, options)
        placement = choose_placement("cpu", "float32", options.threads)
        return DTypeChoice("float32", "the dtype of an owner's code"), placement
    if options.batch_code:
        raise KernelError(
            f"batch_code is set, but {checkpoint.path} is not computed by its owner's code: remove "
            "batch_code"
        )
    choice = choose_dtype(config, choose_device(options.device), options, log=log)
    return choice, choose_placement(options.device, choice.name, options.threads)


def _check_code_options(
    checkpoint: CheckpointInfo, config: CodeConfig, options: ComputeOptions
) -> None:
    if not options.run_code:
        raise CheckpointError(
            f"{checkpoint.path} is computed by its owner's code ({config.code}), which runs with "
            "your permissions, in a process without network access: if you trust the code, add "
            "--run-code (run_code=True in Python) or set LOGITD_RUN_CODE=1"
        )
    if config.file not in checkpoint.sources:
        raise CheckpointError(
            f"{checkpoint.path} does not contain {config.file}, the file with its owner's code"
        )
    values = {
        "device": (options.device, ("auto", "cpu")),
        "dtype": (options.dtype, ("auto", "float32")),
        "kernels": (options.kernels, ("auto", "torch")),
        "kernel_target": (options.kernel_target, ("auto",)),
        "quantize": (options.quantize, ("none",)),
        "kv_cache_dtype": (options.kv_cache_dtype, ("auto",)),
    }
    for name, (value, possible) in values.items():
        if value not in possible:
            raise KernelError(
                f"{name} is {value}, but {checkpoint.path} is computed by its owner's code, in "
                f"float32 on the CPU: set {name} to {possible[0]}"
            )
    if options.batch_code and config.has_state:
        raise KernelError(
            f"batch_code is set, but {config.code} has its own cache for each sequence: "
            "remove batch_code"
        )
    if options.batch_code and not config.padding_is_harmless:
        raise KernelError(
            f"batch_code is set, but padding or other rows of a batch change the logits of "
            f"{config.code}: remove batch_code"
        )


def load_code(checkpoint: CheckpointInfo, placement: Placement, *, together: bool) -> CodeModel:
    """Verify the sources and the weights, and start the process of the owner's code. Raises
    CheckpointError."""
    assert isinstance(checkpoint.shape, CodeConfig)
    sources, weights = read_sources(checkpoint)
    model = CodeModel(checkpoint.shape, sources, weights, placement.threads, together)
    try:
        model.start()
    except CodeError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return model


def describe_code(model: CodeModel) -> str:
    """Describe how an owner's code decodes, and its measured speed."""
    config, speed = model.config, model.speed
    assert speed is not None
    how = (
        "each token continues the model's own cache; a pass over"
        if config.has_state
        else "each token computes the sequence again:"
    )
    rows = ", rows in batches whose bits may differ" if model.together else ""
    noise = "" if config.deterministic else ", random numbers seeded for each pass"
    return (
        f"owner's code {config.code} ({how} {speed.length} tokens {speed.milliseconds:.1f} "
        f"ms{rows}{noise})"
    )


def load_replacement(
    served: CheckpointInfo,
    path: Path,
    weights_sha256: str,
    placement: Placement,
    *,
    together: bool = False,
    log: Callable[[str], None],
) -> Network:
    """Read another checkpoint of the served model, on the same device and in the same dtype. The
    served weights stay in memory. Calls `log` with a line of text about the size of the new weights
    before they are read. Raises CheckpointError. Also raises DeviceError if the new weights do not
    fit into memory."""
    checkpoint = read_checkpoint(path)
    if checkpoint.weights_sha256 != weights_sha256:
        raise CheckpointError(f"{path} was replaced while it was being loaded")
    check_replacement(served, checkpoint)
    check_header(checkpoint)
    item_bytes = placement.dtype.itemsize
    check_weights_fit(checkpoint.shape, item_bytes, available(placement.device))
    log(
        f"loading {path}: {model_bytes(checkpoint.shape, item_bytes) / 2**20:,.0f} MiB next to "
        "the served weights, until it replaces them"
    )
    if isinstance(checkpoint.shape, CodeConfig):
        return load_code(checkpoint, placement, together=together)
    return load_weights(checkpoint, device=placement.device, dtype=placement.dtype)


def check_replacement(served: CheckpointInfo, other: CheckpointInfo) -> None:
    """Raise CheckpointError unless a checkpoint has the shape of the served checkpoint, on which
    the cache depends, and the same vocabulary, because prompts are encoded before the swap."""
    ours, theirs = served.shape.to_dict(), other.shape.to_dict()
    if ours != theirs:
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
    shape = Shape(name, checkpoint.shape, item_bytes, options.kv_cache_dtype)
    return slots_for([shape], budget, memory, gpu=placement.device.type == "cuda")[0]
