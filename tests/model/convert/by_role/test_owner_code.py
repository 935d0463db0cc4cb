"""The owner's own code, run in a separate process, decides what the names leave open.

That process is tested in `test_owner_process.py`.
"""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from logitd.model.convert.by_role import owner_code
from logitd.model.convert.by_role.owner_code import (
    owner_logits,
    parse_owner_code,
    require_read,
    said_in,
)
from logitd.model.convert.by_role.read import RoleOptions, read_by_role, recognize_file
from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.owner_code import process
from tests.model.convert.by_role.conftest import Write
from tests.model.convert.by_role.owner_files import DICTIONARY, SCRIPT
from tests.model.convert.by_role.scheme import (
    findings,
    mapped,
    state_file,
)
from tests.model.convert.by_role.schemes import SCHEMES

SETTINGS = {"n_heads": 4}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpt.py", r"--code is 'gpt\.py'; expected FILE\.py:NAME"),
        ("gpt.py:", r"--code is 'gpt\.py:'; expected"),
        ("gpt:GPT", "expected FILE"),
        (
            f"{__file__}:GPT(n=1",
            r"the expression 'GPT\(n=1', which is not valid at character 4: '\(' was never",
        ),
        ("gone.py:GPT", r"gone\.py is not a file; expected --code FILE\.py:NAME"),
    ],
)
def test_code_is_a_file_and_a_name(text: str, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence):
        parse_owner_code(text)


