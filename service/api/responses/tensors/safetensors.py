"""Tensor files: the safetensors form of replies for one or many prompts.

First `token_ids` and `positions` of each prompt, whole; then, prompt by prompt, what was asked for,
which the caller writes. With several prompts every name ends in its prompt's index: `logits.0`. The
checkpoint stands in the file's metadata.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.requests import OutputsRequest
from logitd.service.api.responses.tensors.encoding import TensorSpec, safetensors_header
from logitd.service.api.responses.text import checkpoint_name

Shape = tuple[int, ...]


def tensor_file_head(
    checkpoint: CheckpointInfo,
    tensors: Sequence[tuple[str, str, Sequence[Shape]]],
    requests: Sequence[OutputsRequest],
    metadata: Mapping[str, str],
) -> bytes:
    """All of a file up to the bytes of `tensors`: (name, dtype, a shape for each prompt)."""
    suffixes = [""] if len(requests) == 1 else [f".{i}" for i in range(len(requests))]
    specs, integers = [], []
    for suffix, request in zip(suffixes, requests, strict=True):
        for name, values in (("token_ids", request.token_ids), ("positions", request.positions)):
            specs.append(TensorSpec(name + suffix, "int64", (len(values),)))
            integers.append(np.array(values, dtype="<i8").tobytes())
    specs += [
        TensorSpec(name + suffix, dtype, shapes[index])
        for index, suffix in enumerate(suffixes)
        for name, dtype, shapes in tensors
    ]
    named = {f"checkpoint_{k}": str(v) for k, v in checkpoint_name(checkpoint).items()}
    return safetensors_header(specs, {**named, **metadata}) + b"".join(integers)
