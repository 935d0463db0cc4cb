"""What the words of `--data` give."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from logitd.model.data.sources.document import Text, TextError
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.sources.read_options import ReadOptions


def open_words(*words: str | Path, licence: str = "not stated", **options: Any) -> Text:
    return open_text(tuple(map(str, words)), ReadOptions(**options), licence=licence)


def names(text: Text) -> list[str]:
    return [document.name.rpartition("/")[2] for document in text.documents]


def test_files_keep_their_licence_and_their_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "empty.txt"):
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    text = open_words(tmp_path / "b.txt", tmp_path, licence="CC0")
    assert names(text) == ["b.txt", "a.txt"]
    assert names(text) == ["b.txt", "a.txt"], "a second reading"
    assert (text.licence, text.built_in, text.shards) == ("CC0", False, ())
    assert text.name == f"{tmp_path / 'b.txt'}, {tmp_path}"
    assert open_words(tmp_path).licence == "not stated"


def test_many_words_are_named_in_short(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcde"]
    for path in paths:
        path.write_text("x")
    assert open_words(*paths).name.endswith("/c and 2 more")


def test_no_word_and_the_name_of_pythons_text_are_the_same() -> None:
    nothing, named = open_words(), open_words("builtin:python")
    expected = python_text(Path(sysconfig.get_path("stdlib")))
    assert nothing.name == named.name == expected.name
    assert nothing.built_in
    assert named.built_in
    assert names(nothing) == names(named) == names(expected)


@pytest.mark.parametrize(
    "word",
    ["builtin:", "builtin:large", "builtin:Python"],
)
def test_what_is_not_built_in_is_refused(word: str) -> None:
    with pytest.raises(TextError, match=f"{word} .*builtin:python"):
        open_words(word)


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


def test_texts_without_a_word_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(TextError, match="2 files, and all are empty"):
        open_words(tmp_path)


def test_a_field_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(TextError, match=r"--text-field body .* only plain text"):
        open_words(tmp_path / "a.txt", text_field="body")


def test_options_are_not_ignored_for_other_than_files(tmp_path: Path) -> None:
    divided = open_words("builtin:python", split_at="\ndef ")
    assert len(names(divided)) > 5 * len(names(open_words()))
    assert not divided.built_in
    with pytest.raises(TextError, match="--text-field body"):
        open_words("builtin:python", text_field="body")
    (tmp_path / "train.tokens").write_bytes(b"x")
    for options in ({"split_at": "x"}, {"text_field": "body"}):
        with pytest.raises(TextError, match=r"--text-field and --split-at .* already tokenised"):
            open_words(tmp_path, **options)


def test_other_addresses_are_refused() -> None:
    with pytest.raises(TextError, match="ftp://host/a is neither an http nor an https address"):
        open_words("ftp://host/a")


def test_of_a_runs_data_folder_the_shards_are_read(tmp_path: Path) -> None:
    for name in ("train.tokens", "val.tokens", "tokenizer.tiktoken", "data.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in open_words(tmp_path).shards] == ["train.tokens", "val.tokens"]
    only = open_words(tmp_path / "val.tokens", licence="CC0")
    assert ([path.name for path in only.shards], only.licence) == (["val.tokens"], "CC0")
    (tmp_path / "a.txt").write_text("text")
    for others in (tmp_path / "a.txt", "builtin:python", "http://host/a.txt"):
        with pytest.raises(TextError, match=r"shards \(\*\.tokens\) and text \(.*\) cannot be"):
            open_words(tmp_path, others)
