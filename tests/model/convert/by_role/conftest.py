"""Fixtures: a textbook model that is trained once per session, and files with owners' code."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.convert.by_role.owner_code import OwnerCode, parse_owner_code
from tests.model.convert.by_role.owner_files import PARTS
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.lecture import Lecture

LETTERS = "abcdefgh "


def sums(words: int, seed: int) -> str:
    """Words of a small formal language: each has three random letters, then the same three in
    reverse."""
    draw = random.Random(seed)
    halves = ("".join(draw.choices(LETTERS[:8], k=3)) for _ in range(words))
    return " ".join(half + half[::-1] for half in halves)


def encode(text: str) -> Tensor:
    return torch.tensor([LETTERS.index(letter) for letter in text])


@dataclass(frozen=True)
class Trained:
    """A trained model, and a text in the same language that it was not trained on."""

    model: Lecture
    token_ids: list[int]


def train(model: Lecture, ids: Tensor, length: int, steps: int = 200) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 30, (steps - step) / 100)
        starts = torch.randint(0, len(ids) - length - 1, (16,), generator=generator)
        batch = torch.stack([ids[start : start + length + 1] for start in starts])
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="session")
def trained() -> Trained:
    """The model of `textbook/lecture.py` after 200 training steps. Its attention scores are divided
    by the square root of the whole width."""
    torch.manual_seed(3)
    model = Lecture(whole_width=True, vocab=len(LETTERS), width=32, heads=4, length=24)
    train(model, encode(sums(3000, seed=1)), 24)
    model.eval().requires_grad_(False)
    return Trained(model, encode(sums(200, seed=2)).tolist())


@pytest.fixture
def book() -> nn.Module:
    return SCHEMES["book"].model()


Write = Callable[..., OwnerCode]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write an owner's file and parse a `--code` argument that names it."""
    monkeypatch.chdir(tmp_path)

    def write(code: str, expression: str = "GPT") -> OwnerCode:
        (tmp_path / "gpt.py").write_text(PARTS + code, encoding="utf-8")
        return parse_owner_code(f"{tmp_path / 'gpt.py'}:{expression}")

    return write
