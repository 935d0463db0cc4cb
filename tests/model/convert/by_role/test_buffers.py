"""Buffers: masks, tables and counters are not weights."""

import pytest
import torch
from torch import Tensor

from logitd.model.convert.by_role.recognize import is_buffer


@pytest.mark.parametrize(
    ("name", "tensor", "buffer"),
    [
        ("h.0.attn.bias", torch.ones(1, 1, 6, 6).tril(), True),
        ("h.0.attn.bias", torch.ones(96), False),
        ("blocks.0.tril", torch.ones(6, 6).tril(), True),
        ("blocks.0.attn.future", torch.full((6, 6), -torch.inf).triu(1), True),
        ("blocks.0.attn.future", torch.ones(6, 6).tril().bool(), True),
        ("layers.0.self_attn._cos", torch.ones(6, 4), True),
        ("freqs_cis", torch.ones(6, 4, dtype=torch.complex64), True),
        ("rotary.inv_freq", torch.ones(4), True),
        ("position_ids", torch.arange(6)[None], True),
        ("step", torch.tensor(3), True),
        ("blocks.0.mlp.up.weight", torch.ones(6, 6), False),
        ("blocks.0.mlp.up.weight", torch.eye(6), False),
        ("blocks.0.attn.c_attn.bias", torch.arange(6.0), False),
        ("pos_enc.pe", torch.ones(1, 6, 4), False),
        ("blocks.0.attn.IGNORE", torch.tensor(-torch.inf), True),
        ("h.0.attn.masked_bias", torch.tensor(-1e4), True),
        ("h.0.attn.bias", torch.ones(1, 1, 6, 6, dtype=torch.uint8).tril(), True),
        # Each of these was dropped, although it changes logits.
        ("logit_scale", torch.tensor(2.5), False),
        ("blocks.0.attn.temperature", torch.ones(1, 4, 1, 1), False),
        ("blocks.0.conv.weight", torch.ones(2, 2, 3, 3), False),
        ("positions", torch.ones(6, 4), False),
        ("blocks.0.attn.mask", torch.ones(6, 6).tril().triu(-2), False),
        ("blocks.0.attn.bias", torch.ones(1, 1, 6, 6).tril().triu(-2).bool(), False),
        ("blocks.0.mlp.up.weight_mask", torch.ones(6, 4), False),
        ("blocks.0.attn.head_mask", torch.ones(4), False),
        ("blocks.0.mix", torch.ones(4, 4, dtype=torch.complex64) * 2, False),
        ("theta", torch.tensor(500_000.0), False),
        ("theta", torch.tensor(500_000), False),
    ],
)
def test_masks_and_tables_are_not_weights(name: str, tensor: Tensor, buffer: bool) -> None:
    assert is_buffer(name, tensor) is buffer