def test_expression_may_hold_colons(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").touch()
    code = parse_owner_code(f"{tmp_path}/gpt.py: GPT({{'n_head': 4}}) ")
    assert (code.file.name, code.expression) == ("gpt.py", "GPT({'n_head': 4})")
    assert str(code) == "gpt.py:GPT({'n_head': 4})"


@pytest.mark.parametrize("eps", [{"eps": 1e-8, "lr": 1e-3}, {"epsilon": 1e-8}])
def test_eps_of_an_optimizer_is_no_eps_of_the_code(eps: dict[str, float]) -> None:
    """It replaced the default of `norm_eps` in the owner's class. A step replaced `n_steps`."""
    said = said_in(eps | {"step": 900, "n_head": 4, "ln_eps": None}, {})
    assert not {"norm_eps", "rms_norm_eps", "n_steps", "eps"} & said.keys()
    assert said["heads"] == 4
    assert said_in({"rms_norm_eps": 1e-6}, {})["norm_eps"] == 1e-6


def test_settings_choose_neither_device_nor_dropout() -> None:
    """The owner's code once ran on the GPU that the settings of a nanoGPT checkpoint name."""
    said = said_in({"device": "cuda", "dropout": 0.1, "n_layer": 2}, {})
    assert (said["device"], said["dropout"], said["n_layer"]) == ("cpu", 0.0, 2)


def test_owner_code_answers_all_questions(write: Write) -> None:
    """The script that builds and trains the model is in the same file. No question is asked, the
    training loop does not run, and a default that nothing confirms is named."""
    scheme = SCHEMES["book"]
    model = scheme.model(seed=2)
    script = SCRIPT.replace("(self):", "(self, heads=n_head):").replace("n_head, ", "heads, ")
    code = write(script)
    options = RoleOptions(code=code)
    read = read_by_role(recognize_file(state_file(model), options))
    assert read.config.activation == "gelu_tanh"
    assert (read.config.n_head, read.config.final_norm) == (4, True)
    assert "logits of gpt.py:GPT on random ids" in read.facts["verified"]
    assert read.facts["warning"].startswith("assumed from the defaults of gpt.py:GPT: heads=4.")
    assert not (code.file.parent / "training-has-begun").exists()


@pytest.mark.parametrize("window", [9, 4])
def test_number_that_may_act_beyond_the_compared_positions_is_refused(
    window: int, write: Write, book: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of the code as long as the compared sequence was left out, and "verified"."""
    for name in ("TOKENS", "LONGEST"):
        monkeypatch.setattr(owner_code, name, 8)
    code = write(DICTIONARY + f"\n    window = {window}\n")
    file = recognize_file(state_file(book, settings=SETTINGS), RoleOptions(code=code))
    if window < 8:
        assert read_by_role(file).config.context_length == 16
        return
    sentence = r"compared at up to 8 of 16 positions, .*: a number of the code 9\. Set --context"
    with pytest.raises(ConvertError, match=sentence):
        read_by_role(file)


def test_values_that_cannot_be_read_need_an_expression(write: Write, book: nn.Module) -> None:
    """The class was created with its defaults, and the import said that its logits agree."""
    unknown = {"config": Unread("GPTConfig(4)"), "softcap": 1.0}
    code = write(DICTIONARY)
    file = recognize_file(replace(state_file(book), unknown=unknown), RoleOptions(code=code))
    with pytest.raises(ConvertError, match=r"gpt\.py:GPT: .* config is GPTConfig\(4\)\. Give"):
        read_by_role(file)
    require_read(replace(code, expression="GPT(n_head=4)"), unknown)
    require_read(code, {"softcap": 1.0})


@pytest.mark.slow
def test_model_without_a_mask_is_refused_by_its_code(write: Write, book: nn.Module) -> None:
    code, tensors = (
        write(DICTIONARY.replace("class GPT", "CAUSAL = False\n\n\nclass GPT")),
        mapped(book),
    )
    sentence = r"different later ids change the logits of earlier .* the model has no causal mask"
    with pytest.raises(ConvertError, match=rf"gpt\.py:GPT: {sentence}"):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS)


def test_owner_code_has_no_network(write: Write, book: nn.Module) -> None:
    """A real listener on this machine cannot be reached, by name or by address."""
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


def test_owner_code_reads_sections_as_attributes(write: Write, book: nn.Module) -> None:
    """The settings pass through a file, and a configuration may have been an object."""
    text = DICTIONARY.replace("super()", "assert cfg.extra.window == 4 == cfg['extra']['window']")
    code, tensors = write(text.replace(".__init__()", "\n        super().__init__()")), mapped(book)
    values = SETTINGS | {"extra": {"window": 4}}
    objective = owner_logits(code, tensors, findings(tensors, values), values)
    assert objective.logits.shape[-1] == 29


def test_endless_code_is_stopped(write: Write, book: nn.Module) -> None:
    tensors = mapped(book)
    code = write(
        "import time\n\n\nclass GPT(Base):\n    def __init__(self, cfg):\n        time.sleep(600)\n"
    )
    with pytest.raises(ConvertError, match=r"gpt\.py:GPT did not answer within 3 seconds"):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS, timeout=3)


@pytest.mark.slow
def test_dead_process_is_reported_with_its_stderr(write: Write, book: nn.Module) -> None:
    tensors = mapped(book)
    code = write(
        "class GPT(Base):\n    def __init__(self, cfg):\n"
        "        import os, sys\n        print('no memory left', file=sys.stderr, flush=True)\n"
        "        os._exit(9)\n"
    )
    with pytest.raises(
        ConvertError, match=r"process of gpt\.py:GPT ended with status 9: no memory left"
    ):
        owner_logits(code, tensors, findings(tensors, SETTINGS), SETTINGS)


def test_owner_process_imports_nothing_else_of_this_project() -> None:
    """The owner's modules may have the same names as this project's modules."""
    imports = r"^\s*(?:from|import) ((?:model|service|logitd)\b[\w.]*)"
    sources = [path.read_text(encoding="utf-8") for path in Path(process.__file__).parent.iterdir()
               if path.suffix == ".py"]  # fmt: skip
    named = {name for source in sources for name in re.findall(imports, source, re.MULTILINE)}
    assert {name.rpartition(".")[0] for name in named} == {process.__name__}
