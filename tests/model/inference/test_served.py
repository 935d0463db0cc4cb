"""The service's arithmetic without a server: the same model, with any kernels.

`tests/service/` and `tests/e2e/` test that a server gives the same bits.
"""

import pytest
import torch
from torch.testing import assert_close

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.options import KernelChoice
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.inference.served import forward_as_served


@pytest.fixture(params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    """Model with heads that the native kernels cover."""
    return tiny_gpt(tiny_config(**{**FAMILIES[request.param], "head_dim": 16}))


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> KernelChoice:
    choice: KernelChoice = request.param
    if choice == "native":
        try:
            load_library()
        except KernelsUnavailable as error:
            pytest.skip(str(error))
    return choice


@pytest.mark.parametrize(
    "length",
    [
        1,
        32,
        33,
        100,
        *(pytest.param(length, marks=pytest.mark.slow) for length in (2, 31, 64, 128)),
    ],
)
def test_forward_as_served_is_the_same_model(gpt: GPT, kernels: KernelChoice, length: int) -> None:
    ids = random_ids(length, seed=length)
    plain = gpt(ids[None], hidden_states=True, attentions=True)
    served = forward_as_served(gpt, ids, hidden_states=True, attentions=True, kernels=kernels)
    assert_close(served.logits, plain.logits, atol=1e-3, rtol=1e-3)
    assert_close(served.hidden_states, plain.hidden_states, atol=1e-3, rtol=1e-3)
    assert_close(served.attentions, plain.attentions, atol=1e-4, rtol=1e-3)
    alone = forward_as_served(gpt, ids, kernels=kernels)
    assert torch.equal(alone.logits, served.logits), "watching changes nothing"
    assert alone.hidden_states is None
    assert alone.attentions is None
