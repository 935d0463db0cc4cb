"""The report of an import: roles, values and their origins, changes to weights, and
alternatives."""

from typing import Any

import pytest

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.objective import LogitsObjective
from logitd.model.convert.by_role.read import (
    RoleOptions,
    read_by_role,
    recognize_file,
    table,
    understood,
)
from logitd.model.convert.by_role.resolution import Alternative, Resolution
from logitd.model.convert.by_role.resolve import resolve
from tests.model.convert.by_role.scheme import findings, given_logits, mapped, some_ids, state_file
from tests.model.convert.by_role.schemes import SCHEMES


def lines_of(name: str, **answers: Any) -> list[str]:
    """The lines of the report on a scheme, given the right answers."""
    scheme = SCHEMES[name]
    lines: list[str] = []
    file = state_file(scheme.model(), settings=scheme.settings)
    options = RoleOptions(answers=scheme.answers | answers)
    read_by_role(recognize_file(file, options), log=lines.append)
    return lines


def line(lines: list[str], begins: str, section: str = "computation:") -> str:
    """The only line of a section that begins with the given word and is not about a bias."""
    after = lines[lines.index(section) + 1 :]
    end = next((n for n, text in enumerate(after) if not text.startswith("  ")), len(after))
    words = [text.split() for text in after[:end]]
    (match,) = [" ".join(w) for w in words if w[0] == begins and w[1] != "bias"]
    return match


def test_every_role_has_its_line_with_name_and_shape() -> None:
    lines = lines_of("lecture")
    assert line(lines, "query", "tensors:") == "query blocks.{N}.sa.heads.{M}.query.weight [8, 32]"
    assert line(lines, "token_embedding", "tensors:").endswith(
        " token_embedding_table.weight [29, 32]"
    )
    shown = [" ".join(text.split()) for text in lines]
    assert "head bias lm_head.bias [29]" in shown
    assert "not weights blocks.0.sa.heads.0.tril and 7 more" in shown
    assert len([text for text in lines if "{N}" in text]) == 13


def test_every_number_has_its_value_and_its_origin() -> None:
    lines = lines_of("nanoGPT")
    assert line(lines, "n_head") == "n_head 4 --n-head"
    assert line(lines, "vocabulary") == "vocabulary 29 rows of the token embedding"
    assert line(lines, "n_layer") == "n_layer 2 running numbers in the names"
    assert line(lines, "d_ff") == "d_ff 128 columns of the feed-forward's second matrix"
    assert line(lines, "context_length") == "context_length 16 rows of the position table"
    assert line(lines, "tied_head").startswith("tied_head True the head is the embedding")
    assert line(lines, "norm_eps").startswith("norm_eps 1e-05 assumed: ")
    assert line(lines, "final_norm") == "final_norm yes --final-norm"
    assert line(lines, "causal").startswith("causal yes")
    assert lines[-1].startswith("not compared with the source")


@pytest.mark.parametrize("name", ["nanoGPT", "lecture", "llama2.c"])
def test_unused_fields_are_not_shown(name: str) -> None:
    rotary = name == "llama2.c"
    words = [text.split()[0] for text in lines_of(name)]
    assert ("rope_theta" in words) is rotary
    assert ("rotary_layout" in words) is rotary
    assert ("gate_order" in words) is rotary
    assert "qk_norm_eps" not in words


def test_identities_and_folds_are_lines() -> None:
    lines = lines_of("no second matrix")
    assert line(lines, "mlp_down", "tensors:") == "mlp_down none: the identity"
    assert line(lines, "attention_out", "tensors:") == "attention_out none: the identity"
    start = lines.index("changes of weights:")
    assert any("identity as the output projection" in text for text in lines[start:])
    assert "changes of weights:" not in lines_of("nanoGPT")


def test_alternatives_are_a_table() -> None:
    scheme = SCHEMES["heads with biases"]
    model, ids = scheme.model(), some_ids(2, 12)
    tensors = mapped(model)
    objective = LogitsObjective("its class", ids, given_logits(scheme, model, ids))
    resolution = resolve(tensors, findings(tensors), objective)
    lines = list(table(resolution))
    assert lines[0].startswith("compared (lower is better; chosen: ")
    (shown,) = [" ".join(text.split()) for text in lines if text.split()[0] == "activation"]
    assert shown.startswith("activation relu against ")
    for value in ("gelu", "gelu_tanh", "relu2"):
        assert f"{value} " in shown
    built = build(tensors, resolution.computation)
    whole = list(understood(tensors, built.config, resolution, built.folds))
    assert set(lines) <= set(whole)
    assert whole[-1] == f"verified: {resolution.verified}"


def test_table_marks_ties_and_begins_with_the_nearest() -> None:
    how = SCHEMES["nanoGPT"].computation
    others = [
        Alternative("activation", "relu", 2.5, True),
        Alternative("activation", "gelu_tanh", 2.00001, False),
        Alternative("final_norm", False, 9.0, True),
    ]
    resolution = Resolution(
        computation=how, origins={}, verified="x", penalty=2.0, alternatives=others
    )
    lines = [" ".join(text.split()) for text in table(resolution)]
    assert lines[1:] == [
        "activation gelu against gelu_tanh 2 (not distinguished), relu 2.5",
        "final_norm yes against no 9",
    ]


def test_shapes_are_those_of_the_file_not_of_the_model() -> None:
    lines = lines_of("matrices (in, out)")
    assert line(lines, "mlp_up", "tensors:").endswith("h.{N}.mlp.c_fc.weight [32, 128]")
