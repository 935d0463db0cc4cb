"""Python's own text: `builtin:python`, the default training text.

The reference text of `pydoc_data.topics` and the sources of the standard library, read as files
and never imported. It differs between versions of Python, and a stripped-down installation has
none of it.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from logitd.model.data.sources.document import Document, Text, TextError, text_document
from logitd.model.data.sources.files import plain_file

STDLIB_WITHOUT = frozenset(
    (
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
        *("ensurepip", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
    )
)
"""Folders of the standard library that teach little: tests, tables, what is not part of it."""


def python_text(stdlib: Path) -> Text:
    """The reference text and the sources below a standard library's folder."""
    documents = [*_topics(stdlib), *_sources(stdlib)]
    if not documents:
        raise TextError(
            f"{stdlib} has no Python sources (a frozen or stripped Python): name a text with --data"
        )
    version = sys.version.split()[0]
    return Text(
        name=f"Python {version}: reference text and standard library sources",
        licence="PSF-2.0 (Python Software Foundation License Version 2)",
        documents=documents,
        built_in=True,
    )


def _topics(stdlib: Path) -> Iterator[Document]:
    """The topics of Python's `help()`, from the literal dictionary in their source file."""
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(value).items()):
                yield text_document(f"topics/{topic}", text, drawn_by_name=True)


def _sources(stdlib: Path) -> Iterator[Document]:
    for path in sorted(_python_files(stdlib)):
        parts = path.relative_to(stdlib).parts
        # Written when Python was built or installed, with the paths of that machine.
        local = parts[-1].startswith("_sysconfigdata") or parts[-1] == "sitecustomize.py"
        if not local and path.stat().st_size:
            yield plain_file(path, "/".join(parts), drawn_by_name=True)


def _python_files(stdlib: Path) -> Iterator[Path]:
    """The sources below the standard library's folder. Folders without are not even entered: one
    of them may hold every installed package."""
    for folder, inner, names in os.walk(stdlib):
        inner[:] = [name for name in inner if name not in STDLIB_WITHOUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
