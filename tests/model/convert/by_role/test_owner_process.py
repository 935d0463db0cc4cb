"""The process that runs the owner's code: it builds the model, loads its weights and finds its
logits.

These tests call its functions directly; `test_owner_code.py` tests a real process (network, time,
exit status).
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitd.model.convert.by_role.owner_code import (
    OwnerCode,
    assumed_defaults,
    request_of,
    require_one_eps,
    said_in,
    unpassed_in,
)
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.owner_code.process.build import build_model
from logitd.model.owner_code.process.call import Caller, compare, compare_late
from logitd.model.owner_code.process.problem import Problem
from tests.model.convert.by_role.conftest import Write
from tests.model.convert.by_role.owner_files import (
    ATTRIBUTES,
    BY_NAMES,
    DATACLASS,
    DICTIONARY,
    FLAGS,
    PARTS,
    SCRIPT,
    STALE_SCRIPT,
)
from tests.model.convert.by_role.scheme import (
    findings,
    given_logits,
    largest_difference,
    mapped,
)
from tests.model.convert.by_role.schemes import SCHEMES

SETTINGS = {"n_heads": 4}


@pytest.fixture(autouse=True)
def untouched_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments as in the process. After the test, remove the import paths, finders and modules
    that an owner's file added."""
    monkeypatch.setattr(sys, "argv", ["gpt.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "gpt", raising=False)


def logits_here(
    code: OwnerCode, model: nn.Module, settings: Mapping[str, Any] = SETTINGS
) -> tuple[Tensor, Tensor]:
    """Token ids, and the logits of the owner's model for them, computed in this process."""
    tensors = mapped(model)
    request = request_of(code, tensors, findings(tensors, settings), settings)
    built = build_model(request, tensors.tensors)
    assert not built.model.training
    rows = tensors.shape("token_embedding")[0]
    token_ids, logits, _ = compare(Caller(built.model, built.module, request.call), rows, 12)
    return token_ids, logits


def check_logits(
    code: OwnerCode, book: nn.Module, settings: Mapping[str, Any] = SETTINGS
) -> tuple[Tensor, Tensor]:
    """Compare the logits of the owner's model with the logits of the textbook model `book`."""
    ids, logits = logits_here(code, book, settings)
    assert largest_difference(logits, given_logits(SCHEMES["book"], book, ids)) < 1e-5
    return ids, logits


@pytest.mark.parametrize(("longest", "length"), [(0, 3), (10, 10), (100, 12)])
def test_long_sequence_ends_at_the_limit_of_the_model(longest: int, length: int) -> None:
    """The model has a table of 20 positions, and the length doubles."""
    model = nn.Sequential(nn.Embedding(7, 20), Limited(20))
    ids, late = compare_late(Caller(model), 7, 3, longest)
    assert ids.shape == (1, length)
    assert torch.equal(late, model(ids)[:, -4:, :7])


@pytest.mark.parametrize(
    ("rows", "expected"), [(1000, [500, 0, 1, 999, 998]), (3, [1, 0, 1, 2, 1])]
)
def test_compared_ids_include_the_first_and_the_last(rows: int, expected: list[int]) -> None:
    model = nn.Sequential(nn.Embedding(rows, rows), Limited(5))
    ids, logits, _ = compare(Caller(model), rows, 5)
    assert ids[2].tolist() == expected
    assert torch.equal(logits, model(ids))


class Padded(nn.Module):
    """Adds up the embeddings of earlier ids, except of padding. Each position sees itself."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.embed, self.padding = nn.Embedding(1000, 1000), padding

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        seen = x.masked_fill((ids == self.padding)[..., None], 0)
        return seen.cumsum(1) - seen + x


@pytest.mark.parametrize("padding", [0, 999, 400, 419])
def test_compared_ids_show_masked_padding(padding: int) -> None:
    """The last id was at the last position, whose mask no other position shows."""
    model = Padded(padding)
    ids, logits, _ = compare(Caller(model), 1000, 24, named=range(400, 420))
    assert not torch.allclose(logits, model.embed(ids).cumsum(1), atol=1e-3)


class Documents(Padded):
    """Adds up the embeddings of the ids of the same document. An end of text begins the next."""

    def forward(self, ids: Tensor) -> Tensor:
        document = (ids == self.padding).cumsum(1)
        same = document[:, :, None] == document[:, None]
        x: Tensor = same.tril().float() @ self.embed(ids)
        return x


@pytest.mark.parametrize("end", [0, 999, 400, 419])
def test_compared_ids_show_where_attention_begins_anew(end: int) -> None:
    """The named id was at the first position, which sees no earlier one."""
    model = Documents(end)
    ids, logits, _ = compare(Caller(model), 1000, 24, named=range(400, 420))
    assert not torch.allclose(logits, model.embed(ids).cumsum(1), atol=1e-3)


@pytest.mark.parametrize("text", ["", ", pad_id=7, eos_id=99"], ids=["setting", "default"])
def test_ids_of_special_tokens_are_named(text: str, write: Write, book: nn.Module) -> None:
    tensors = mapped(book)
    settings = SETTINGS | ({} if text else {"pad_id": 7})
    code = write(BY_NAMES.replace("n_layer=2", f"n_layer=2{text}"))
    request = request_of(code, tensors, findings(tensors, settings), settings)
    assert build_model(request, tensors.tensors).named_ids(29)[0] == 7


def test_numbers_in_the_code_are_named(write: Write, book: nn.Module) -> None:
    """An end of text that only a constant of the owner's file names was not compared."""
    tensors = mapped(book)
    code = write(f"{BY_NAMES}\nEOT, WIDTH, RATE, BITS, OTHER = 2_3, 50_304, 3.17, 0x1b, 19\n")
    request = request_of(code, tensors, findings(tensors, SETTINGS), SETTINGS)
    named = build_model(request, tensors.tensors).named_ids(29)
    assert {19, 23} <= set(named)
    assert 17 not in named
    assert max(named) < 29


class Limited(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= self.length
        return x.cumsum(1)


def kept_by(
    code: OwnerCode, book: nn.Module, settings: Mapping[str, Any], **answers: Any
) -> dict[str, Any]:
    """The code's own values that nothing replaces. Raises OpenQuestions if its eps and the eps of
    the settings differ."""
    tensors = mapped(book)
    found = findings(tensors, settings, **answers)
    request = request_of(code, tensors, found, settings)
    kept = build_model(request, tensors.tensors).attempt.kept
    require_one_eps(code, request, kept)
    return kept


SMALL_DATACLASS = DATACLASS.replace("768", "32").replace("int = 12", "int = 2")
SMALL_ATTRIBUTES = ATTRIBUTES.replace("768", "32").replace("=12", "=2")
EPS_OF_THE_CODE = {
    "parameter": BY_NAMES.replace("n_layer=2", "n_layer=2, eps=1e-6"),
    "another name": BY_NAMES.replace("n_layer=2", "n_layer=2, norm_eps=1e-6"),
    "dataclass": SMALL_DATACLASS.replace("int = 2", "int = 2\n    layer_norm_eps: float = 1e-6"),
    "attribute": SMALL_ATTRIBUTES.replace("n_heads = 12", "n_heads = 12\n    eps = 1e-6"),
    "dictionary": DICTIONARY.replace("super()", "cfg.get('eps', 1e-6)\n        super()"),
    "variable": SCRIPT.replace("n_layer = 2", "n_layer = 2\neps = 1e-6").replace(
        "super()", "self.eps = eps\n        super()"
    ),
}


@pytest.mark.parametrize("code", EPS_OF_THE_CODE.values(), ids=EPS_OF_THE_CODE)
def test_eps_of_the_code_and_of_an_optimizer_are_a_question(
    code: str, write: Write, book: nn.Module
) -> None:
    """The optimizer's eps once replaced the default of the class, and every comparison agreed."""
    settings = SETTINGS | {"eps": 1e-8}
    with pytest.raises(OpenQuestions, match=r"--norm-eps 1e-06\|1e-08 ") as caught:
        kept_by(write(code), book, settings)
    assert caught.value.fields == ("norm_eps",)
    kept_by(write(code), book, settings, norm_eps=1e-6)
    kept_by(write(code), book, SETTINGS | {"eps": 1e-6})
    kept_by(write(code), book, settings | {"norm_eps": 1e-5})


def test_parameter_without_a_default_gets_the_only_eps(write: Write, book: nn.Module) -> None:
    code = BY_NAMES.replace("n_embd, n_head=4", "n_embd, eps, n_head=4").replace(
        "assert", "assert eps == 1e-8 and"
    )
    assert "eps" not in kept_by(write(code), book, SETTINGS | {"eps": 1e-8})
    assert not {"eps", "norm_eps"} & said_in({"eps": 1e-8}, {}).keys()


def test_keywords_that_the_class_reads_are_given(write: Write, book: nn.Module) -> None:
    """The class once got none of them, and computed with its defaults."""
    text = BY_NAMES.replace("n_head=4, n_layer=2, dropout=0.5", "**rest")
    text = text.replace("n_head, n_layer", "rest.get('heads', 8), rest['n_layers']")
    text = text.replace("dropout ==", "rest.pop('dropout', 0.1) ==")
    code = write(text)
    check_logits(code, book, {"n_heads": 4, "n_layers": 2})
    assert kept_by(code, book, {"n_layers": 2})["heads"] == 8


STRUCTURED: dict[str, Any] = {
    "window_sizes": [4, 16],
    "extra": {"window": 4, "Names": ["a", {"b": 1.5}], "dropout": 0.5},
    "cap": None,
    "attention": "local",
}
CHECKED = """
        expected = {"window": 4, "Names": ["a", {"b": 1.5}], "dropout": 0.0}
        assert WINDOWS == SIZES and EXTRA == expected
        assert (CAP, ATTENTION) == (None, "local")
"""
FIELDS = ("window_sizes", "extra", "cap", "attention")
OWN = ("(1, 2)", "None", "30.0", '"full"')
"""The defaults of the fields in the owner's code, which the checkpoint contradicts."""


def checking(code: str, fields: Sequence[str], sizes: str = "(4, 16)") -> str:
    """The code with a check of the values of the fields, which are the given expressions."""
    check = CHECKED.replace("SIZES", sizes)
    for name, expression in zip(("WINDOWS", "EXTRA", "CAP", "ATTENTION"), fields, strict=True):
        check = check.replace(name, expression)
    return code.replace("        super()", f"{check}        super()")


def after(line: str, form: str) -> str:
    """The line, followed by a declaration of each field."""
    return line + "".join(form.format(*pair) for pair in zip(FIELDS, OWN, strict=True))


OF_ANY_TYPE = {
    "parameter": checking(BY_NAMES.replace("n_layer=2", after("n_layer=2", ", {}={}")), FIELDS),
    "dataclass": checking(
        SMALL_DATACLASS.replace("int = 2\n", after("int = 2\n", "    {}: object = {}\n")),
        [f"config.{name}" for name in FIELDS],
    ),
    "attribute": checking(
        SMALL_ATTRIBUTES.replace("= 12\n", after("= 12\n", "    {} = {}\n"), 1),
        [f"args.{name}" for name in FIELDS],
    ),
    "getattr": checking(
        SMALL_DATACLASS,
        [f"getattr(config, {n!r}, {v})" for n, v in zip(FIELDS, OWN, strict=True)],
        "[4, 16]",
    ),
    "dictionary": checking(DICTIONARY, [f"cfg.get({name!r}, 1)" for name in FIELDS], "[4, 16]"),
    "keywords": checking(
        BY_NAMES.replace("=0.5", "=0.5, **rest"),
        [f"rest[{name!r}]" for name in FIELDS],
        "[4, 16]",
    ),
    "variable": checking(
        SCRIPT.replace("n_layer = 2\n", after("n_layer = 2\n", "{} = {}\n")), FIELDS
    ),
}
REFUSED = [name for name in OF_ANY_TYPE if name != "variable"]
"""A variable may have any value, because the script that created the checkpoint sets it."""


@pytest.mark.parametrize("code", OF_ANY_TYPE.values(), ids=OF_ANY_TYPE)
def test_values_of_any_type_are_given(code: str, write: Write, book: nn.Module) -> None:
    """Only numbers, flags and texts were, and the class computed with its defaults."""
    check_logits(write(code), book, SETTINGS | STRUCTURED)


def test_dictionary_becomes_an_object_of_its_configuration_class(
    write: Write, book: nn.Module
) -> None:
    """Two parts of the configuration have the same key."""
    part = "@dataclass\nclass Part:\n    kind: str = 'x'\n    size: int = 3\n\n\n"
    code = SMALL_DATACLASS.replace("@dataclass", f"{part}@dataclass").replace(
        "int = 2", "int = 2\n    attn: Part = None\n    mlp: Part = None"
    )
    check = "        assert (config.attn, config.mlp) == (Part('a', 3), Part('b', 5))\n"
    settings = SETTINGS | {"attn": {"kind": "a"}, "mlp": {"kind": "b", "size": 5}}
    check_logits(write(code.replace("        super()", f"{check}        super()")), book, settings)


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_cannot_be_given_is_refused(name: str, write: Write, book: nn.Module) -> None:
    code = OF_ANY_TYPE[name].replace("assert", "_ =")
    settings = SETTINGS | STRUCTURED | {"extra": {"scales": torch.ones(2)}, "dtype": torch.half}
    sentence = r"reads 'extra', but .* \(a tensor of shape \[2\]\)\. .*'GPT\(\.\.\., extra="
    with pytest.raises(Problem, match=sentence):
        logits_here(write(code), book, settings)


def test_value_that_the_code_does_not_read_is_not_refused(write: Write, book: nn.Module) -> None:
    check_logits(write(BY_NAMES), book, SETTINGS | {"scales": {3: 1}, "extra": b"bytes"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: 2}, "a dictionary with keys that are not texts"),
        ([{"a": torch.ones(2, 3)}], "a tensor of shape [2, 3]"),
        (b"x", "a value of type bytes"),
        ([0] * 2**18, "a value of 786,432 bytes, more than 262,144"),
        ([0] * (2**18 + 1), "a value with 262,145 elements"),
        (json.loads("[" * 17 + "]" * 17), "a value with more than 16 levels"),
    ],
)
def test_values_that_cannot_be_given_are_described(value: Any, text: str) -> None:
    assert unpassed_in({"Extra": value, "betas": value, "dtype": torch.half}) == {"extra": text}
    assert "extra" not in said_in({"Extra": value}, {})


def test_defaults_that_nothing_confirms_are_named(write: Write, book: nn.Module) -> None:
    """The tensors show the width and the layers, but not the heads."""
    for text in (BY_NAMES, SMALL_DATACLASS):
        code = write(text)
        assert "n_heads=" not in assumed_defaults(code, kept_by(code, book, SETTINGS))
        assert re.match(
            r"assumed from the defaults of gpt\.py:GPT: (n_head|num_attention_heads)=4\. ",
            assumed_defaults(code, kept_by(code, book, {})),
        )
        assert assumed_defaults(code, kept_by(code, book, {}, n_head=4)) == ""
    code = write(DICTIONARY.replace('["n_heads"]', '.get("n_heads", 4)'))
    assert "of gpt.py:GPT: n_heads=4." in assumed_defaults(code, kept_by(code, book, {}))
    code = write(DICTIONARY.replace('cfg["n_heads"]', "getattr(cfg, 'n_heads', 4)"))
    assert "of gpt.py:GPT: n_heads=4." in assumed_defaults(code, kept_by(code, book, {}))
    assert assumed_defaults(code, kept_by(code, book, SETTINGS)) == ""
    code = write(BY_NAMES.replace("n_layer=2", "n_layer=2, window_sizes=(4, 16)"))
    assert "GPT: window_sizes=[4, 16]." in assumed_defaults(code, kept_by(code, book, SETTINGS))
    script = write(SCRIPT)
    assert assumed_defaults(script, kept_by(script, book, {})) == ""


@pytest.mark.parametrize(
    "code",
    [BY_NAMES, DATACLASS, DICTIONARY, ATTRIBUTES, SCRIPT, STALE_SCRIPT, FLAGS],
    ids=[
        "names",
        "dataclass",
        "dictionary",
        "attributes",
        "script",
        "another run's values",
        "flags",
    ],
)
def test_class_is_made_with_known_arguments(code: str, write: Write, book: nn.Module) -> None:
    ids, _ = check_logits(write(code), book)
    assert ids.shape == (3, 12)
    assert not Path("training-has-begun").exists()
    assert not Path("overwritten.pt").exists()


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
def test_expression_builds_the_model(expression: str, write: Write, book: nn.Module) -> None:
    code = BY_NAMES + "\n\ndef make():\n    return GPT(29, 16, 32, dropout=0.0)\n"
    check_logits(write(code, expression), book)


def test_code_supplies_a_missing_number_of_heads(write: Write, book: nn.Module) -> None:
    """The number is the default of the class or of the script, because nothing else states it."""
    check_logits(write(BY_NAMES), book, {})


FLAGGED = """
class GPT(Base):
    def __init__(self, vocab_size{vocabulary}, length=16, width=32, heads=4, layers=2{flag}):
        super().__init__()
        self.build(vocab_size, length, width, heads, layers)
        if {bad}:
            self.extra = nn.Linear(2, 2)
"""


@pytest.mark.parametrize("vocabulary", ["", "=29", "=50_000"])
@pytest.mark.parametrize(
    ("flag", "bad"),
    [
        (", bias=False", "bias"),
        (", bias=True", "bias"),
        (", bias=False", "not bias"),
        (", qkv_bias=True, bias=None", "qkv_bias or bias is not True"),
        (", *, use_bias", "use_bias"),
    ],
)
def test_defaults_of_the_class_come_before_guesses(
    vocabulary: str, flag: str, bad: str, write: Write, book: nn.Module
) -> None:
    code = FLAGGED.format(vocabulary=vocabulary, flag=flag, bad=bad)
    check_logits(write(code), book)


def test_settings_of_the_file_come_before_defaults(write: Write, book: nn.Module) -> None:
    """A model with eight heads has the same tensors but different logits."""
    for code in (
        BY_NAMES.replace("n_head=4", "n_head=8"),
        SCRIPT.replace("n_head = 4", "n_head = 8"),
    ):
        check_logits(write(code), book)


def test_modules_next_to_the_file_are_imported(
    write: Write, book: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pieces_of_gpt", raising=False)
    (tmp_path / "pieces_of_gpt.py").write_text(PARTS + DICTIONARY, encoding="utf-8")
    code = write("from pieces_of_gpt import GPT as Ours\n\n\nclass GPT(Ours):\n    pass\n")
    check_logits(code, book)


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
def test_logits_are_found_in_the_output_of_a_forward(
    forward: str, write: Write, book: nn.Module
) -> None:
    code = DICTIONARY + f"\n    def forward(self, ids, targets=None):\n        {forward}\n"
    _, logits = check_logits(write(code), book)
    assert logits.dtype == torch.float32


def test_forward_gets_the_targets_it_needs(write: Write, book: nn.Module) -> None:
    code = DICTIONARY + (
        "\n    def forward(self, ids, targets):\n"
        "        logits = super().forward(ids)\n"
        "        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
    )
    check_logits(write(code), book)


def test_state_dict_of_a_part_is_loaded_into_that_part(write: Write, book: nn.Module) -> None:
    """The wrapper holds the model as `gpt`, but the names in the file lack that prefix."""
    code = DICTIONARY + (
        "\n\nclass Wrapped(nn.Module):\n"
        "    def __init__(self, cfg):\n        super().__init__()\n        self.gpt = GPT(cfg)\n"
        "    def forward(self, ids):\n        return self.gpt(ids)\n"
    )
    check_logits(write(code, "Wrapped"), book)


def test_weights_are_loaded_into_a_model_that_wraps_its_own_modules(
    write: Write, book: nn.Module
) -> None:
    """The names in the file lack the part that a wrapper adds, because the reader removes it."""
    code = DICTIONARY + (
        "\n\nPlain = Attention\n\n\nclass Attention(nn.Module):\n"
        "    def __init__(self, *sizes):\n"
        "        super().__init__()\n        self._orig_mod = Plain(*sizes)\n"
        "    def forward(self, x):\n        return self._orig_mod(x)\n"
    )
    check_logits(write(code), book)


PROBLEMS: dict[str, tuple[str, str, str]] = {
    "an unknown parameter": (
        "class GPT(Base):\n    def __init__(self, vocab_size, temper):\n        pass\n", "GPT",
        r"GPT needs 'temper', which the checkpoint does not contain: give an expression .*"
        r"'GPT\(\.\.\., temper=\.\.\.\)'",
    ),
    "a missing name": (
        BY_NAMES, "Gpt",
        r"gpt\.py does not define 'Gpt'; its classes and functions are .*Block, .*GPT",
    ),
    "a missing name in an expression": (
        BY_NAMES, "GPT(29, 16, Wider)", r"gpt\.py does not define 'Wider'; its classes",
    ),
    "not a module": ("GPT = 3\n", "GPT", "returns a int; expected a torch module"),
    "an unknown key": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        cfg['temper']\n", "GPT",
        r"KeyError: 'temper'\. .* give an expression that creates the model",
    ),
    "other weights": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 32, 4, 3)\n", "GPT",
        r"have different tensors: the checkpoint lacks \['trf_blocks\.2\.",
    ),
    "a flag without a fitting value": (
        FLAGGED.format(vocabulary="", flag=", bias=True", bad="True"), "GPT",
        r"have different tensors.*bias.*'GPT\(bias=False\)'",
    ),
    "too few layers": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 32, 4, 1)\n", "GPT",
        r"the model lacks \['trf_blocks\.1\.",
    ),
    "other shapes": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 64, 4, 2)\n", "GPT",
        r"the weights do not fit the owner's model: .*size mismatch.*Give an expression",
    ),
    "a tied head, but other weights in the file": (
        "class GPT(Base):\n    def __init__(self, cfg):\n        super().__init__()\n"
        "        self.build(29, 16, 32, 4, 2)\n"
        "        self.out_head.weight = self.tok_emb.weight\n", "GPT",
        r"tok_emb\.weight and out_head\.weight are one parameter in the owner's model.*differ in "
        "the checkpoint.*Give an expression",
    ),
    "a forward that fails": (
        DICTIONARY + "\n    def forward(self, ids):\n        raise RuntimeError('out of order')\n",
        "GPT", r"its forward failed on ids of shape \[3, 12\]: RuntimeError: out of order",
    ),
    "a forward that fails with a type error": (
        DICTIONARY + "\n    def forward(self, ids):\n        return ids + 'x'\n",
        "GPT", r"its forward failed on ids of shape \[3, 12\]: TypeError: ",
    ),
    "a forward without logits": (
        DICTIONARY + "\n    def forward(self, ids):\n        return ids\n", "GPT",
        "its forward returns a Tensor .* at least 29 elements",
    ),
    "a class that cannot be defined": (
        "class GPT(Bass):\n    pass\n", "GPT",
        r"GPT in gpt\.py, line \d+, cannot be defined: NameError: name 'Bass'",
    ),
    "not Python": ("class GPT(:\n", "GPT", r"gpt\.py is not valid in this version of Python"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "expression", "sentence"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problem_names_its_cause(
    code: str, expression: str, sentence: str, write: Write, book: nn.Module
) -> None:
    with pytest.raises(Problem) as refusal:
        logits_here(write(code, expression), book)
    assert re.search(sentence, str(refusal.value), re.DOTALL)
