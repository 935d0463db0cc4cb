"""Imported by the fork server of the tests (`tests/zygote.py`), and by nothing else."""

from tests.zygote import preload

preload()
