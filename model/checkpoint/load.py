"""Load: reads and verifies the weights and source files of a checkpoint.

No size in a file is trusted on its own: before anything is allocated, the header of the weights is
compared with the configuration, and both with the free memory. Loading verifies hashes, names,
shapes and finiteness. It executes no code (`model/inference/load.py` runs an owner's code) and
copies the weights, so later changes to a file do not affect a loaded model.
`model/checkpoint/checkpoint.py` reads the configuration, and writes checkpoints.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from logitd.model.checkpoint.checkpoint import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    CheckpointInfo,
    read_checkpoint,
    reading,
    sha256_of,
    verify,
)
from logitd.model.checkpoint.hashed_file import HashedFile
from logitd.model.checkpoint.weights_file import (
    StoredTensor,
    WeightsFileError,
    read_elements,
    read_header,
)
from logitd.model.device import one_thread
from logitd.model.files import read_regular
from logitd.model.memory import available, check_weights_fit
from logitd.model.owner_code.config import FOLDER
from logitd.model.plural import pluralize
from logitd.model.transformer.arena import allocate_in_arena
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import parameter_count

MOST_REHASHED = 2**34
"""Maximum size, in bytes, of a weights file that is hashed after loading fails. The hash shows
whether the file is damaged or belongs to another model. Hashing a larger file takes too long."""
MOST_TIMES = 2**10
"""Before names and shapes are compared, a configuration is refused if its model has more than 2^40
elements and more than MOST_TIMES times as many elements as the weights file."""
SOURCE_BYTES = 2**22
"""Maximum size, in bytes, of each of the owner's source files."""
_SOURCE_PART = re.compile(r"[\w-]+(\.[\w-]+)*")


def load_checkpoint(
    path: Path, *, device: torch.device, dtype: torch.dtype
) -> tuple[CheckpointInfo, GPT]:
    """Read and verify a checkpoint. The returned model is in evaluation mode, without gradients."""
    info = read_checkpoint(path)
    return info, load_weights(info, device=device, dtype=dtype)


