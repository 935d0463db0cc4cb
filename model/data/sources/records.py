"""Records: JSON lines and Parquet, one document per record, read one at a time.

Covers which field is the text, and which records are rejected, by line or row. Empty lines and
empty texts are skipped, as empty files are. Parquet needs pyarrow (an optional dependency).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from logitd.model.data.sources.document import Document, TextError, text_document
from logitd.model.extras import installation

LONGEST_LINE = 2**28
"""Characters. A line is held in memory whole."""


def json_documents(file: TextIO, name: str, field: str) -> Iterator[Document]:
    """The text in `field` of each line of an open file."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LONGEST_LINE:
            raise TextError(f"{where} is longer than {LONGEST_LINE:,} characters: is this JSONL?")
        if line.isspace():
            continue
        yield from _document(where, _field(where, line, field))


def parquet_documents(path: Path, name: str, field: str) -> Iterator[Document]:
    """The text in the column `field` of each row, one row group in memory at a time."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise TextError(
            f"{name}: reading Parquet needs pyarrow, which is not installed; convert the file to "
            f"JSON lines, or install it: {installation('parquet')}"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, arrow, name, field)
            number = 0
            for group in range(file.num_row_groups):
                for text in file.read_row_group(group, columns=[field]).column(field).to_pylist():
                    number += 1
                    where = f"{name}, row {number}"
                    if text is None:
                        raise TextError(f"{where}: the field {field!r} is null; it must be a text")
                    yield from _document(where, text)
    except (OSError, arrow.ArrowException) as error:
        raise TextError(f"{name} cannot be read as Parquet: {error}") from error


def _check_column(schema: Any, arrow: Any, name: str, field: str) -> None:
    """Refuse a file whose column is missing or no text, before a row is read."""
    if field not in schema.names:
        raise TextError(
            f"{name} has no column {field!r}; its columns are "
            f"{', '.join(map(repr, schema.names[:8]))}: name another with --text-field"
        )
    kind = schema.field(field).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise TextError(f"{name}: the column {field!r} is of type {kind}; it must be strings")


def _field(where: str, line: str, field: str) -> str:
    try:
        record = json.loads(line.removeprefix("\ufeff").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise TextError(f"{where} is not JSON: {what} at column {error.colno}") from error
    except ValueError as error:  # a number of too many digits
        raise TextError(f"{where} cannot be read: {error}") from error
    except RecursionError as error:
        raise TextError(f"{where} is JSON nested too deeply to be read") from error
    if not isinstance(record, dict):
        raise TextError(
            f"{where} is {_kind(record)}; each line must be an object with a text in {field!r}"
        )
    if field not in record:
        known = ", ".join(map(repr, list(record)[:8])) or "none"
        raise TextError(
            f"{where} has no field {field!r}; its fields are {known}: name another with "
            "--text-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise TextError(f"{where}: the field {field!r} is {_kind(text)}; it must be a string")
    return text


def _document(where: str, text: str) -> Iterator[Document]:
    if not text:
        return
    try:
        document = text_document(where, text)
    except UnicodeEncodeError as error:
        raise TextError(
            f"{where}: character {error.start} is half a surrogate pair "
            f"({text[error.start]!r}), which no UTF-8 can hold"
        ) from error
    yield document


def _kind(value: object) -> str:
    """What JSON calls a value, for a sentence."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
