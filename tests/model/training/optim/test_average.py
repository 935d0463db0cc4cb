"""The average of the weights, compared with its definition and with whole runs."""

import math
from collections.abc import Iterator

import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.prepare import read_prepared
from logitd.model.data.windows import validation_windows
from logitd.model.training.events import Event, Noticed
from logitd.model.training.optim.average import STRIDE, Average
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.state import read_state
from logitd.model.training.step.forward import Forward, training_placement
from logitd.model.training.step.validate import validate
from logitd.model.training.trainer import train
from logitd.model.transformer.gpt import GPT
from tests.model.conftest import Configure
from tests.model.factories import tiny_config


@pytest.fixture
def gpt() -> Iterator[GPT]:
    with torch.random.fork_rng([]):
        yield GPT(tiny_config(n_layer=1))


def _move(gpt: GPT) -> None:
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_average_is_exponential_in_the_share_of_the_run(gpt: GPT) -> None:
    """Each step is a different share of the run, as happens when the clock changes the planned
    length."""
    average, expected = Average(gpt, 0.1), gpt.token_embedding.weight.detach().clone()
    for share in (0.01, 0.05, 0.002):
        _move(gpt)
        average.follow(share)
        keep = math.exp(-share / 0.1)
        expected = keep * expected + (1 - keep) * gpt.token_embedding.weight.detach()
    weights = {name: each.clone() for name, each in gpt.state_dict().items()}
    with average.in_place():
        torch.testing.assert_close(gpt.token_embedding.weight.detach(), expected)
    for name, each in gpt.state_dict().items():
        assert torch.equal(each, weights[name]), name


def test_short_steps_are_counted_together_across_a_resume(gpt: GPT) -> None:
    average = Average(gpt, 0.5)
    _move(gpt)
    average.follow(0.6 * STRIDE * 0.5)
    again = Average(gpt, 0.5)
    again.load_state_dict(average.state_dict())
    for each in (average, again):
        each.follow(0.6 * STRIDE * 0.5)
        assert each.pending == 0
    for one, two in zip(*(each.state_dict()["averages"] for each in (average, again)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("rate", "better"), [(0.3, True), (1e-5, False)])
def test_last_checkpoint_has_the_better_weights(
    configure: Configure, rate: float, better: bool
) -> None:
    """With a high constant learning rate, the last weights are worse than their average. With a
    tiny rate, at which the model still improves steadily, the last weights are better. The state
    keeps the last weights in both cases. The checkpoint has tables instead of value maps, and still
    has the loss that the trainer measured."""
    rates = {"matrix_lr": rate, "embedding_lr": rate, "head_lr": rate, "scalar_lr": rate}
    events: list[Event] = []
    config = configure(
        steps=40,
        average=0.2,
        decay="constant",
        eval_every=100,
        eval_batches=4,
        keep_every=40,
        **rates,
    )
    result = train(config, events.append)
    evaluation = RunDirectory(result.run).metrics()[-1]
    assert evaluation["kind"] == "eval"
    assert ("unaveraged_val_loss" in evaluation) == better
    assert any("average" in e.message for e in events if isinstance(e, Noticed)) == better
    info, served = load_checkpoint(
        result.checkpoint, device=torch.device("cpu"), dtype=torch.float32
    )
    assert info.training.val_loss == evaluation["val_loss"]
    text = read_prepared(result.run / "data")
    windows = validation_windows(text.val, text.tokenizer, window=32, batch_size=4, batches=4)
    forward = Forward(served, training_placement("cpu", "float32", 1), dropout=0.0)
    assert validate(served, windows, forward).loss == pytest.approx(result.val_loss, rel=1e-6)
    weights = read_state(result.run / "state" / "state.pt").weights
    name = "blocks.0.qkv.weight"
    assert torch.equal(served.get_parameter(name), weights[name]) != better
    card = (result.checkpoint / "README.md").read_text()
    assert ("average over about 20% of the run" in card) == better
    kept = (result.run / "history" / "step-000040" / "README.md").read_text()
    assert ("averaged weights" in kept) == better
    if better:
        assert evaluation["val_loss"] < evaluation["unaveraged_val_loss"]
