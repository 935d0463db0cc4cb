"""Fixtures of the engine's tests."""

import pytest

from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import small_gpt


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return small_gpt()
