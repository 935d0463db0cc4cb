"""Extras: optional packages, and the command that installs them into the running environment.

The command names the packages themselves, not logitd with an extra: logitd is not on any package
index, so installing it by name would fail, or would install another project's package.
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("rustbpe>=0.1", "matplotlib>=3.10"),
    "parquet": ("pyarrow>=20",),
    "gguf": ("gguf>=0.17",),
    "litgpt": ("pyyaml>=6",),
    "ray": ("ray[serve]>=2.60",),
    "otel": ("opentelemetry-sdk>=1.45,<2", "opentelemetry-exporter-otlp-proto-http>=1.45,<2"),
    "tensorboard": ("tensorboard>=2.20",),
}
"""The extras of pyproject.toml with their packages. A test compares them with that file."""


def installation(extra: str) -> str:
    """A command line, ready to paste, that installs the packages of an extra."""
    python = Path(sys.executable)
    if Path.cwd() in python.parents[:3]:  # .venv/bin/python
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", "pip", "install", *EXTRAS[extra]])
