"""JSON, CSV and Parquet: each record is a document, and errors state the line or row of an invalid
record."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.errors import DataError
from logitd.model.data.sources import records
from logitd.model.data.sources.files import documents_of


def texts(path: Path, field: str | None = "text") -> list[str]:
    return ["".join(document.pieces()) for document in documents_of(path, path.name, field)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@given(
    written=st.lists(st.text(st.characters(codec="utf-8"))),
    ascii=st.booleans(),
    packed=st.booleans(),
)
def test_line_is_a_document(folder: Path, written: list[str], ascii: bool, packed: bool) -> None:
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii) for text in written]
    raw = "\n".join(lines).encode()
    path = folder / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert texts(path) == [text for text in written if text]


LINES = '{"id": 1, "text": "one, two"}\n\n{"id": 2, "text": "a \\"b\\"\\nc"}\n'
ITEMS = json.dumps([json.loads(line) for line in LINES.split("\n\n")], indent=1)
ROWS = '\ufeffid,text\n1,"one, two"\n\n2,"a ""b""\nc"\n'


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("a.txt", LINES),
        ("a", LINES),
        ("a.json", ITEMS),
        ("a.json", '["one, two", "a \\"b\\"\\nc"]'),
        ("a.csv", ROWS),
        ("a.csv", ROWS.replace(",", ";").replace("one;", "one,")),
        ("a.csv", ROWS.replace(",", "\t").replace("one\t", "one,")),
    ],
)
def test_records_are_read_in_every_format(
    tmp_path: Path, name: str, content: str, packed: bool
) -> None:
    path = tmp_path / (name + ".gz" * packed)
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert texts(path) == ["one, two", 'a "b"\nc']
    assert texts(path, None) == ["one, two", 'a "b"\nc'], "in a command without --text-field"
    assert texts(path, "") == [content.removeprefix("\ufeff")], "unchanged on request"


@pytest.mark.parametrize(
    "content",
    ['{"a": 1}\nand prose', "{\n  brace: 1\n}\n", "{}x", "[1]\n[2]\n", '"a"\n"b"\n', "1\n2\n"],
)
def test_text_that_begins_like_records_is_text(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    assert texts(path) == [content]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", '{"body": "x"}\n{"body": "y"}\n', r"a\.txt, line 1 .*'text'.*'body'.*--text-f"),
        ("package.json", '{"name": "x",\n"version": "1"}', r"package\.json .*'text'.*'name'.*''"),
        ("a.json", "[1]", r"a\.json, item 1 is a number"),
        ("a.json", '[{"text": "x"}, {"text": 3}]', "item 2: the field 'text' is a number"),
        ("a.json", "[\n1,]", r"a\.json is not JSON: .* line 2, column 3.*text-field ''"),
        ("a.csv", "id,body\n1,x\n", r"a\.csv has no column 'text'.*'id', 'body'.*--text-field"),
        ("a.csv", "id,text\n1,x\n2\n", r"a\.csv, line 3 has 1 columns; the header has 2$"),
        ("a.csv", 'id\ttext\n1\t"x\n', r"a\.csv, line 2 is not CSV"),
        ("a.tsv", '"id"\t"text"\n1\t"x"\n', r'a\.tsv, line 1 .*\("id"\).*rename .* to \.csv'),
        ("a.tsv", 'id\ttext\n1\t"x\ny"\n', r"a\.tsv, line 3 has 1 columns.*rename .* to \.csv"),
        ("a.tsv", 'id\ttext\n1\t"a ""b"""\n', r"a\.tsv, line 2 .*doubled.*rename .* to \.csv"),
        ("a.tsv", 'text\na\n"x\ny"\n', r"a\.tsv, line 3 begins .*close.*rename .* to \.csv.*JSON"),
        ("a.csv", "text\nold\rmac\n", r"a\.csv, line 2 ends with a carriage return alone"),
        ("a.csv", 'text,n\r\n"x\ry",1\r\nz,2\r', r"a\.csv, line 4 ends with a carriage"),
        ("a.json", '{"messages": []}', r"a\.json, line 1 is a conversation.*chat template$"),
    ],
)  # fmt: skip
def test_file_without_the_field_is_refused_by_name(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)
    with pytest.raises(DataError) as caught:
        texts(tmp_path / name, None)
    assert "--text-field" not in str(caught.value), "the command lacks this flag"


def test_quotation_marks_in_tsv_are_text(tmp_path: Path) -> None:
    """As in GLUE, whose files have one sentence per row and no quoted fields."""
    sentences = ['"Hello there', "second, line", 'she said so."', '"All."', 'a "" b', '""']
    rows = [f"{number}\t{text}" for number, text in enumerate(sentences)]
    assert texts(write(tmp_path / "a.tsv", "id\ttext", *rows)) == sentences


def test_carriage_returns_may_end_every_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\rone\rtwo\r")
    assert texts(tmp_path / "a.csv") == ["one", "two"]


def test_long_field_of_csv_is_read(tmp_path: Path) -> None:
    """By default, Python's csv module refuses fields of more than 131,072 characters."""
    path = write(tmp_path / "a.csv", "text", "x" * 140_000)
    assert texts(path) == ["x" * 140_000]


def test_json_value_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    (tmp_path / "a.json").write_text("[\n" + " " * 100 + "]")
    with pytest.raises(DataError, match=r"a\.json .*100 characters.*JSON lines"):
        texts(tmp_path / "a.json")


