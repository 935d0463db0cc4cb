"""The owner's own code as the judge of what names do not say: classes, configurations and
scripts as people write them.

Most tests call the functions of the process in this one; those of what only a process of its own
has (network, time, its end) start it.
"""

import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.convert.by_role import owner_process
from model.convert.by_role.owner_code import (
    OwnerCode,
    _known_shape,
    _known_values,
    owner_logits,
    parse_owner_code,
)
from model.convert.by_role.owner_process import Problem, build_model, run
from model.convert.by_role.read import RoleOptions, read_by_role, recognise_file
from model.convert.foreign import ConvertError
from tests.model.convert.by_role.scheme import (
    findings,
    given_logits,
    largest_difference,
    mapped,
    state_file,
)
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.book import Book

PARTS = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.W_query = nn.Linear(width, width, bias=False)
        self.W_key = nn.Linear(width, width, bias=False)
        self.W_value = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).triu(1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, -1).transpose(1, 2)
            for f in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(C // self.heads)
        if CAUSAL:
            scores = scores.masked_fill(self.mask[:T, :T].bool(), -torch.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.att, self.ff = Attention(width, heads, length), FeedForward(width)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Base(nn.Module):
    def build(self, vocab, length, width, heads, layers):
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.trf_blocks = nn.Sequential(*[Block(width, heads, length) for _ in range(layers)])
        self.final_norm = Norm(width)
        self.out_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


CAUSAL = True
"""
"""The book's model with its parts, for the files below to build on."""

BY_NAMES = """
class GPT(Base):
    def __init__(self, vocab_size, block_size, n_embd, n_head=4, n_layer=2, dropout=0.5):
        super().__init__()
        assert dropout == 0.0, "evaluation"
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)
"""

DATACLASS = """
from dataclasses import dataclass


@dataclass
class GPTConfig:
    vocab_size: int = 50_000
    max_seq_len: int = 1024
    hidden_size: int = 768
    num_attention_heads: int = 4
    num_hidden_layers: int = 12


class GPT(Base):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.build(config.vocab_size, config.max_seq_len, config.hidden_size,
                   config.num_attention_heads, config.num_hidden_layers)
"""

DICTIONARY = """
class GPT(Base):
    def __init__(self, cfg):
        super().__init__()
        self.build(cfg["vocab_size"], cfg["context_length"], cfg["emb_dim"], cfg["n_heads"],
                   cfg["n_layers"])
"""

ATTRIBUTES = """
class Config:
    d_model = 768
    n_heads = 12

    def __init__(self, vocab_size, max_len=512, num_layers=12):
        self.vocab_size, self.max_len, self.num_layers = vocab_size, max_len, num_layers


class GPT(Base):
    def __init__(self, args):
        super().__init__()
        self.build(args.vocab_size, args.max_len, args.d_model, args.n_heads, args.num_layers)
"""

SCRIPT = """
batch_size = 64
block_size = 16
n_embd = 32
n_head = 4
n_layer = 2
device = "cuda" if torch.cuda.is_available() else "cpu"

with open("input-that-is-gone.txt") as f:
    text = f.read()
chars = sorted(set(text))
vocab_size = len(chars)
stoi = {c: i for i, c in enumerate(chars)}
encode = lambda s: [stoi[c] for c in s]
data = torch.tensor(encode(text))


class GPT(Base):
    def __init__(self):
        super().__init__()
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)


model = GPT().to(device)
open("training-has-begun", "w").write("x")
for step in range(10):
    open("training-has-begun", "w").write("x")
    model(data[:4])
torch.save(model.state_dict(), "overwritten.pt")
if __name__ == "__main__":
    open("training-has-begun", "w").write("x")
"""

STALE_SCRIPT = """
block_size, n_layer = 256, 6
n_embd = 384
n_head = 4
vocab_size = 65


class GPT(Base):
    def __init__(self):
        super().__init__()
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)
"""

SETTINGS = {"n_heads": 4}


@pytest.fixture(autouse=True)
def untouched_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner's file puts on the path and among the modules goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "gpt", raising=False)


@pytest.fixture
def book() -> Book:
    model = SCHEMES["book"].model()
    assert isinstance(model, Book)
    return model


Write = Callable[..., OwnerCode]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write an owner's file, and name what is in it."""
    monkeypatch.chdir(tmp_path)

    def write(code: str, expression: str = "GPT") -> OwnerCode:
        (tmp_path / "gpt.py").write_text(PARTS + code, encoding="utf-8")
        return parse_owner_code(f"{tmp_path / 'gpt.py'}:{expression}")

    return write


def request(
    code: OwnerCode, model: torch.nn.Module, settings: Mapping[str, Any] = SETTINGS
) -> dict[str, Any]:
    """What the process is asked."""
    tensors = mapped(model)
    said = findings(tensors, settings)
    return {
        "file": str(code.file),
        "expression": code.expression,
        "values": _known_values(tensors, said, settings),
        "shape": _known_shape(tensors, said),
        "rows": tensors.shape("token_embedding")[0],
        "length": 12,
    }


def logits_here(
    code: OwnerCode, model: torch.nn.Module, settings: Mapping[str, Any] = SETTINGS
) -> tuple[Tensor, Tensor]:
    """Ids and the logits of the owner's model, computed in this process."""
    asked = request(code, model, settings)
    made = build_model(asked, mapped(model).tensors)
    assert not made.training
    token_ids, logits, _ = run(made, asked["rows"], asked["length"])
    return token_ids, logits


@pytest.mark.parametrize(
    "code",
    [BY_NAMES, DATACLASS, DICTIONARY, SCRIPT, STALE_SCRIPT],
    ids=["by names", "dataclass", "dictionary", "script", "another run's values"],
)
def test_a_class_is_made_with_what_is_known(code: str, write: Write, book: Book) -> None:
    ids, logits = logits_here(write(code), book)
    assert ids.shape == (2, 12)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5
    assert not Path("training-has-begun").exists()
    assert not Path("overwritten.pt").exists()


def test_a_configuration_class_without_dataclass_is_filled(write: Write, book: Book) -> None:
    ids, logits = logits_here(write(ATTRIBUTES), book)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


@pytest.mark.parametrize(
    "expression",
    [
        "GPT(29, 16, 32, n_head=4, dropout=0.0)",
        "make()",
        "make",
        "GPT(vocab_size, block_size, d_model, n_heads, dropout=0.0)",
        "[GPT(29, 16, 32, dropout=0.0)][0]",
    ],
)
def test_an_expression_makes_the_model(expression: str, write: Write, book: Book) -> None:
    code = BY_NAMES + "\n\ndef make():\n    return GPT(29, 16, 32, dropout=0.0)\n"
    ids, logits = logits_here(write(code, expression), book)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


def test_a_number_of_heads_that_is_not_in_the_file_is_the_codes_own(
    write: Write, book: Book
) -> None:
    """The default of its class, or of the script: nobody said another."""
    ids, logits = logits_here(write(BY_NAMES), book, {})
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


def test_modules_beside_the_file_are_imported(
    write: Write, book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pieces_of_gpt", raising=False)
    (tmp_path / "pieces_of_gpt.py").write_text(PARTS + DICTIONARY, encoding="utf-8")
    code = write("from pieces_of_gpt import GPT as Ours\n\n\nclass GPT(Ours):\n    pass\n")
    ids, logits = logits_here(code, book)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


FORWARDS = {
    "a tuple": "return super().forward(ids), None",
    "a dictionary": "return {'loss': None, 'logits': super().forward(ids)}",
    "an object": "return type('Output', (), {'logits': super().forward(ids)})()",
    "a list with the state first": "return [ids.float()[..., None].expand(-1, -1, 5), "
                                   "super().forward(ids)]",
    "the last position": "return super().forward(ids)[:, -1:], None",
    "the last position without its axis": "return super().forward(ids)[:, -1]",
    "positions in one axis": "return super().forward(ids).flatten(0, 1)",
    "padded rows": "return F.pad(super().forward(ids), (0, 35))",
    "float64": "return super().forward(ids).double()",
}  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_logits_are_found_in_what_a_forward_gives(forward: str, write: Write, book: Book) -> None:
    code = DICTIONARY + f"\n    def forward(self, ids, targets=None):\n        {forward}\n"
    ids, logits = logits_here(write(code), book)
    assert logits.dtype == torch.float32
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


def test_a_forward_that_wants_targets_is_given_some(write: Write, book: Book) -> None:
    code = DICTIONARY + (
        "\n    def forward(self, ids, targets):\n"
        "        logits = super().forward(ids)\n"
        "        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
    )
    ids, logits = logits_here(write(code), book)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


def test_a_state_dict_of_a_part_is_loaded_into_that_part(write: Write, book: Book) -> None:
    """The file has the names of what is inside a wrapper."""
    code = DICTIONARY + (
        "\n\nclass Wrapped(nn.Module):\n"
        "    def __init__(self, cfg):\n        super().__init__()\n        self.gpt = GPT(cfg)\n"
        "    def forward(self, ids):\n        return self.gpt(ids)\n"
    )
    ids, logits = logits_here(write(code, "Wrapped"), book)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5


PROBLEMS: dict[str, tuple[str, str, str]] = {
    "a parameter that nobody knows": (
        "class GPT(Base):\n    def __init__(self, vocab_size, temper):\n        pass\n", "GPT",
        r"GPT needs 'temper', which the checkpoint does not say: give an expression .*"
        r"'GPT\(\.\.\., temper=\.\.\.\)'",
    ),
    "a name that is not there": (BY_NAMES, "Gpt", r"NameError: name 'Gpt' .* give an expression"),
    "not a module": ("GPT = 3\n", "GPT", "gives a int; expected a torch module"),
    "a key that nobody knows": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        cfg['temper']\n", "GPT",
        r"KeyError: 'temper'\. .* give an expression that makes the model",
    ),
    "other weights": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 32, 4, 3)\n", "GPT",
        r"do not have the same tensors: it lacks \['trf_blocks\.2\.",
    ),
    "too few layers": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 32, 4, 1)\n", "GPT",
        r"the model does not know \['trf_blocks\.1\.",
    ),
    "other shapes": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 64, 4, 2)\n", "GPT",
        r"the weights do not fit the owner's model: .*size mismatch",
    ),
    "a forward that fails": (
        DICTIONARY + "\n    def forward(self, ids):\n        raise RuntimeError('out of order')\n",
        "GPT", r"its forward failed on ids of shape \[2, 12\]: RuntimeError: out of order",
    ),
    "a forward that fails with a type error": (
        DICTIONARY + "\n    def forward(self, ids):\n        return ids + 'x'\n",
        "GPT", r"its forward failed on ids of shape \[2, 12\]: TypeError: ",
    ),
    "a forward without logits": (
        DICTIONARY + "\n    def forward(self, ids):\n        return ids\n", "GPT",
        "its forward gives a Tensor without logits of 29 ids",
    ),
    "a class that cannot be defined": (
        "class GPT(Bass):\n    pass\n", "GPT",
        r"GPT in gpt\.py, line \d+, cannot be defined: NameError: name 'Bass'",
    ),
    "not Python": ("class GPT(:\n", "GPT", r"gpt\.py is not Python that this interpreter reads"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "expression", "sentence"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_what_stands_in_the_way_is_said(
    code: str, expression: str, sentence: str, write: Write, book: Book
) -> None:
    with pytest.raises(Problem) as refusal:
        logits_here(write(code, expression), book)
    assert re.search(sentence, str(refusal.value), re.DOTALL)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpt.py", r"--code is 'gpt\.py'; expected FILE\.py:NAME"),
        ("gpt.py:", r"--code is 'gpt\.py:'; expected"),
        ("gpt:GPT", "expected FILE"),
        ("gone.py:GPT", r"gone\.py is not a file; expected --code FILE\.py:NAME"),
    ],
)
def test_code_is_a_file_and_a_name(text: str, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence):
        parse_owner_code(text)


