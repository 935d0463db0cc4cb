"""Helpers for tests of the API: a prompt, the smallest body of each operation, replies as
arrays."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.operation import Operation
from tests.service.serving import Serving

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
IDS = list(PROMPT.encode())
JSON, NPY, SAFETENSORS = "application/json", "application/x-npy", "application/vnd.safetensors"
Array = npt.NDArray[Any]

BY_NAME = {operation.name: operation for operation in OPERATIONS}
ABLATE = {"stage": "blocks.*.attention.heads", "operation": "zero"}


def smallest(operation: Operation) -> Mapping[str, Any]:
    """The required fields of an operation, from its first example, with PROMPT as the prompt."""
    example = {**next(iter(operation.body.examples.values())), "prompt": PROMPT}
    fields = operation.body.model_fields.items()
    return {name: example[name] for name, field in fields if field.is_required()}


SMALLEST: Mapping[str, Mapping[str, Any]] = {
    **{name: smallest(operation) for name, operation in BY_NAME.items()},
    "generate": {"prompt": PROMPT, "max_tokens": 5},
    "activations": {"prompt": PROMPT, "stages": ["embedding"]},
    "sweep": {"prompt": PROMPT, "vary": ABLATE, "over": ["layers"]},
    "detokenize": {"tokens": IDS},
}
"""A small body of each operation, by name."""


def npy(server: Serving, path: str, **fields: Any) -> Array:
    response = server.post(path, {"prompt": PROMPT, **fields}, Accept=NPY)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == NPY
    loaded: Array = np.load(io.BytesIO(response.content), allow_pickle=False)
    return loaded


def tensors(server: Serving, path: str, **fields: Any) -> dict[str, torch.Tensor]:
    response = server.post(path, {"prompt": PROMPT, **fields}, Accept=SAFETENSORS)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == SAFETENSORS
    return safetensors.torch.load(response.content)
