"""What a token costs, against torch's own counting."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from logitd.model.device import Placement
from logitd.model.training.step.flops import Meter, flops_per_token
from logitd.model.training.step.forward import Forward
from logitd.model.transformer.config import MODERN, ORIGINAL, GPTConfig, gpt2_shape
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import count_elements

PLACEMENT = Placement(torch.device("cpu"), torch.bfloat16, 1)  # whose attention torch can count
SHAPES: list[dict[str, Any]] = [
    {},
    dict(MODERN),
    {**MODERN, "n_kv_head": 1, "activation": "swiglu", "tied_head": True},
    {**ORIGINAL, "d_ff": 40},
    {**MODERN, "residual": "parallel", "rotary_dim": 4, "head_bias": True},
    {"tied_head": True, "head_bias": True, "final_norm": False},
]


def _config(length: int, **shape: Any) -> GPTConfig:
    return gpt2_shape(
        vocab_size=70, context_length=length, n_layer=2, n_head=2, d_model=32, **shape
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 24])
def test_it_is_what_torch_counts(shape: dict[str, Any], length: int) -> None:
    """torch counts the whole square of attention, we what the causal mask leaves of it, and not the
    gates of value embeddings, which are spelled as sums; and the forward and backward pass of
    training multiplies nothing besides."""
    config = _config(length, **shape)
    gpt = GPT(config)
    ids = torch.randint(config.vocab_size, (3, length))
    with FlopCounterMode(display=False) as counter:
        forward = Forward(gpt, PLACEMENT, dropout=0.0)
        forward.loss(ids, ids).backward()
    hidden_by_the_mask = 12 * config.n_layer * config.n_head * config.head_dim * (length - 1) / 2
    gates = sum(weight.numel() for name, weight in gpt.named_parameters() if "value_gate" in name)
    counted = counter.get_total_flops() / ids.numel() - hidden_by_the_mask + 6 * gates
    assert counted == pytest.approx(flops_per_token(config))


def test_gpt2_small_is_as_published() -> None:
    """Within the rounding of "6 N": 124 M parameters, of which 0.8 M are positions."""
    config = gpt2_shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768)
    attention = 12 * 12 * 768 * (1024 + 1) / 2
    assert flops_per_token(config) - attention == pytest.approx(6 * 123.65e6, rel=0.001)
    assert count_elements(config).block_matrices == 12 * 12 * 768**2


def test_the_share_is_of_the_rate_that_was_measured() -> None:
    assert Meter(flops_per_token=2e6, matrix_rate=1e9).share(250) == 0.5
    config = _config(24)
    meter = Meter.measure(config, Placement(torch.device("cpu"), torch.float32, 1))
    assert meter.flops_per_token == flops_per_token(config)
    assert meter.matrix_rate > 1e8
