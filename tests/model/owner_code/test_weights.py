"""Weights that a checkpoint has and the owner's class lacks."""

import pytest
import torch
from torch import Tensor

from logitd.model.owner_code.process.weights import is_weight


@pytest.mark.parametrize(
    ("name", "tensor", "weight"),
    [
        ("blocks.0.attn.bias", torch.ones(1, 1, 4, 4), False),
        ("blocks.0.attn.causal_mask", torch.ones(4, 4), False),
        ("rope.inv_freq", torch.ones(4), False),
        ("cos_cached", torch.ones(4, 4), False),
        ("freqs_cis", torch.ones(4, 4, dtype=torch.complex64), False),
        ("position_ids", torch.ones(4, dtype=torch.int64), False),
        # Each of these was dropped, although it changes logits.
        ("blocks.0.attn.sinks", torch.ones(4), True),
        ("frequency_gain", torch.ones(4), True),
        ("europe", torch.ones(4), True),
        ("turn", torch.ones(4, dtype=torch.complex64), True),
    ],
)
def test_masks_and_tables_need_not_be_in_the_class(name: str, tensor: Tensor, weight: bool) -> None:
    assert is_weight(name, tensor) is weight
