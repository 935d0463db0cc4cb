"""Records: JSON, CSV and Parquet, one document per record.

Covers which field is the text, and which records are rejected, by line or row. Empty lines and
empty texts are skipped, as empty files are. A field that is None is "text", and the user cannot
name another one. Parquet needs pyarrow (an optional dependency).
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from logitd.model.data.sources.document import Document, TextError, text_document
from logitd.model.extras import installation

LONGEST_LINE = 2**28
"""Characters. A line, a field of a table and a file of one JSON value are held in memory whole."""
TEXT = "text"
"""Field that contains the text unless another is named."""
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


def json_lines(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in `field` of each line of an open file."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LONGEST_LINE:
            raise TextError(f"{where} is longer than {LONGEST_LINE:,} characters: is this JSONL?")
        if not line.isspace():
            yield from _document(where, _field(where, _value(where, line), field))


def json_value(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in `field` of the object in an open file, or of each object of a list; strings of a
    list are texts."""
    content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        raise TextError(
            f"{name} is one JSON value of more than {LONGEST_LINE:,} characters, which are read at "
            "once: write each record on a line of its own (JSON lines)"
        )
    if not content or content.isspace():
        return
    value = _value(name, content)
    if not isinstance(value, list):
        yield from _document(name, _field(name, value, field))
        return
    for number, item in enumerate(value, start=1):
        where = f"{name}, item {number}"
        yield from _document(where, item if isinstance(item, str) else _field(where, item, field))


def is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line.removeprefix("\ufeff")), dict)
    except (ValueError, RecursionError):
        return False


def csv_documents(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in the column `field` of each row of an open file with a header, whose columns are
    separated by what is most frequent there: comma, semicolon or tab."""
    delimiter = max(",;\t", key=file.readline().count)
    file.seek(0)
    csv.field_size_limit(LONGEST_LINE)  # of the whole process; the default refuses longer texts
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        if (header := next(rows, None)) is None:
            return
        header[:1] = [cell.removeprefix("\ufeff") for cell in header[:1]]
        column = header.index(_known(f"{name} has no column", field, header))
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if row and len(row) != len(header):
                raise TextError(f"{where} has {len(row)} columns; the header has {len(header)}")
            if row:
                yield from _document(where, row[column])
    except csv.Error as error:
        raise TextError(f"{name}, line {rows.line_num} is not CSV: {error}") from error


def parquet_documents(path: Path, name: str, field: str | None) -> Iterator[Document]:
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
            column = _text_column(file.schema_arrow, arrow, name, field)
            number = 0
            for group in range(file.num_row_groups):
                for text in file.read_row_group(group, columns=[column]).column(column).to_pylist():
                    number += 1
                    where = f"{name}, row {number}"
                    yield from _document(where, _text(where, column, text))
    except (OSError, arrow.ArrowException) as error:
        raise TextError(f"{name} cannot be read as Parquet: {error}") from error


def _text_column(schema: Any, arrow: Any, name: str, field: str | None) -> str:
    """The name of the column. Refuses a file without it or without text in it, before a row is
    read."""
    column = _known(f"{name} has no column", field, schema.names)
    kind = schema.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise TextError(f"{name}: the column {column!r} is of type {kind}; it must be strings")
    return column


def _value(where: str, text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        what, line = error.msg.removesuffix(" at"), f"line {error.lineno}, " * (error.lineno > 1)
        raise TextError(f"{where} is not JSON: {what} at {line}column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or deep nesting
        raise TextError(f"{where} is JSON that cannot be read: {error}") from error


def _field(where: str, record: Any, field: str | None) -> str:
    if not isinstance(record, dict):
        raise TextError(
            f"{where} is {KINDS[type(record)]}; it must be an object with a text in "
            f"{field or TEXT!r}"
        )
    name = _known(f"{where} has no field", field, list(record))
    return _text(where, name, record[name])


def _known(what: str, field: str | None, known: list[str]) -> str:
    """The name of the field. Raises TextError if it is not one of the known ones."""
    name = field or TEXT
    if name not in known:
        names = ", ".join(map(repr, known[:8])) or "none"
        way_out = "name another one with --text-field, or '' to read the file as it is"
        raise TextError(
            f"{what} {name!r}, but {names}: {way_out if field else 'no other field is read'}"
        )
    return name


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
