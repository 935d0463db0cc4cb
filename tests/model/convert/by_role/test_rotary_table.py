"""Rotary tables: theta is read from every form, and tables that no formula gives are refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.convert.by_role.finding import Finding
from logitd.model.convert.by_role.read import RoleOptions, read_by_role, recognize_file
from logitd.model.convert.by_role.rotary_table import RotaryTable, rotary_tables
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.state_file import StateFile
from tests.model.convert.by_role.scheme import state_file
from tests.model.convert.by_role.schemes import SCHEMES

RATES = 500_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
ANGLES = torch.outer(torch.arange(32, dtype=torch.float64), RATES)


def table(name: str, values: Tensor) -> RotaryTable:
    (found,) = rotary_tables({name: values})
    return found


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("freqs", RATES.float()),
        ("rope.theta", RATES.float()),
        ("inv_freq", RATES.bfloat16()),
        ("freqs", ANGLES.float()),
        ("angles", torch.cat((ANGLES, ANGLES), 1).float()),
        ("sin_cached", ANGLES.sin().float()),
        ("freqs_cis", torch.stack((ANGLES.cos(), ANGLES.sin()), 2).float()),
        ("pos_cis", torch.polar(torch.ones_like(ANGLES), ANGLES)),
    ],
)
def test_every_form_shows_theta(name: str, values: Tensor) -> None:
    assert table(name, values).theta == pytest.approx(500_000.0, rel=1e-9)


def test_theta_keeps_the_digits_that_the_table_has() -> None:
    """It was rounded to 10,000."""
    rates = 10_012.0 ** (-torch.arange(32) / 32)
    assert table("inv_freq", rates).theta == pytest.approx(10_012.0, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("inv_freq", RATES.float() / 4),
        ("inv_freq", torch.cat((RATES[:2], RATES[2:] / 8)).float()),
        ("freqs", RATES.float() * 1.5),
        ("cos", (ANGLES / 4).cos().float()),
        ("cos", 1.2 * ANGLES.cos().float()),
        ("sin", (ANGLES * 2).sin().float()),
        ("freqs", ANGLES.float() * 3),
        ("freqs_cis", torch.polar(torch.ones_like(ANGLES), ANGLES / 4)),
        ("theta", torch.rand(32)),
        ("rope_cache", torch.rand(2, 32, 4)),
    ],
)
def test_scaled_and_strange_tables_are_refused(name: str, values: Tensor) -> None:
    """A scaled list of frequencies was ignored, and theta assumed to be 10,000."""
    with pytest.raises(
        ConvertError, match=rf"^{name} has the name of a rotary table, but .*--code"
    ):
        _ = table(name, values).theta


def with_tables(settings: dict[str, Any] | None = None, **tables: Tensor) -> StateFile:
    file = state_file(SCHEMES["llama"].model(), settings=settings)
    named = {f"rope.{name}": values for name, values in tables.items()}
    return StateFile(file.path, file.where, {**file.tensors, **named}, None, file.settings)


def findings(file: StateFile, **answers: Any) -> Any:
    return recognize_file(file, RoleOptions(answers=answers)).findings


def test_tables_of_different_theta_are_refused() -> None:
    """The first table decided for all layers."""
    other = 10_000.0 ** (-torch.arange(4) / 4)
    file = with_tables(inv_freq=RATES.float(), local_inv_freq=other)
    with pytest.raises(ConvertError, match=r"rope\.inv_freq .* 500000, and rope\.local_.* 10000"):
        findings(file)


def test_table_that_differs_from_the_stated_theta_is_a_question() -> None:
    file = with_tables({"rope_theta": 10_000.0}, inv_freq=RATES.float())
    found: Finding = findings(file)["rope_theta"]
    assert (found.values, found.ambiguous) == ((500_000.0, 10_000.0), True)
    file = with_tables({"rope_theta": 500_000}, inv_freq=RATES.float())
    assert findings(file)["rope_theta"].values == (500_000.0,)


def test_table_alone_does_not_prove_the_number_of_heads() -> None:
    """It may rotate a part of each head."""
    found: Finding = findings(with_tables(inv_freq=RATES.float()))["n_head"]
    assert (found.values, found.ambiguous) == ((4, 2), True)


def test_table_narrower_than_a_head_is_refused() -> None:
    """The whole head was rotated."""
    sentence = r"rope\.inv_freq rotates 8 channels, .* 2 heads of 16 channels \(--n-head\)"
    with pytest.raises(ConvertError, match=sentence):
        findings(with_tables(inv_freq=RATES.float()), n_head=2)


def test_number_of_heads_that_a_text_chose_is_compared_with_the_table() -> None:
    scheme = SCHEMES["llama"]
    file = with_tables(dict(scheme.settings), inv_freq=5_000.0 ** (-torch.arange(4) / 4))
    recognized = recognize_file(file, RoleOptions(answers=scheme.answers))
    read_by_role(recognized)
    other = dict(recognized.findings, n_head=Finding((2,), "a text"))
    with pytest.raises(ConvertError, match=r"rotates 8 channels, .* 2 heads .* \(a text\)"):
        read_by_role(replace(recognized, findings=other))


def test_stacked_pairs_do_not_show_the_layout() -> None:
    pairs = torch.stack((ANGLES.cos(), ANGLES.sin()), 2).float()
    assert findings(with_tables(freqs_cis=pairs))["rotary_layout"].ambiguous


def test_learned_table_next_to_a_rotary_one_is_a_question() -> None:
    """The learned table was added, and nothing rotated."""
    file = state_file(SCHEMES["nanoGPT"].model())
    tensors = {**file.tensors, "inv_freq": RATES.float()}
    found: Finding = findings(StateFile(file.path, file.where, tensors))["positions"]
    assert (found.values, found.ambiguous) == (("learned", "rotary"), True)
    assert re.search(r"wpe\.weight .* also the rotary table inv_freq", found.origin)
