"""The file map: every source file with the first sentence it says about itself. `make map`.

Reads docstrings (Python) and opening comments (C++); imports nothing of the project, so it runs
without a virtual environment. Does not list tests: they mirror the sources.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "service", "logitd", "benchmarks")


def sources() -> list[Path]:
    """Every source file, those of a folder before those of the folders in it."""
    return [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"), key=lambda path: (path.parent, path.name))
        if path.suffix in {".py", ".h", ".cpp"}
    ]


def opening(path: Path) -> str:
    """The first paragraph that a file says about itself, on one line; "" where it says nothing."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        comment: list[str] = []
        for line in text.splitlines():
            if not line.startswith("// "):
                break
            comment.append(line.removeprefix("// "))
        paragraph = " ".join(comment)
    return " ".join(paragraph.split())


def lines() -> Iterator[str]:
    """The map: a line for each folder, from its `__init__.py`, and one for each file in it."""
    folder = None
    for path in sources():
        if path.parent != folder:
            folder = path.parent
            yield ""
            introduction = opening(folder / "__init__.py") if _is_package(folder) else ""
            yield f"{folder.relative_to(ROOT)}/  {introduction}".rstrip()
        if path.name != "__init__.py":
            yield f"  {path.name:<22} {opening(path)}"


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


if __name__ == "__main__":
    print("\n".join(lines()).lstrip())
