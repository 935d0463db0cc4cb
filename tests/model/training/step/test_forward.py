"""The trainer's forward pass, compared with the model's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.device import Placement
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import MODERN, gpt2_shape
from tests.model.shapes import TOGETHER

CPU = torch.device("cpu")
EXACT = Placement(CPU, torch.float32, 1)


def _small(**overrides: Any) -> tuple[GPT, Tensor, Tensor]:
    """A model with ids and targets (3, 16)."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**MODERN, "n_kv_head": 1, **overrides}
    gpt = GPT(
        gpt2_shape(vocab_size=50, context_length=16, n_layer=2, n_head=2, d_model=32, **shape)
    )
    return gpt, torch.randint(50, (3, 16)), torch.randint(50, (3, 16))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_logits_are_those_of_the_model() -> None:
    gpt, ids, _ = _small()
    expected = gpt(ids).logits
    torch.testing.assert_close(Forward(gpt, EXACT, dropout=0.0)(ids), expected)
    rough = replace(EXACT, dtype=torch.bfloat16)
    logits = Forward(gpt, rough, dropout=0.0)(ids)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, atol=0.02, rtol=0.05)


def test_given_dtype_is_used() -> None:
    assert training_placement("cpu", "float32", 1) == Placement(CPU, torch.float32, 1)
    assert training_placement("cpu", "bfloat16", 1).dtype == torch.bfloat16
    assert training_placement("cpu", "auto", 1).dtype in (torch.float32, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [{}, TOGETHER], ids=["modern", "nanochat"])
def test_loss_is_that_of_the_logits(
    tied: bool, bias: bool, dtype: torch.dtype, parts: dict[str, Any]
) -> None:
    gpt, ids, targets = _small(tied_head=tied, head_bias=bias, final_norm=not bias, **parts)
    if bias:
        torch.nn.init.normal_(gpt.get_parameter("head.bias"))
    forward = Forward(gpt, Placement(CPU, dtype, 1), dropout=0.0)
    mine = forward.loss(ids, targets)
    theirs = F.cross_entropy(forward(ids).float().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    near = 1e-5 if dtype == torch.float32 else 0.02
    parameters = forward.parameters()
    assert len(parameters) == len(list(gpt.parameters()))
    for own, other in zip(
        torch.autograd.grad(mine, parameters), torch.autograd.grad(theirs, parameters), strict=True
    ):
        assert float((own - other).norm()) <= near * float(other.norm()) + 1e-7
