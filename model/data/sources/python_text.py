"""Python's own text: `builtin:python`, the default training text.

It consists of the reference text of `pydoc_data.topics` and the sources of the standard library,
read as files and never imported. It differs between Python versions, and a stripped installation
lacks it.
"""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import Document, Text, text_document
from logitd.model.data.sources.files import documents_of

STDLIB_WITHOUT = frozenset(
    (
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
        *("ensurepip", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
    )
)
"""Folders of little use for training: tests, tables, and packages outside the standard library."""


def python_text(stdlib: Path) -> Text:
    """The text of the standard library in the folder `stdlib`. Raises DataError if it has no
    sources."""
    documents = [*_topics(stdlib), *_sources(stdlib)]
    if not documents:
        raise DataError(
            f"{stdlib} has no Python sources, so this Python is frozen or stripped: name a text "
            "with --data"
        )
    version = sys.version.split()[0]
    return Text(
        name=f"Python {version}: reference text and standard library sources",
        licence="PSF-2.0 (Python Software Foundation License Version 2)",
        documents=documents,
        built_in=True,
    )


def _topics(stdlib: Path) -> Iterator[Document]:
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(value).items()):
                yield text_document(f"topics/{topic}", text, drawn_by_name=True)


def _sources(stdlib: Path) -> Iterator[Document]:
    files: list[Path] = []
    for folder, inner, names in os.walk(stdlib):
        # Prune the walk: one of these folders may contain every installed package.
        inner[:] = [name for name in inner if name not in STDLIB_WITHOUT]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    for path in sorted(files):
        # Skip files that the installation generates, with paths of this machine.
        if not path.name.startswith("_sysconfigdata") and path.name != "sitecustomize.py":
            for document in documents_of(path, path.relative_to(stdlib).as_posix(), ""):
                yield replace(document, drawn_by_name=True)
