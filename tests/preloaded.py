"""Imported only by the tests' fork server (`tests/zygote.py`)."""

from tests.zygote import preload

preload()
