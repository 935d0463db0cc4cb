"""The file map of `make map`: all source files with their opening sentences.

Reads docstrings (Python) and opening comments (C++). It imports nothing from the project, so it
needs no virtual environment. Tests mirror the sources and are not listed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "service", "logitd", "benchmarks")


def sources() -> list[Path]:
    """All source files. The files in a folder come before the files in its subfolders."""
    return [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"), key=lambda path: (path.parent, path.name))
        if path.suffix in {".py", ".h", ".cpp"}
    ]


def opening(path: Path) -> str:
    """The opening paragraph of a file on one line; "" if there is none."""
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
    """The map: one line per folder, from its `__init__.py`, and one line per file."""
    folder = None
    for path in sources():
        if path.parent != folder:
            folder = path.parent
            yield ""
            package = folder / "__init__.py"
            introduction = opening(package) if package.is_file() else ""
            yield f"{folder.relative_to(ROOT)}/  {introduction}".rstrip()
        if path.name != "__init__.py":
            yield f"  {path.name:<22} {opening(path)}"


if __name__ == "__main__":
    print("\n".join(lines()).lstrip())
