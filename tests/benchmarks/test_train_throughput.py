"""A step of the trainer and a step of the plain loop change the weights in the same way."""

from dataclasses import replace

import pytest
import torch

from benchmarks.train_throughput import Step, own_step, plain_step
from logitd.model.device import Placement
from logitd.model.training.configuration.presets import PRESETS
from logitd.model.training.optim.optimizers import initialize
from logitd.model.transformer.gpt import GPT


@pytest.mark.parametrize("name", ["tiny", "nanogpt"])
def test_plain_and_own_step_compute_the_same_loss(name: str) -> None:
    start = PRESETS[name]
    recipe = replace(start.recipe, matrix_lr=1e-2, scalar_lr=1e-3)
    config = start.config(100, n_layer=2, d_model=32, context_length=16)
    placement = Placement(torch.device("cpu"), torch.float32, 1)
    ids = torch.randint(100, (4, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for make in (own_step, plain_step):
        gpt = GPT(config)
        initialize(gpt, recipe, torch.Generator().manual_seed(1))
        step: Step = make(gpt.train(), recipe, placement)
        losses.append([float(step(ids)) for _ in range(8)])
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)
    assert all(each[-1] < each[0] - 0.01 for each in losses)
