"""The definitions of an owner's file: which statements run, and how its imports are found."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.owner_code.process.build import Request, build_model
from logitd.model.owner_code.process.define import run_definitions
from logitd.model.owner_code.process.problem import Problem

LAYER = """
from torch import nn

class Layer(nn.Linear):
    pass
"""
MODEL = """
class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = Layer(width, width)
"""


@pytest.fixture(autouse=True)
def untouched_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the paths, finders and modules of an owner's file after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def built(folder: Path, files: Mapping[str, str], expression: str = "Model", **said: Any) -> Any:
    """Write the files, and build the model that the first file defines. Returns its `layer`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    first = folder / next(iter(files))
    request = Request(file=str(first), expression=expression, said=said)
    width = int(said.get("width", 4))
    weights = {"layer.weight": torch.ones(width, width), "layer.bias": torch.ones(width)}
    return build_model(request, weights).model.layer


def run(code: str, folder: Path) -> Any:
    """The module that the definitions for `Model` in this code create."""
    (folder / "model.py").write_text(code, encoding="utf-8")
    return run_definitions(folder / "model.py", ["Model"], {}, {}, {})


@pytest.mark.parametrize(
    "line",
    [
        "from ours.parts.layer import Layer",
        "from .parts.layer import Layer",
        "from ours.parts import layer; Layer = layer.Layer",
        "from .parts import layer\nLayer = layer.Layer",
    ],
)
def test_package_imports_itself_without_its_script(line: str, tmp_path: Path) -> None:
    files = {
        "ours/model.py": f"from torch import nn\n{line}\n{MODEL}\nraise SystemExit\n",
        "ours/__init__.py": "from ours.model import Model\n" if "ours." not in line else "",
        "ours/parts/layer.py": LAYER,
    }
    assert built(tmp_path, files).weight.shape == (4, 4)


def test_parts_that_the_class_does_not_need_are_not_run(tmp_path: Path) -> None:
    text = f"""
from __future__ import annotations
import a_module_that_is_not_here as gone
from torch import nn
{LAYER}

class Other(gone.Base):
    rate = 1 / 0

@gone.register
def train(model: gone.Model):
    pass

{MODEL}
"""
    assert built(tmp_path, {"model.py": text}).weight.shape == (4, 4)


@pytest.mark.parametrize(
    ("lines", "slopes"),
    [
        ("for h in range(heads):\n    slopes[h] = 2.0**-h", [1.0, 0.5]),
        ("slopes.clear()\nwhile len(slopes) < heads:\n    slopes.append(3)", [3, 3]),
        ("if heads == 2:\n    print('two')\n    slopes = [7, 7]", [7, 7]),
        ("import contextlib\nwith contextlib.nullcontext([5, 6]) as slopes:\n    pass", [5, 6]),
        ("def fill(s):\n    slopes[0] = s\nslopes[:] = map(float, '12')", [1.0, 2.0]),
    ],
)
def test_statement_that_updates_a_needed_name_is_run(
    lines: str, slopes: list[float], tmp_path: Path
) -> None:
    """A loop that filled a table was left out, and the class computed without it."""
    code = (
        "heads = 2\nslopes = [0.0] * heads\n"
        + lines
        + """
class Model:
    def use(self):
        x = slopes
        return x

import torch
model = Model()
for x in range(10):
    torch.manual_seed(1)
    model.use()
    raise RuntimeError("training")
"""
    )
    assert run(code, tmp_path).slopes == slopes


def test_main_part_of_a_script_is_not_needed(tmp_path: Path) -> None:
    """Statements on which only this part depends would run."""
    (tmp_path / "model.py").write_text(
        "log = []\nlog.append(1)\nclass Model:\n    def use(self):\n        return settings\n"
        "if __name__ == '__main__':\n    settings = log\n"
    )
    module = run_definitions(tmp_path / "model.py", ["Model"], {"settings": 3}, {}, {})
    assert (module.settings, vars(module).get("log")) == (3, None)


def test_loop_that_fails_is_reported(tmp_path: Path) -> None:
    code = "table = [1, 2]\nfor i in (0, 5):\n    table[i] = 3\nclass Model:\n    x = table\n"
    with pytest.raises(Problem, match=r"line 2, which updates table, failed: IndexError"):
        run(code, tmp_path)


def test_failed_import_is_reported_when_it_is_used(tmp_path: Path) -> None:
    text = f"from torch import nn\nfrom absent.layers import Layer\n{MODEL}"
    with pytest.raises(Problem, match=r"from absent.layers import Layer in model.py, line 2, fail"):
        built(tmp_path, {"model.py": text})


@pytest.mark.parametrize(
    "lines", ["width = 2\nwidth += 1", "sizes = {}\nsizes.update(width=3)\nwidth = sizes['width']"]
)
def test_values_are_read_after_their_updates(lines: str, tmp_path: Path) -> None:
    text = f"{lines}\nfrom torch import nn\n{LAYER}{MODEL.replace('width=4', 'out=width')}"
    text = text.replace("Layer(width, width)", "nn.Linear(4, out)")
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    weights = {"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(3)}
    request = Request(file=str(tmp_path / "model.py"), expression="Model")
    layer: Any = build_model(request, weights).model.layer
    assert layer.out_features == 3


def test_known_value_is_not_updated_again(tmp_path: Path) -> None:
    """The value of the checkpoint is that after all updates."""
    text = f"width = len(absent)\nwidth += 1\nfrom torch import nn\n{LAYER}{MODEL}"
    text = text.replace("width=4", "size=width").replace("Layer(width, width)", "Layer(size, size)")
    assert built(tmp_path, {"model.py": text}, width=3).out_features == 3


@pytest.mark.parametrize(
    ("parameters", "body", "expression"),
    [
        ("config", "config.width", "Model"),
        ("config", "config.width", "Model(config)"),
        ("shape", "shape.width", "Model"),
        ("shape", "shape['width']", "Model"),
        ("c: 'ModelConfig'", "c.width", "Model"),
    ],
)
def test_configuration_object_is_made_from_known_values(
    parameters: str, body: str, expression: str, tmp_path: Path
) -> None:
    text = LAYER + MODEL.replace("width=4", parameters).replace("Layer(width", f"Layer({body}")
    text = text.replace(", width)", f", {body})")
    if "ModelConfig" in parameters:
        text = "class ModelConfig:\n    width = 4\n\n" + text
    assert built(tmp_path, {"model.py": text}, expression, width=3).out_features == 3
