"""Gradients of a logit, compared with three independent computations: autograd over the forward
pass in `tests/model/plain_stages.py`, finite differences of that pass, and GPT-2 in
`transformers`."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.device import use_threads
from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.gradients import TextPasses, threads_keep_bits
from logitd.model.inference.attribution.task import (
    Attribution,
    AttributionTask,
    kept_elements,
    padded_length,
)
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT, Block
from tests.model.covering import few_families
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages, without_softcap

IDS = random_ids(11, seed=3).tolist()
POSITION = 8
TOKEN, MINUS = 70, 5


@pytest.fixture(scope="module", params=FAMILIES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**FAMILIES[request.param]))


@pytest.fixture(scope="module")
def exact(gpt: GPT) -> GPT:
    return copy.deepcopy(gpt).double()


def task(**fields: Any) -> AttributionTask:
    values = {"position": POSITION, "token_id": TOKEN, "minus_id": MINUS}
    return AttributionTask(**(values | fields))


def plain_target(gpt: GPT, x: Tensor | None = None, ids: list[int] = IDS) -> tuple[Tensor, Tensor]:
    """The difference between the two logits, computed by definition, and the input stream (T, C) of
    the first block. The stream is `x` if given, otherwise the embeddings of the text."""
    entered: list[Tensor] = []

    def change(name: str, value: Tensor) -> Tensor:
        if name == "embedding":
            value = value if x is None else x
            entered.append(value.detach().clone().requires_grad_())
            return entered[0]
        return value

    with torch.enable_grad():
        logits = plain_stages(without_softcap(gpt), ids, change)["logits"][POSITION]
        return logits[TOKEN] - logits[MINUS], entered[0]


def autograd(gpt: GPT, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient (T, C) of the target, by autograd over the plain forward, and the stream (T,
    C)."""
    target, x = plain_target(gpt, x)
    (gradient,) = torch.autograd.grad(target, x)
    return gradient, x.detach()


def values_of(attribution: Attribution) -> Tensor:
    assert attribution.gradient_times_input is not None
    return torch.tensor(attribution.gradient_times_input, dtype=torch.float64)


def path_of(attribution: Attribution) -> Tensor:
    assert attribution.integrated_gradients is not None
    return torch.tensor(attribution.integrated_gradients.values, dtype=torch.float64)


def test_gradient_times_input_is_that_of_autograd(gpt: GPT, exact: GPT) -> None:
    gradient, x = autograd(exact)
    expected = (gradient * x).sum(dim=-1)
    for model, tolerance in ((exact, 1e-12), (gpt, 1e-4)):
        found = attributing(model, IDS, task()).result()
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(values_of(found), expected, atol=tolerance * scale, rtol=0)
        assert found.target == pytest.approx(plain_target(exact)[0].item(), abs=tolerance * 10)


@few_families
def test_later_tokens_contribute_nothing(gpt: GPT) -> None:
    values = values_of(attributing(gpt, IDS, task()).result())
    assert len(values) == len(IDS)
    assert values[POSITION + 1 :].tolist() == [0.0] * (len(IDS) - POSITION - 1)
    assert values[: POSITION + 1].ne(0).all()
    other = [*IDS[: POSITION + 1], 9, 9]
    assert attributing(gpt, other, task()).result() == attributing(gpt, IDS, task()).result()


@few_families
def test_integrated_gradients_are_the_mean_of_autograd_along_the_path(exact: GPT) -> None:
    _, x = autograd(exact)
    for baseline in (None, 17):
        begin = torch.zeros_like(x)
        if baseline is not None:
            _, begin = plain_target(exact, ids=[baseline] * len(IDS))
            begin = begin.detach()
        total = torch.zeros_like(x)
        for step in range(5):
            total += autograd(exact, begin + (step + 0.5) / 5 * (x - begin))[0] / 5
        expected = ((x - begin) * total).sum(dim=-1)
        methods = ("integrated_gradients",)
        found = attributing(exact, IDS, task(methods=methods, steps=5, baseline=baseline)).result()
        torch.testing.assert_close(path_of(found), expected, atol=1e-10, rtol=1e-10)
        path = found.integrated_gradients
        assert path is not None
        assert path.baseline_target == pytest.approx(plain_target(exact, begin)[0].item())
        change = plain_target(exact)[0].item() - path.baseline_target
        assert path.gap == pytest.approx(math.fsum(path.values) - change)


@pytest.mark.parametrize("family", ["gpt2", "modern", "llama", "neox"])
def test_integrated_gradients_close_the_gap_with_many_steps(family: str) -> None:
    """On a smooth path the error of the midpoint rule falls with the square of the number of
    steps."""
    gpt = tiny_gpt(tiny_config(**FAMILIES[family], n_layer=2)).double()
    with torch.no_grad():  # a smooth model: attention is hardly selective
        for block in gpt.blocks:
            assert isinstance(block, Block)
            block.qkv.weight.mul_(0.1)
            block.mlp_up.weight.mul_(0.3)
    gaps = []
    for steps in (4, 36):
        methods = ("integrated_gradients",)
        found = attributing(gpt, IDS, task(methods=methods, steps=steps, baseline=32)).result()
        path = found.integrated_gradients
        assert path is not None
        gaps.append(abs(path.gap))
        if steps == 36:
            assert path.sum == pytest.approx(found.target - path.baseline_target, rel=5e-3)
    assert gaps[1] < gaps[0] / 20, gaps


