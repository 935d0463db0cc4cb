"""The arguments of `--data`: the resulting text, and refused arguments."""

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import Text
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.sources.read_options import ReadOptions


def open_words(*words: str | Path, licence: str | None = None, **options: Any) -> Text:
    return open_text(tuple(map(str, words)), ReadOptions(**options), licence=licence)


def names(text: Text) -> list[str]:
    return [document.name.rpartition("/")[2] for document in text.documents]


def test_files_keep_order_and_licence(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "empty.txt"):
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    text = open_words(tmp_path / "b.txt", tmp_path, licence="CC0")
    assert names(text) == ["b.txt", "a.txt"]
    assert names(text) == ["b.txt", "a.txt"], "a second reading"
    assert (text.licence, text.built_in, text.shards) == ("CC0", False, ())
    assert text.name == f"{tmp_path / 'b.txt'}, {tmp_path}"
    assert open_words(tmp_path).licence == "not stated"


def test_name_of_many_words_is_short(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcde"]
    for path in paths:
        path.write_text("x")
    assert open_words(*paths).name.endswith("/c and 2 more")


def test_default_is_the_text_of_python() -> None:
    nothing, named = open_words(), open_words("builtin:python")
    expected = python_text(Path(sysconfig.get_path("stdlib")))
    assert nothing.name == named.name == expected.name
    assert nothing.built_in
    assert named.built_in
    assert names(nothing) == names(named) == names(expected)


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("builtin:", {}, "builtin: .*builtin:python"),
        ("builtin:python", {"licence": "CC0"}, "--data-licence is 'CC0', .*: remove it"),
        ("builtin:Python", {}, "builtin:Python .*builtin:python"),
        ("ftp://host/a", {}, "ftp://host/a is neither an http nor an https address"),
        ("a.txt,empty", {}, "a.txt,empty is not a file.*: to name several, repeat --data"),
        ("n" * 300, {}, "nnn is not a file"),
        ("empty", {}, "empty: all of the 2 files are empty"),
        ("a.txt", {"text_field": "body"}, r"--text-field body .* only plain text"),
    ],
)
def test_unusable_word_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    options: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    Path("empty").mkdir()
    Path("empty/a.txt").touch()
    Path("empty/b.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(DataError, match=message):
        open_words(word, **options)


def test_words_of_all_kinds_make_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "b"}) + "\n")
    text = open_words("builtin:python", tmp_path, text_field="body", licence="CC0")
    every = list(text.documents)
    assert [document.name.rpartition("/")[2] for document in every[-2:]] == [
        "a.txt",
        "b.jsonl, line 1",
    ]
    assert every[0].name.startswith("topics/")
    assert text.licence.startswith("PSF-2.0")
    assert text.licence.endswith("; CC0")
    assert not text.built_in


def test_options_apply_to_the_built_in_text_and_not_to_shards(tmp_path: Path) -> None:
    divided = open_words("builtin:python", split_at="\ndef ")
    assert len(names(divided)) > 5 * len(names(open_words()))
    assert not divided.built_in
    with pytest.raises(DataError, match="--text-field body"):
        open_words("builtin:python", text_field="body")
    (tmp_path / "train.tokens").write_bytes(b"x")
    for options in ({"split_at": "x"}, {"text_field": "body"}):
        with pytest.raises(DataError, match=r"--text-field and --split-at .* already tokenized"):
            open_words(tmp_path, **options)


def test_shards_of_a_run_are_read(tmp_path: Path) -> None:
    for name in ("train.tokens", "val.tokens", "tokenizer.tiktoken", "data.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in open_words(tmp_path).shards] == ["train.tokens", "val.tokens"]
    only = open_words(tmp_path / "val.tokens", licence="CC0")
    assert ([path.name for path in only.shards], only.licence) == (["val.tokens"], "CC0")
    (tmp_path / "a.txt").write_text("text")
    for others in (tmp_path / "a.txt", "builtin:python", "http://host/a.txt"):
        with pytest.raises(DataError, match=r"shards \(\*\.tokens\) and text \(.*\) cannot be"):
            open_words(tmp_path, others)


def test_name_that_is_not_utf8_is_refused_but_not_its_folder(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("text")
    with pytest.raises(DataError, match=r"caf\\udce9.*not valid UTF-8"):
        open_words(path)
    assert len(names(open_words(tmp_path))) == 1