def test_an_expression_may_hold_colons(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").touch()
    code = parse_owner_code(f"{tmp_path}/gpt.py: GPT({{'n_head': 4}}) ")
    assert (code.file.name, code.expression) == ("gpt.py", "GPT({'n_head': 4})")
    assert str(code) == "gpt.py:GPT({'n_head': 4})"


# In a process of its own.


def test_the_owners_code_settles_everything(write: Write) -> None:
    """The lecture's script beside the file of its model: nothing is asked, no loop is run."""
    scheme = SCHEMES["book"]
    model = scheme.model(seed=2)
    code = write(SCRIPT)
    options = RoleOptions(code=f"{code.file}:{code.expression}")
    read = read_by_role(recognise_file(state_file(model), options))
    assert read.config.activation == "gelu_tanh"
    assert (read.config.n_head, read.config.final_norm) == (4, True)
    assert "logits of gpt.py:GPT on random ids" in read.facts["verified"]
    assert not (code.file.parent / "training-has-begun").exists()


def test_a_model_without_a_mask_is_refused_by_its_code(write: Write, book: Book) -> None:
    code, tensors = (
        write(DICTIONARY.replace("class GPT", "CAUSAL = False\n\n\nclass GPT")),
        mapped(book),
    )
    sentence = r"another last id changes the logits of earlier positions .* it has no causal mask"
    with pytest.raises(ConvertError, match=rf"gpt\.py:GPT: {sentence}"):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS)


