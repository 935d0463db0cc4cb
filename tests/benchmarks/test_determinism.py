"""Cost of determinism: the measured parts cover a whole step, and shares are relative to it."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from benchmarks.determinism import (
    PRODUCTS,
    by_linear,
    by_vector,
    fastest_products,
    matrices,
)
from logitd.model.transformer.size import count_elements
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_step_is_measured(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    config, size = gpt.config, count_elements(gpt.config)
    head = config.vocab_size * config.d_model
    gates = sum(p.numel() for name, p in gpt.named_parameters() if "value_gate" in name)
    found = list(matrices(gpt))
    assert sum(weight.numel() for _, weight, _ in found) == size.block_matrices - gates + head
    assert [kind for kind, _, _ in found] == [*PRODUCTS[:-1]] * gpt.config.n_layer + ["head"]
    assert set(fastest_products(gpt)) == set(PRODUCTS)


@pytest.mark.parametrize("biased", [True, False])
def test_padded_and_plain_are_the_same_product(biased: bool) -> None:
    weight, row = torch.randn(7, 5), torch.randn(5)
    bias = torch.randn(7) if biased else None
    expected = F.linear(row, weight, bias)
    assert_close(by_linear(weight, row, bias)[0], expected)
    assert_close(by_vector(weight, row, bias), expected)
