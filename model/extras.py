"""Extras: optional packages, and the command that installs one into the environment that runs.

logitd is not on a package index, so its name with an extra would find nothing there, or a package
of somebody else's: the packages themselves are named.
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
"""As in pyproject.toml, which a test holds it to."""


def installation(extra: str) -> str:
    """The command line that installs what an extra needs, to be pasted."""
    python = Path(sys.executable)
    if Path.cwd() in python.parents[:3]:  # .venv/bin/python
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", "pip", "install", *EXTRAS[extra]])
