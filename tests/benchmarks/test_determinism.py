"""Determinism's price: what is measured is what a step computes, and shares are of the step."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from benchmarks import determinism
from benchmarks.determinism import (
    PRODUCTS,
    NativePrice,
    by_linear,
    by_vector,
    fastest_products,
    matrices,
    native_price,
    padding_price,
    prefill_price,
    prompt_length,
)
from logitd.model.benchmark.work import size_of
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 1), ("PASSES", 2), ("STEPS", 6)):
        monkeypatch.setattr(determinism, name, value)
    monkeypatch.setattr("benchmarks.engine_step.STEPS", 6)
    monkeypatch.setattr("logitd.model.benchmark.machine.ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(determinism, "read_bandwidth", lambda device: 1e9)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_step_is_there(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    size = size_of(gpt)
    gates = sum(p.numel() for name, p in gpt.named_parameters() if "value_gate" in name)
    found = list(matrices(gpt))
    assert sum(weight.numel() for _, weight, _ in found) == size.block_matrices - gates + size.head
    assert [kind for kind, _, _ in found] == [*PRODUCTS[:-1]] * gpt.config.n_layer + ["head"]
    assert set(fastest_products(gpt)) == set(PRODUCTS)


@pytest.mark.parametrize("biased", [True, False])
def test_padded_and_plain_are_the_same_product(biased: bool) -> None:
    weight, row = torch.randn(7, 5), torch.randn(5)
    bias = torch.randn(7) if biased else None
    expected = F.linear(row, weight, bias)
    assert_close(by_linear(weight, row, bias)[0], expected)
    assert_close(by_vector(weight, row, bias), expected)


def price(**changed: float) -> NativePrice:
    values = {"step": 10.0, "reading": 5.0, "sampling": 1.0, "fastest_sampling": 0.5} | changed
    ours, fastest = dict.fromkeys(PRODUCTS, 1.6), dict.fromkeys(PRODUCTS, 1.5)
    return NativePrice(ours=ours, fastest=fastest, **values)


def test_shares_are_of_the_whole_step() -> None:
    assert price().products == pytest.approx(0.05)
    assert price().whole == pytest.approx(0.1)
    assert price().bound == pytest.approx(0.3)
    assert price(reading=9.0).bound == 0


def test_tiny_model_is_measured() -> None:
    gpt = tiny_gpt(tiny_config(n_head=2, context_length=256))
    assert padding_price(gpt, 2) > 0
    assert prompt_length(gpt) == 128
    found = prefill_price(gpt)
    assert found.seconds > 0
    assert found.attention < 1
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    native = native_price(gpt, threads=1)
    assert native is not None
    assert all(seconds > 0 for seconds in (*native.ours.values(), *native.fastest.values()))
    assert sum(native.ours.values()) + native.sampling < native.step
