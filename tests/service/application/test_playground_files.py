"""Files of the playground: none is missing, and all text is legible. `tests/e2e/playground/`
tests the page in a browser."""

import re
from pathlib import Path

import pytest

from logitd.service.application import app
from tests.service.serving import Serving

STATIC = Path(app.__file__).parents[1] / "playground"
PAGE = (STATIC / "index.html").read_text(encoding="utf-8")
STYLES = (STATIC / "playground" / "playground.css").read_text(encoding="utf-8")
MODULES = sorted((STATIC / "playground").glob("*.js"))
LEAST_CONTRAST = 4.5
"""Minimum contrast of text: https://www.w3.org/TR/WCAG22/#contrast-minimum."""


def colors(scheme: str) -> dict[str, str]:
    """The colors that a scheme declares."""
    blocks = re.findall(r":root \{(.*?)\}", STYLES, re.DOTALL)
    return dict(re.findall(r"(--[a-z-]+): (#[0-9a-f]{6});", blocks[scheme == "dark"]))


def luminance(color: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ("ink", "page"), ("ink", "raised"), ("ink", "hot"),
        ("soft", "page"), ("soft", "raised"),
        ("accent", "page"), ("accent", "raised"), ("on-accent", "accent"), ("problem", "page"),
    ],
)  # fmt: skip
def test_text_is_legible_in_both_schemes(scheme: str, text: str, behind: str) -> None:
    of = colors(scheme)
    assert contrast(of[f"--{text}"], of[f"--{behind}"]) >= LEAST_CONTRAST


def test_both_schemes_declare_the_same_colors() -> None:
    assert colors("light").keys() == colors("dark").keys()
    used = set(re.findall(r"var\((--[a-z-]+)", STYLES))
    set_elsewhere = {
        "--share",
        "--columns",
        "--rows",
        "--wide",
        "--high",
        "--heads",
        "--series",
        "--side",
        "--strength",
    }
    assert used - set_elsewhere <= colors("light").keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_imports_existing_names(module: Path) -> None:
    """The imported files, the exported names and the page's elements exist."""
    text = module.read_text(encoding="utf-8")
    assert re.match(r"// [A-Z][^\n]*", text), "it must begin with a description"
    for names, source in re.findall(r'import \{([^}]*)\} from "\./([a-z]+\.js)"', text):
        exported = (module.parent / source).read_text(encoding="utf-8")
        for name in map(str.strip, names.split(",")):
            assert re.search(rf"export (async )?(const|function\*?|class) {name}\b", exported), name
    made = "".join(path.read_text(encoding="utf-8") for path in MODULES)
    for identifier in re.findall(r'find\("([a-z_-]+)"\)', text):
        assert f'id="{identifier}"' in PAGE or f'id: "{identifier}"' in made, identifier


def test_everything_comes_from_this_server(server: Serving) -> None:
    everything = PAGE + STYLES + "".join(path.read_text(encoding="utf-8") for path in MODULES)
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", everything))
    namespaces = {"http://www.w3.org/2000/svg"}
    commented = {address for address in addresses if address.startswith("https://numpy.org/")}
    assert addresses == namespaces | commented
    for path in ("/", *re.findall(r'(?:src|href)="(/static/[^"]+)"', PAGE)):
        assert server.client.get(path).status_code == 200, path
    for module in MODULES:
        assert server.client.get(f"/static/playground/{module.name}").status_code == 200
