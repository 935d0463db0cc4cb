"""The weights that every peer gets: a folder with a GPT's tensors in float32 and its shape.

Tensors have this project's names (`model/transformer/gpt.py`), matrices are (out, in), and the
vocabulary is not padded. Each peer rounds the weights to its own dtype. A subfolder has the same
weights in the format of Hugging Face's libraries (`huggingface.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import Shape

Tensors = Mapping[str, NDArray[np.float32]]

NORM_EPS = 1e-5
ROPE_THETA = 10_000.0
WEIGHTS = "weights.npz"
LOGITD, HUGGINGFACE = "logitd", "huggingface"
"""Folders next to the weights: a logitd checkpoint, and the model in Hugging Face's format."""


def save_weights(folder: Path, shape: Shape, tensors: Tensors) -> None:
    """Write tensors and shape into `folder`."""
    np.savez(folder / WEIGHTS, **tensors)  # type: ignore[arg-type]  # names, not options
    (folder / "shape.json").write_text(json.dumps(asdict(shape)), encoding="utf-8")


def load_shape(folder: Path) -> Shape:
    """Read the shape back."""
    return Shape(**json.loads((folder / "shape.json").read_text(encoding="utf-8")))


def load_weights(folder: Path) -> tuple[Shape, Tensors]:
    """Read tensors and shape back."""
    shape = load_shape(folder)
    with np.load(folder / WEIGHTS) as archive:
        return shape, {name: archive[name] for name in archive.files}
