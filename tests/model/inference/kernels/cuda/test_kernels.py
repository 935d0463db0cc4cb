"""The Triton kernels in Triton's interpreter; `interpreted.py` has the checks."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
MANY = ("modern", "nanochat", "original", "multi-query", "neox", "scaled")
"""Families that together use every branch of the kernels."""


@pytest.mark.parametrize(
    "families", [("modern",), pytest.param(MANY, marks=pytest.mark.slow)], ids=["modern", "many"]
)
def test_kernels_match_torch(families: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.model.inference.kernels.cuda.interpreted",
         *families],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
