"""Parameters are counted without building a model; the counts equal the tensors of real models."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from logitd.model.training.configuration.presets import PRESETS
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.size import Elements, count_elements, parameter_count
from tests.model.factories import tiny_config
from tests.model.shapes import shapes


def elements_of(gpt: GPT) -> Elements:
    """The sizes of a model's tensors by kind, counted from the built model."""
    matrices = [
        module.weight
        for block in gpt.blocks
        for module in block.modules()
        if isinstance(module, nn.Linear)
    ]
    tables = [module for module in gpt.modules() if isinstance(module, nn.Embedding)]
    return Elements(
        block_matrices=sum(matrix.numel() for matrix in matrices),
        block_rows=sum(len(matrix) for matrix in matrices),
        vectors=sum(
            p.numel()
            for name, p in gpt.named_parameters()
            if p.dim() == 1 or name == "smear_gate.weight"
        ),
        embeddings=sum(table.weight.numel() for table in tables),
        head=0 if gpt.config.tied_head else gpt.head.weight.numel(),
        looked_up=sum(table.embedding_dim for table in tables)
        + gpt.config.d_model * gpt.config.smear,  # the previous token
    )


def check(config: GPTConfig) -> None:
    with torch.device("meta"):  # shapes alone: nothing is allocated
        gpt = GPT(config)
    assert count_elements(config) == elements_of(gpt)
    assert parameter_count(config) == gpt.parameter_count()


@given(shape=shapes())
def test_elements_of_any_shape_are_counted(shape: dict[str, Any]) -> None:
    check(tiny_config(**shape))


@pytest.mark.parametrize("name", PRESETS)
def test_elements_of_every_preset_are_counted(name: str) -> None:
    check(PRESETS[name].config(512))