@few_families
def test_attribution_without_a_token_takes_the_likeliest(gpt: GPT) -> None:
    with torch.inference_mode():
        expected = int(gpt(torch.tensor([IDS])).logits[0, POSITION].argmax())
    found = attributing(gpt, IDS, task(token_id=None, minus_id=None)).result()
    assert found.token_id == expected
    assert found.minus_logit is None
    assert found == attributing(gpt, IDS, task(token_id=expected, minus_id=None)).result()
    other = attributing(gpt, IDS, task(token_id=None, minus_id=expected)).result()
    assert other.token_id != expected
    assert other == attributing(gpt, IDS, task(token_id=other.token_id, minus_id=expected)).result()


def test_attribution_takes_the_lowest_of_equally_likely_ids() -> None:
    gpt = tiny_gpt(tiny_config(tied_head=False))
    gpt.head.weight[[90, 40]] = 10 * plain_stages(gpt, IDS)["final_norm"][POSITION]
    logits = plain_stages(gpt, IDS)["logits"][POSITION]
    assert logits[40] == logits[90] == logits.max()
    assert attributing(gpt, IDS, task(token_id=None)).result().token_id == 40


@few_families
def test_bfloat16_weights_are_used_as_they_are_in_float32(gpt: GPT) -> None:
    """The weights are rounded to bfloat16, but the gradients are computed in float32."""
    rounded = copy.deepcopy(gpt).bfloat16()
    wide = copy.deepcopy(rounded).float()
    for name, table in rounded.named_buffers():
        assert torch.equal(wide.get_buffer(name), table.float())
    assert attributing(rounded, IDS, task()).result() == attributing(wide, IDS, task()).result()


@few_families
def test_parameters_stay_unchanged_without_gradients(gpt: GPT) -> None:
    before = {name: value.clone() for name, value in gpt.named_parameters()}
    attributing(
        gpt, IDS, task(methods=("gradient_times_input", "integrated_gradients"), steps=2)
    ).result()
    for name, value in gpt.named_parameters():
        assert value.grad is None
        assert not value.requires_grad
        assert torch.equal(value, before[name])


@few_families
def test_outer_inference_mode_changes_nothing(gpt: GPT) -> None:
    asked = task(methods=("gradient_times_input", "integrated_gradients", "direct"), steps=2)
    expected = attributing(gpt, IDS, asked).result()
    with torch.inference_mode():
        assert attributing(gpt, IDS, asked).result() == expected
        made_there = copy.deepcopy(gpt)  # its weights are tensors of inference mode
    assert attributing(made_there, IDS, asked).result() == expected


@few_families
def test_piece_is_one_block(gpt: GPT) -> None:
    layers = gpt.config.n_layer
    for methods, pieces in (
        (("gradient_times_input",), 2 * layers),
        (("integrated_gradients",), layers + layers + 3 * 2 * layers),
        (("direct",), layers + 1),
    ):
        work, count = attributing(gpt, IDS, task(methods=methods, steps=3)), 1
        while work.advance() is None:
            count += 1
        assert count == pieces + 1, "the last one is complete"


def test_no_more_than_a_block_of_the_graph_is_kept(gpt: GPT) -> None:
    asked = task(position=len(IDS) - 1)
    work, parameters = attributing(gpt, IDS, asked), {p.data_ptr() for p in gpt.parameters()}
    ended = False
    while not ended:
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes() // 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ended = work.advance() is not None
        length = padded_length(asked, gpt.config)
        kept = length * (gpt.config.n_layer + 6) * gpt.config.d_model
        # Norms save a number or two of each position, and gates and tables are small.
        assert sum(saved.values()) <= kept_elements(asked, gpt.config) - kept + 80 * length


def test_long_prompt_is_padded_within_the_context() -> None:
    gpt = tiny_gpt(tiny_config(context_length=41)).double()
    ids = random_ids(41, seed=5).tolist()
    with torch.inference_mode():
        expected = gpt(torch.tensor([ids])).logits[0, :, TOKEN]
    for position in (0, 31, 32, 40):
        found = attributing(gpt, ids, task(position=position, minus_id=None)).result()
        assert found.target == pytest.approx(expected[position].item(), rel=1e-5)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(2)
    yield
    use_threads(before)


@few_families
def test_fewer_threads_keep_bits(gpt: GPT, two_threads: None) -> None:
    if not threads_keep_bits(gpt, BLOCK):
        pytest.skip("on this machine a block has different bits with one thread")
    together = attributing(gpt, IDS, task()).result()
    use_threads(1)
    assert attributing(gpt, IDS, task()).result() == together


def test_threads_that_change_a_bit_are_noticed(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = TextPasses.backward

    def planted(*arguments: Any) -> Tensor:
        return backward(*arguments) + 1e-3 * torch.get_num_threads()

    gpt = tiny_gpt()
    monkeypatch.setattr(TextPasses, "backward", planted)
    assert not threads_keep_bits(gpt, BLOCK)
