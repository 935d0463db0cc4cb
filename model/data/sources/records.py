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
KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
"""JSON's names of values."""


def json_documents(file: TextIO, name: str, field: str) -> Iterator[Document]:
    """The text in `field` of each line of an open file."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LONGEST_LINE:
            raise TextError(f"{where} is longer than {LONGEST_LINE:,} characters: is this JSONL?")
        if not line.isspace():
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
                    yield from _document(where, _text(where, field, text))
    except (OSError, arrow.ArrowException) as error:
        raise TextError(f"{name} cannot be read as Parquet: {error}") from error


def _check_column(schema: Any, arrow: Any, name: str, field: str) -> None:
    """Refuse a file whose column is missing or has no text, before a row is read."""
    if field not in schema.names:
        raise _no_field(f"{name} has no column", field, schema.names)
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
    except (ValueError, RecursionError) as error:  # a number of too many digits, or deep nesting
        raise TextError(f"{where} is JSON that cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise TextError(
            f"{where} is {KINDS[type(record)]}; it must be an object with a text in {field!r}"
        )
    if field not in record:
        raise _no_field(f"{where} has no field", field, list(record))
    return _text(where, field, record[field])


def _no_field(what: str, field: str, known: list[str]) -> TextError:
    names = ", ".join(map(repr, known[:8])) or "none"
    return TextError(f"{what} {field!r}, but {names}: name another one with --text-field")


def _text(where: str, field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TextError(
            f"{where}: the field {field!r} is {KINDS[type(value)]}; it must be a string"
        )
    return value


def _document(where: str, text: str) -> Iterator[Document]:
    try:
        if text:
            yield text_document(where, text)
    except UnicodeEncodeError as error:
        raise TextError(
            f"{where}: character {error.start} is half a surrogate pair "
            f"({text[error.start]!r}), which no UTF-8 can hold"
        ) from error