def test_the_owners_code_has_no_network(write: Write, book: Book) -> None:
    """A real listener on this machine is not reached, by name or by address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        code = write(
            "import socket\n\n\nclass GPT(Base):\n    def __init__(self, cfg):\n"
            f"        socket.create_connection(('127.0.0.1', {port}))\n"
        )
        tensors = mapped(book)
        with pytest.raises(ConvertError, match=r"gpt\.py:GPT: PermissionError: no network here"):
            owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_code_that_does_not_end_is_stopped(write: Write, book: Book) -> None:
    tensors = mapped(book)
    code = write("class GPT(Base):\n    def __init__(self, cfg):\n        while True: pass\n")
    with pytest.raises(ConvertError, match=r"gpt\.py:GPT did not give logits within 3 seconds"):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS, timeout=3)


def test_a_process_that_dies_is_said_with_its_last_words(write: Write, book: Book) -> None:
    tensors = mapped(book)
    code = write(
        "class GPT(Base):\n    def __init__(self, cfg):\n"
        "        import os, sys\n        print('no memory left', file=sys.stderr, flush=True)\n"
        "        os._exit(9)\n"
    )
    with pytest.raises(ConvertError, match=r"gpt\.py:GPT ended with status 9 .* no memory left"):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS)


def test_the_process_imports_nothing_of_this_project() -> None:
    """It runs beside the owner's modules, which may have the same names."""
    source = Path(owner_process.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (model|service|logitd)\b", source, re.MULTILINE)
