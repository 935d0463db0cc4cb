"""The computed number of operations per token, compared with torch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from logitd.model.device import Placement
from logitd.model.training.run.step_log import StepLog
from logitd.model.training.step.flops import flops_per_token, machine_rate
from logitd.model.training.step.forward import Forward
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import MODERN, ORIGINAL, gpt2_shape
from logitd.model.transformer.size import count_elements
from tests.model.shapes import TOGETHER

PLACEMENT = Placement(
    torch.device("cpu"), torch.bfloat16, 1
)  # torch can count the operations of its attention
SHAPES: list[dict[str, Any]] = [
    {},
    dict(MODERN),
    {**MODERN, "n_kv_head": 1, "activation": "swiglu", "tied_head": True},
    {**ORIGINAL, "d_ff": 40},
    {**MODERN, "residual": "parallel", "rotary_dim": 4, "head_bias": True},
    {"tied_head": True, "head_bias": True, "final_norm": False},
    {**MODERN, **TOGETHER, "windows": None},
]


def _config(length: int, **shape: Any) -> GPTConfig:
    return gpt2_shape(
        vocab_size=70, context_length=length, n_layer=2, n_head=2, d_model=32, **shape
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 24])
def test_flops_equal_the_count_of_torch(shape: dict[str, Any], length: int) -> None:
    """torch counts the whole square of attention, including positions that the causal mask hides,
    but not the gates of value embeddings, which are computed as sums."""
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


def test_flops_of_gpt2_small_are_as_published() -> None:
    """Without attention, the count agrees up to rounding with the published "6 N", where N does not
    include the 0.8 M parameters of position embeddings."""
    config = gpt2_shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768)
    attention = 12 * 12 * 768 * (1024 + 1) / 2
    assert flops_per_token(config) - attention == pytest.approx(6 * 123.65e6, rel=0.001)
    assert count_elements(config).block_matrices == 12 * 12 * 768**2


def test_report_has_the_share_of_the_measured_rate() -> None:
    rate = machine_rate(Placement(torch.device("cpu"), torch.float32, 1))
    assert rate > 1e8
    log = StepLog(rate)
    log.add(
        loss=torch.tensor(1.0),
        norm=torch.tensor(1.0),
        lr_scale=1.0,
        tokens=250,
        operations=250 * 2e6,
    )
    figures = log.take()
    assert figures.matrix_share == pytest.approx(figures.tokens_per_second * 2e6 / rate)
