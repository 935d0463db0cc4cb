"""Facts about owners' classes, measured in this process."""

from pathlib import Path

import pytest
import torch

from logitd.model.owner_code.process.call import Caller
from logitd.model.owner_code.process.measure import measure
from logitd.model.owner_code.process.problem import Problem
from tests.model.owner_code import classes
from tests.model.owner_code.classes import CONTEXT, VOCABULARY, WIDTH, made

FILE = Path(classes.__file__)


def test_facts_of_a_causal_model() -> None:
    facts = measure(Caller(made("ResidualAttention")), FILE)
    assert (facts["rows"], facts["context_length"]) == (VOCABULARY, CONTEXT)
    assert (facts["not_causal"], facts["not_deterministic"]) == (0, 0)
    assert facts["padding"] < 1e-5
    assert facts["state"] is None
    assert str(FILE) in facts["files"]
    stages = {stage["name"]: (stage["shape"], stage["kind"]) for stage in facts["stages"]}
    assert stages["blocks.1"] == ([WIDTH], "Attention")
    assert stages["blocks.2.qkv"] == ([3 * WIDTH], "Linear")
    assert "place" not in stages  # its output has no axis of the batch


def test_hidden_states_are_not_taken_for_logits() -> None:
    """The hidden states come first and are wide enough; they were once served as logits."""
    model, ids = made("HiddenFirst"), torch.arange(6).view(2, 3)
    assert measure(Caller(model), FILE, context=8)["rows"] == VOCABULARY
    assert torch.equal(Caller(model).logits(ids, VOCABULARY), model(ids)[1])


def test_narrow_hidden_states_are_not_taken_for_logits() -> None:
    assert measure(Caller(made("TwoOutputs")), FILE, context=8)["rows"] == VOCABULARY


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("EqualOutputs", r"2 tensors with 29 elements .* --code-call 'model\(ids\)\[0\]'"),
        ("Probabilities", r"returns probabilities, .* --code-call 'model\(ids\).log\(\)'"),
        ("TimeFirst", r"not on earlier ids.* --code-call 'model\(ids.T\).transpose\(0, 1\)'"),
        ("WithoutLast", "contains no logits"),
    ],
)
def test_output_that_cannot_be_logits_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(Problem, match=sentence):
        measure(Caller(made(kind)), FILE, context=32)


def test_call_of_the_message_gives_logits() -> None:
    caller = Caller(made("TimeFirst"), expression="model(ids.T).transpose(0, 1)")
    ids = torch.arange(6).view(2, 3)
    expected = made("Recurrent")(ids)
    assert measure(caller, FILE, context=32)["padding"] < 1e-5
    assert torch.allclose(caller.logits(ids, VOCABULARY), expected, atol=1e-6)


def test_experts_that_see_some_tokens_are_no_stages() -> None:
    facts = measure(Caller(made("Mixture")), FILE)
    names = [stage["name"] for stage in facts["stages"]]
    assert "h.0.mlp" in names
    assert not [name for name in names if "experts" in name]


def test_model_that_returns_only_the_last_position_has_the_same_stages() -> None:
    every, last = (measure(Caller(made(kind)), FILE) for kind in ("Mixture", "LastOnly"))
    assert (every["only_last"], last["only_last"]) == (False, True)
    assert last["stages"] == every["stages"]
    lens = measure(Caller(made("LastOnly")), FILE, lens=("norm", "head"))
    assert lens["streams"] == ["h.0:input", "h.0", "h.1"]


def test_facts_of_models_that_break_a_rule() -> None:
    assert measure(Caller(made("Bidirectional")), FILE, context=64)["not_causal"] > 1e-3
    assert measure(Caller(made("Peeking")), FILE, context=64)["not_causal"] > 1e-3
    noisy = measure(Caller(made("Noisy")), FILE, context=64)
    assert not noisy["deterministic"]
    assert noisy["not_causal"] == 0  # each pass has the same seed
    assert measure(Caller(made("Remembering")), FILE, context=64)["state"] < 1e-5
    assert measure(Caller(made("Forgetful")), FILE, context=64)["state"] > 1e-2


@pytest.mark.parametrize(("asked", "found"), [(40, 40), (48, 48), (49, 48), (None, 48)])
def test_context_length_is_the_longest_that_works(asked: int | None, found: int) -> None:
    assert measure(Caller(made("Mixture")), FILE, context=asked)["context_length"] == found


def test_lens_reads_the_input_of_the_first_block_and_each_output() -> None:
    facts = measure(Caller(made("Mixture")), FILE, lens=("norm", "head"))
    assert facts["streams"] == ["h.0:input", "h.0", "h.1"]


@pytest.mark.parametrize(
    ("kind", "lens", "sentence"),
    [
        ("Mixture", ("norms", "head"), "--lens-norm is 'norms'; the model's submodules are embed"),
        ("Mixture", ("head", "norm"), r"norm\(head\(x\)\) fails, .*: RuntimeError"),
        (
            "ResidualAttention",
            ("norm", "head"),
            r"head\(norm\(x\)\), where x is the output of blocks.2, differs",
        ),
        ("Recurrent", ("gru", "head"), "the model has no numbered submodules"),
    ],
)
def test_invalid_lens_is_refused(kind: str, lens: tuple[str, str], sentence: str) -> None:
    with pytest.raises(Problem, match=sentence):
        measure(Caller(made(kind)), FILE, context=64, lens=lens)


def test_missing_argument_is_named_and_given_by_an_expression() -> None:
    model = made("Masked")
    with pytest.raises(Problem, match=r"needs `mask`: give the call with --code-call"):
        measure(Caller(model), FILE, context=64)
    caller = Caller(model, expression="model(ids, torch.ones_like(ids))")
    ids = torch.arange(6)[None]
    assert torch.equal(caller.logits(ids, VOCABULARY), made("Recurrent")(ids))