def load_weights(info: CheckpointInfo, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """Load the weights of a checkpoint that `read_checkpoint` has read. On a CPU they are stored in
    an arena (`model/transformer/arena.py`).

    Each piece of the file is hashed and converted to `dtype` while it is read. The model is
    returned only if the hash matches. Raises CheckpointError, or DeviceError if the model does not
    fit into memory.
    """
    config = info.config
    with _open_weights(info, whole=True) as file:
        gpt, stored = _shape_of(file, config)
        check_weights_fit(config, dtype.itemsize, available(device))
        gpt = gpt.to(dtype)
        _allocate(gpt, device)
        weights = gpt.state_dict()
        # The other thread hashes. With all of torch's threads, two cores take 1.45 times as long.
        with one_thread():
            for tensor in stored:
                check = partial(_check_elements, file.path, tensor.name, dtype)
                read_elements(file, tensor, weights[tensor.name], check)
    return gpt.eval().requires_grad_(False)


def check_header(info: CheckpointInfo) -> None:
    """Raise CheckpointError unless the weights have the names and shapes of the configuration. Only
    the header is read. If the owner's code defines the shapes, nothing is checked. This function is
    for callers that need the configured sizes before they call `load_weights`, which repeats the
    check."""
    if isinstance(info.shape, GPTConfig):
        with _open_weights(info, whole=False) as file:
            _shape_of(file, info.shape)


def stored_dtype(info: CheckpointInfo) -> torch.dtype:
    """The dtype of the weights in the file; all have the same one. Only the header is read. Raises
    CheckpointError as `check_header` does."""
    with _open_weights(info, whole=False) as file:
        _, stored = _shape_of(file, info.config)
    return stored[0].dtype


def read_sources(info: CheckpointInfo) -> tuple[dict[str, bytes], FileIO]:
    """Read and verify the owner's source files, and verify the weights file. Returns the sources by
    name, and the open weights file. Raises CheckpointError."""
    sources = {}
    for name in info.files:
        folder, _, inner = name.partition("/")
        if folder == FOLDER:
            parts = inner.split("/")
            if not inner.endswith(".py") or not all(map(_SOURCE_PART.fullmatch, parts)):
                raise CheckpointError(
                    f"{info.path / CONFIG} names {name!r}, which is not a source file"
                )
            with reading(info.path / name):
                sources[inner] = read_regular(info.path / name, SOURCE_BYTES)
            verify(info.path, name, sha256_of(sources[inner]), len(sources[inner]), info.files)
    with ExitStack() as stack:
        with _open_weights(info, whole=True) as file:
            read_header(file)
            weights = stack.enter_context(file.another())
        stack.pop_all()  # verified: it stays open
    return sources, weights


@contextmanager
def _open_weights(info: CheckpointInfo, *, whole: bool) -> Iterator[HashedFile]:
    """Open the weights file. If `whole`, its hash is verified at the end of the block. The hash is
    also verified after an error, so that a damaged file is reported as damaged."""
    with reading(info.path / WEIGHTS), HashedFile(info.path / WEIGHTS) as file:
        try:
            yield file
        except (CheckpointError, WeightsFileError):
            if file.size <= MOST_REHASHED:
                verify(info.path, WEIGHTS, file.finish(), file.taken, info.files)
            raise
        if whole:
            verify(info.path, WEIGHTS, file.finish(), file.taken, info.files)


def _shape_of(file: HashedFile, config: GPTConfig) -> tuple[GPT, tuple[StoredTensor, ...]]:
    """Build the model on the meta device, where it takes no memory, and compare the names and
    shapes of its tensors with the header of a newly opened file. Returns the model and the stored
    tensors."""
    stored = read_header(file)
    _check_sizes(file.path, config, stored)
    gpt = empty_gpt(config, torch.device("meta"))
    _check_weights(file.path, gpt.state_dict(), stored)
    return gpt, stored


def _check_sizes(where: Path, config: GPTConfig, stored: Sequence[StoredTensor]) -> None:
    """Raise CheckpointError if the sizes in the configuration are far larger than the file, because
    building such a model would take too long."""
    if config.n_layer > len(stored):
        raise CheckpointError(
            f"{where} has {len(stored):,} tensors, too few for the {config.n_layer:,} blocks of "
            "the configuration: one of the two files belongs to another model"
        )
    held, needed = sum(tensor.elements for tensor in stored), parameter_count(config)
    if needed > max(MOST_TIMES * held, 2**40):
        raise CheckpointError(
            f"{where} has {held:,} elements, but a model of the configuration's shape has "
            f"{needed:,}: one of the two files belongs to another model"
        )


def _allocate(gpt: GPT, device: torch.device) -> None:
    """Move a GPT from the meta device to `device`. Its weights are uninitialized."""
    dtype = gpt.token_embedding.weight.dtype
    if device.type == "cpu":
        allocate_in_arena(gpt)
    else:
        gpt.to_empty(device=device)
    gpt.reset_tables()
    gpt.to(dtype)


def empty_gpt(config: GPTConfig, device: torch.device) -> GPT:
    """A GPT with uninitialized weights, which the caller sets."""
    with torch.device(device), _SkipInit():
        return GPT(config)


class _SkipInit(TorchFunctionMode):
    """Skips functions that write into a tensor. Initializing weights on the meta device would
    import torch's compiler, which takes a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def _check_weights(
    where: Path, expected: Mapping[str, Tensor], stored: Sequence[StoredTensor]
) -> None:
    names = {tensor.name for tensor in stored}
    if missing := sorted(set(expected) - names):
        raise CheckpointError(
            f"{where} lacks {pluralize(len(missing), 'tensor')}; the first is {missing[0]}"
        )
    if unknown := sorted(names - set(expected)):
        raise CheckpointError(
            f"{where} has {pluralize(len(unknown), 'tensor')} that the configured model lacks; the "
            f"first is {unknown[0]}"
        )
    for tensor in stored:
        if tensor.shape != (shape := tuple(expected[tensor.name].shape)):
            raise CheckpointError(
                f"{where}: {tensor.name} has shape {tensor.shape}, but the configuration requires "
                f"{shape}"
            )
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"{where}: {tensor.name} has the dtype {tensor.dtype}; a float dtype is needed"
            )


def _check_elements(where: Path, name: str, dtype: torch.dtype, elements: Tensor) -> None:
    """Raise CheckpointError unless all elements are finite, also in the dtype of the model."""
    # The extremes are enough; torch.isfinite takes twenty times as long.
    extremes = torch.stack(torch.aminmax(elements))
    if not extremes.isfinite().all():
        raise CheckpointError(
            f"{where}: {name} has NaN or infinite elements: the training diverged, or the file was "
            "damaged before it was hashed"
        )
    if not extremes.to(dtype).isfinite().all():
        raise CheckpointError(
            f"{where}: {name} has elements from {extremes[0]:.3g} to {extremes[1]:.3g}, but "
            f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}: set "
            "another dtype"
        )
