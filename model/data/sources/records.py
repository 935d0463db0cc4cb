"""Records: JSON, CSV and Parquet, one document per record.

The error for an invalid record names its line or row. Empty lines and empty texts are skipped. For
a command without the flag --text-field, the field is None: the text is then in the field "text",
and error messages do not mention the flag. Parquet needs pyarrow, an optional dependency.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import Document, text_document
from logitd.model.extras import installation

CSV_QUOTED = re.compile(r'"(?:[^"]|"")*+"')
"""A field as CSV quotes it."""
LONGEST_LINE = 2**28
"""Maximum number of characters read at once: a line, a field of a table, or a file that is a single
JSON value."""
TEXT = "text"
"""Field of a record that contains the text, by default."""
KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
"""The name of each JSON type, by the Python type to which it is parsed."""


def json_lines(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in `field` of the JSON object on each line of an open file."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > LONGEST_LINE:
            raise DataError(f"{where} is longer than {LONGEST_LINE:,} characters: is this JSONL?")
        if not line.isspace():
            yield from _document(where, _field(where, _value(where, line, field), field))


def json_value(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in `field` of an open file's JSON object, or of each object if the file is a list. A
    string in the list is itself a text."""
    content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        raise DataError(
            f"{name} is a single JSON value of more than {LONGEST_LINE:,} characters, the limit: "
            "write each record on a separate line (JSON lines)"
        )
    if not content or content.isspace():
        return
    value = _value(name, content, field)
    if not isinstance(value, list):
        yield from _document(name, _field(name, value, field))
        return
    for number, item in enumerate(value, start=1):
        where = f"{name}, item {number}"
        yield from _document(where, item if isinstance(item, str) else _field(where, item, field))


def is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def csv_documents(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in the column `field` of each row of an open file. The separator is whichever of
    comma, semicolon and tab occurs most often in the header."""
    delimiter = max(",;\t", key=file.readline().count)
    file.seek(0)
    yield from _rows(file, name, field, delimiter)


def tsv_documents(file: TextIO, name: str, field: str | None) -> Iterator[Document]:
    """The text in the column `field` of each row of an open file. A quotation mark is an ordinary
    character, as in IANA's text/tab-separated-values. Raises DataError for CSV's quotes. With a
    single column, a text over several lines would not show in the number of columns, so an open
    quotation mark is refused."""
    yield from _rows(file, name, field, "\t", quotes=False)


def _rows(
    file: TextIO, name: str, field: str | None, delimiter: str, *, quotes: bool = True
) -> Iterator[Document]:
    csv.field_size_limit(LONGEST_LINE)  # process-wide; the default refuses long texts
    line = ""

    def lines() -> Iterator[str]:
        nonlocal line
        for each in file:
            line = each
            yield each

    rows = csv.reader(
        lines(),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        strict=True,
    )
    way_out = "" if quotes else "; if its fields are quoted as in CSV, rename the file to .csv"
    try:
        if (header := next(rows, None)) is None:
            return
        alone = not line.endswith("\r")
        if not quotes and any(map(CSV_QUOTED.fullmatch, header)):
            raise DataError(f"{name}, line 1 has quoted names ({header[0]}){way_out}")
        column = header.index(_known(name, "column", field, header))
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if alone and line.endswith("\r"):
                raise DataError(
                    f"{where} ends with a carriage return alone, unlike line 1: quote the text "
                    "that contains it, or write JSON lines"
                )
            if row and len(row) != len(header):
                counts = f"has {len(row)} columns; the header has {len(header)}"
                raise DataError(f"{where} {counts}{way_out}")
            if not row:
                continue
            text = row[column]
            if not quotes and '""' in text[1:-1] and CSV_QUOTED.fullmatch(text):
                raise DataError(f"{where} has a text with doubled quotes{way_out}")
            if not quotes and len(row) == 1 and text.startswith('"') and text.count('"') % 2:
                raise DataError(
                    f"{where} begins with a quotation mark that it does not close{way_out}; if "
                    "each line is a text, write JSON lines"
                )
            yield from _document(where, text)
    except csv.Error as error:
        raise DataError(f"{name}, line {rows.line_num} is not CSV: {error}") from error


def parquet_documents(path: Path, name: str, field: str | None) -> Iterator[Document]:
    """The text in the column `field` of each row. Only one row group is in memory at a time."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{name}: reading Parquet needs pyarrow, which is not installed: convert the file to "
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
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: a row near row {number + 1} has text in {column!r} that is not UTF-8: write "
            "the file again with text that is valid UTF-8"
        ) from error
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{name} cannot be read as Parquet: {error}") from error


def _text_column(schema: Any, arrow: Any, name: str, field: str | None) -> str:
    column = _known(name, "column", field, schema.names)
    kind = schema.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise DataError(f"{name}: the column {column!r} is of type {kind}; it must hold strings")
    return column


def _value(where: str, text: str, field: str | None) -> Any:
    def record(members: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(members)
        if len(found) < len(members):
            names = [name for name, _ in members]
            if (field or TEXT) in names:
                _known(where, "field", field, names)
        return found

    try:
        return json.loads(text.rstrip("\r\n"), object_pairs_hook=record)
    except json.JSONDecodeError as error:
        problem, line = error.msg.removesuffix(" at"), f"line {error.lineno}, " * (error.lineno > 1)
        way_out = "; to read the file as plain text, set --text-field ''" if field else ""
        raise DataError(
            f"{where} is not JSON: {problem} at {line}column {error.colno}{way_out}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, or deep nesting
        raise DataError(f"{where} is JSON that cannot be read: {error}") from error


def _field(where: str, record: Any, field: str | None) -> str:
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is {KINDS[type(record)]}; it must be an object with a text in "
            f"{field or TEXT!r}"
        )
    if "messages" in record and not isinstance(record.get(field or TEXT), str):
        texts = [name for name, value in record.items() if isinstance(value, str)]
        names = ", ".join(map(repr, texts[:8]))
        way_out = f", or name a field that is text with --text-field: {names}"
        another = way_out if field and texts else ""
        raise DataError(
            f"{where} is a conversation ('messages') without a text in {field or TEXT!r}: write "
            f"each conversation as one text, in the form of the chat template{another}"
        )
    name = _known(where, "field", field, list(record))
    return _text(where, name, record[name])


def _known(where: str, kind: str, field: str | None, known: list[str]) -> str:
    name = field or TEXT
    if known.count(name) > 1:
        raise DataError(f"{where} has several {kind}s {name!r}: rename all but one")
    if name not in known:
        names = ", ".join(map(repr, known[:8])) or "none"
        way_out = f"put the text into a {kind} {TEXT!r}"
        if field:
            way_out = f"set --text-field to another {kind}, or to '' to read the file as it is"
        raise DataError(f"{where} has no {kind} {name!r}; its {kind}s are {names}: {way_out}")
    return name


def _text(where: str, field: str, value: object) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: the field {field!r} is {KINDS[type(value)]}; it must be a string"
        )
    return value


def _document(where: str, text: str) -> Iterator[Document]:
    try:
        if text:
            yield text_document(where, text)
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is an unpaired surrogate "
            f"({text[error.start]!r}), which UTF-8 cannot encode"
        ) from error
