"""A text settles a computation only if the evidence is strong: the loss must beat predictions from
counted bigrams and trigrams, and agree with the loss that the file states. Each wrong variant here
was once accepted as verified."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from logitd.model.convert.by_role.finding import CONVENTION, Finding
from logitd.model.convert.by_role.ngrams import ngram_nats
from logitd.model.convert.by_role.objective import (
    FEWEST_LINES,
    CheckText,
    text_objective,
    text_objectives,
)
from logitd.model.convert.by_role.read import RoleOptions, recognize_file
from logitd.model.convert.by_role.resolution import OpenQuestions, Resolution
from logitd.model.convert.by_role.resolve import resolve
from logitd.model.convert.by_role.stated_loss import StatedLoss, stated_loss
from logitd.model.convert.foreign import ConvertError
from tests.model.convert.by_role.conftest import Trained
from tests.model.convert.by_role.scheme import built_from, findings, mapped, state_file
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.common import CONTEXT, WIDTH


def resolved(trained: Trained, stated: StatedLoss | None = None, **changed: Finding) -> Resolution:
    tensors = mapped(trained.model)
    text = CheckText("words.txt", trained.token_ids)
    found = findings(tensors) | changed
    return resolve(tensors, found, *text_objectives(text, 24, stated))


def counted(ids: list[int], vocab: int) -> list[float]:
    """The losses of the n-gram estimates, computed with dictionaries, token by token."""
    blocks = [index // 64 % 4 == 3 for index in range(len(ids))]
    held = [index for index, is_held in enumerate(blocks) if is_held and index > 1]
    seen = [index for index in range(len(ids)) if index not in set(held)]
    losses = []
    for order in range(3):
        total = 0.0
        for index in held:
            share = 1 / vocab
            for length in range(order + 1):
                context = [ids[(index - back) % len(ids)] for back in range(1, length + 1)]
                follows = Counter(
                    ids[other]
                    for other in seen
                    if [ids[(other - back) % len(ids)] for back in range(1, length + 1)] == context
                )
                if follows:
                    weight = follows.total() + len(follows)
                    share = (follows[ids[index]] + len(follows) * share) / weight
            total -= math.log(share)
        losses.append(total / len(held))
    return losses


@given(st.lists(st.integers(0, 4), min_size=256, max_size=300))
def test_counts_equal_those_of_dictionaries(ids: list[int]) -> None:
    nats = ngram_nats(ids, 5)
    expected = counted(ids, 5)
    assert [nats.unigram, nats.bigram, nats.trigram] == pytest.approx(expected)


def test_ngram_losses_of_regular_texts_are_known() -> None:
    pairs = ngram_nats([0, 1] * 2000, 2)
    assert pairs.unigram == pytest.approx(math.log(2), abs=0.01)
    assert pairs.bigram < 0.01
    triples = ngram_nats([0, 0, 1, 1] * 2000, 2)
    assert triples.bigram == pytest.approx(math.log(2), abs=0.01)
    assert triples.trigram < 0.01
    assert triples.over(4) == pytest.approx((triples.bigram + 3 * triples.trigram) / 4)


def test_variant_no_better_than_counts_is_refused(trained: Trained) -> None:
    """A variant once only had to beat the text's unigram entropy. Even a model with swapped blocks
    does that."""
    state = trained.model.state_dict()
    swap = {"0": "1", "1": "0"}
    names = {name: name.split(".") for name in state}
    swapped = {
        ".".join([p[0], swap[p[1]], *p[2:]]) if p[0] == "blocks" else name: state[name]
        for name, p in names.items()
    }
    model = type(trained.model)(whole_width=True, vocab=9, width=32, heads=4, length=24)
    model.load_state_dict(swapped)
    with pytest.raises(ConvertError, match=r"nats per token.*--code") as refusal:
        resolved(Trained(model, trained.token_ids))
    assert "Counts of token" in str(refusal.value)
    assert not isinstance(refusal.value, OpenQuestions)


def test_loss_in_the_file_must_agree(trained: Trained) -> None:
    loss = resolved(trained).penalty
    assert loss is not None
    agreed = resolved(trained, StatedLoss("val_loss", loss))
    assert f"the file states val_loss {loss:.4f}" in agreed.verified
    with pytest.raises(ConvertError, match=r"the file states best_loss .*training data"):
        resolved(trained, StatedLoss("best_loss", loss - 0.2))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"val_loss": 1.5, "train_loss": 1.2}, 1.5),
        ({"history": {"train_losses": [3.0, 2.0, 1.25]}}, 1.25),
        ({"log": [], "metrics": {"best_val_loss": torch.tensor(2.5)}}, 2.5),
        ({"best_val_loss": 1e9, "loss": math.inf}, None),
        ({"loss": True, "loss_weight": 0.5, "lossy": 2.0}, None),
        ({"losses": [{"step": 1, "loss": 2.0}]}, None),
    ],
)
def test_stated_losses_are_found(contents: dict[str, Any], expected: float | None) -> None:
    found = stated_loss(contents)
    assert (None if found is None else found.nats) == expected


def test_measured_value_is_not_reported_as_convention(trained: Trained) -> None:
    found = resolved(
        trained,
        residual=Finding(("parallel", "sequential"), CONVENTION),
        activation=Finding(("relu",), "said"),
        score_scale=Finding(("d_model",), "said"),
        norm_position=Finding(("pre",), "said"),
        final_norm=Finding((True,), "said"),
        causal=Finding((True,), "said"),
    )
    assert found.computation.residual == "sequential"
    assert found.origins["residual"].startswith("the lowest loss on words.txt")
    assert found.warning == ""


def test_lines_are_samples_after_their_start(trained: Trained) -> None:
    """A model trained on a list of names sees the id 0 before each line, but not the previous
    line."""
    ids = torch.tensor(trained.token_ids[: 7 * FEWEST_LINES]).view(-1, 7)
    lines = [row[: 3 + index % 4].tolist() for index, row in enumerate(ids)]
    text = CheckText("names.txt", [], lines, (8, 0, 8))
    newline, zero = text_objectives(text, 24)
    assert set(newline.windows[:, 0].tolist()) == {8}
    built = built_from(SCHEMES["lecture"], trained.model, context_length=24)
    nats = zero(built, causal=True, effort="thorough")
    logits, _ = trained.model(torch.tensor([[0, *lines[0]]]))
    expected = -logits[0].log_softmax(-1)[range(len(lines[0]) + 1), [*lines[0], 0]]
    row = zero.windows.tolist().index(
        [0, *lines[0], 0] + [-1] * (zero.windows.shape[1] - len(lines[0]) - 2)
    )
    before = int((zero.windows[:row, 1:] >= 0).sum())
    assert torch.allclose(nats[before : before + len(expected)].float(), expected, atol=1e-4)
    assert len(nats) == sum(len(line) + 1 for line in lines)


@pytest.mark.parametrize("length", [FEWEST_LINES - 1, FEWEST_LINES])
def test_few_or_long_lines_are_no_samples(length: int) -> None:
    text = CheckText("t", list(range(9)) * 20, [[1, 2, 3]] * length, (0,))
    assert len(text_objectives(text, 8)) == (1 if length < FEWEST_LINES else 2)
    assert len(text_objectives(text, 3)) == 1


def with_wide_table(width: int) -> nn.Module:
    model = SCHEMES["llama"].model()
    angles = torch.arange(CONTEXT)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
    model.register_buffer("cos", angles.cos().repeat(1, 2))
    model.register_buffer("sin", angles.sin().repeat(1, 2))
    return model


def test_rotary_table_of_the_whole_width_does_not_settle_one_head() -> None:
    """The rotation may come before the heads are split. An import once accepted one head because
    the check text favored it."""
    file = state_file(with_wide_table(WIDTH))
    found = recognize_file(file, RoleOptions(answers={"n_head": 1}))
    assert found.findings["n_head"].resolved
    with pytest.raises(ConvertError, match=r"rotates 32 channels, .* 4 heads of 8 .*--run-code"):
        recognize_file(file, RoleOptions(answers={"n_head": 4}))


def test_single_open_value_raises_a_question(trained: Trained) -> None:
    tensors = mapped(trained.model)
    alone = Finding(("sequential",), "only this can be computed", ambiguous=True)
    objective = text_objective(CheckText("words.txt", trained.token_ids), 24)
    with pytest.raises(OpenQuestions, match="--residual sequential") as refusal:
        resolve(tensors, findings(tensors) | {"residual": alone}, objective)
    assert refusal.value.fields == ("residual",)
