"""The arithmetic of the service, without a server: the same model, whichever kernels compute it.

That a server gives its bits is tested where servers are: `tests/service/` and `tests/e2e/`.
"""

import pytest
import torch
from torch.testing import assert_close

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.options import KernelChoice
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.inference.served import forward_as_served


@pytest.fixture(params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    """With heads that the native kernels cover."""
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


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 100, 128])
def test_it_is_the_same_model(gpt: GPT, kernels: KernelChoice, length: int) -> None:
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


@pytest.mark.parametrize("length", [1, 33, 90])
def test_it_does_not_depend_on_what_follows(gpt: GPT, kernels: KernelChoice, length: int) -> None:
    ids = random_ids(128)
    whole = forward_as_served(gpt, ids, hidden_states=True, kernels=kernels)
    part = forward_as_served(gpt, ids[:length], hidden_states=True, kernels=kernels)
    assert whole.hidden_states is not None
    assert part.hidden_states is not None
    assert torch.equal(part.logits, whole.logits[:, :length])
    assert torch.equal(part.hidden_states, whole.hidden_states[:, :, :length])


@pytest.mark.parametrize("length", [0, 129])
def test_a_text_that_does_not_fit_is_refused(gpt: GPT, length: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} tokens; this model takes 1 to 128"):
        forward_as_served(gpt, random_ids(length))


def test_kernels_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(KernelError, match="head_dim is 12"):
        forward_as_served(tiny_gpt(tiny_config(head_dim=12)), random_ids(3), kernels="native")