def test_documents_have_lines_and_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "äb"}', "", '{"text": ""}', '{"text": "c"}')
    documents = list(documents_of(path, "a.jsonl", "text"))
    assert [(document.name, document.size) for document in documents] == [
        ("a.jsonl, line 1", 3),
        ("a.jsonl, line 4", 1),
    ]


def test_field_can_be_named_and_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"body": "one"}\n', encoding="utf-8")
    assert texts(path, "body") == ["one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "cut',
            r"a\.jsonl, line 2 is not JSON: Unterminated string starting at column 10",
        ),
        ('["a"]', "line 2 is an array.*'text'"),
        ("null", "line 2 is null"),
        ('{"body": "b", "id": 3}', "line 2 has no field 'text'.*'body', 'id'.*--text-field"),
        ("{}", "line 2 has no field 'text'.*none"),
        ('{"text": 3}', "line 2: the field 'text' is a number; it must be a string"),
        ('{"text": null}', "the field 'text' is null"),
        ('{"text": true}', "the field 'text' is a boolean"),
        ('{"text": ["a"]}', "the field 'text' is an array"),
        ('{"text": {"a": 1}}', "the field 'text' is an object"),
        ('{"text": "ab\\ud800"}', "line 2: character 2 is an unpaired surrogate"),
        ("[" * 100_000, "line 2 is"),
        (
            '{"id": "7", "messages": []}',
            r"line 2 is a conversation.*one text.*name a field.*--text-field: 'id'$",
        ),
    ],
)
def test_invalid_record_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}', line, '{"text": "good"}')
    with pytest.raises(DataError, match=message):
        texts(path)


def test_long_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 87}))
    assert texts(path) == ["x" * 87]
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 100}))
    with pytest.raises(DataError, match="line 1 is longer than 100 characters"):
        texts(path)


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    """The broken second line raises an error only when it is read."""
    path = write(tmp_path / "a.jsonl", '{"text": "good"}', "broken")
    documents = iter(documents_of(path, "a", "text"))
    assert next(documents).name == "a, line 1"
    with pytest.raises(DataError):
        next(documents)


def test_missing_pyarrow_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs pyarrow.*-m pip install 'pyarrow>=20'"):
        texts(tmp_path / "a.parquet")


@pytest.fixture
def arrow() -> Any:
    """pyarrow, with its Parquet module."""
    pytest.importorskip("pyarrow.parquet", reason="pyarrow (the extra `parquet`) is not installed")
    import pyarrow
    import pyarrow.parquet

    return pyarrow


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_row_of_parquet_is_a_document(arrow: Any, tmp_path: Path, kind: str) -> None:
    rows = ["one", "zwei é", "", "four"] * 3
    column = arrow.array(rows)
    if kind == "dictionary":
        column = column.dictionary_encode()
    else:
        column = column.cast(getattr(arrow, kind)())
    table = arrow.table({"id": list(range(12)), "body": column})
    arrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    assert texts(tmp_path / "a.parquet", "body") == [row for row in rows if row]
    names = [document.name for document in documents_of(tmp_path / "a.parquet", "a", "body")]
    assert names[:4] == ["a, row 1", "a, row 2", "a, row 4", "a, row 5"]


def test_parquet_text_that_is_not_utf8_is_refused_by_its_row(arrow: Any, tmp_path: Path) -> None:
    """The message advised to convert the Parquet file with iconv."""
    raw = arrow.array([b"one", b"tw\xff"], arrow.binary())
    text = arrow.StringArray.from_buffers(2, *raw.buffers()[1:])
    arrow.parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row near row 1 .*'text' that is not UTF-8: write the"):
        texts(tmp_path / "a.parquet")


def test_parquet_is_read_one_row_group_at_a_time(arrow: Any, tmp_path: Path) -> None:
    """A damaged second group raises an error only after the first group has been read."""
    rows = [f"{number} " + "x" * 1000 for number in range(20)]
    path = tmp_path / "a.parquet"
    arrow.parquet.write_table(
        arrow.table({"text": rows}),
        path,
        row_group_size=10,
        compression="gzip",
        use_dictionary=False,
    )
    at = arrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[at : at + 60] = b"\xff" * 60
    path.write_bytes(raw)
    documents = iter(documents_of(path, "a", "text"))
    assert [next(documents).name for _ in range(10)][-1] == "a, row 10"
    with pytest.raises(DataError, match="a cannot be read as Parquet"):
        next(documents)


def test_invalid_parquet_is_refused(arrow: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    arrow.parquet.write_table(arrow.table({"id": [1, 2], "body": ["a", None]}), path)
    with pytest.raises(DataError, match=r"a\.parquet has no column 'text'.*'id', 'body'"):
        texts(path)
    with pytest.raises(DataError, match="the column 'id' is of type int64; it must hold strings"):
        texts(path, "id")
    with pytest.raises(DataError, match="row 2: the field 'body' is null"):
        texts(path, "body")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        texts(path, "body")


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a.jsonl", ['{"x": 1, "x": 2, "text": "a"}', '{"text": "a", "text": "b"}'],
         r"a\.jsonl, line 2 has several fields 'text'"),
        ("a.csv", ["text,text", "a,b"], r"a\.csv has several columns 'text'"),
    ],
)  # fmt: skip
def test_second_text_of_a_record_is_not_dropped(
    tmp_path: Path, name: str, lines: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        texts(write(tmp_path / name, *lines))


def test_parquet_with_two_texts_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow has no Parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table([["x"], ["y"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match=r"a\.parquet has several columns 'text'"):
        texts(path)
