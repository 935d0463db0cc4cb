"""Published vocabularies: ranks files, `tokenizer.json`, and other files."""

from pathlib import Path

import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.prepare import published_vocabulary
from logitd.model.data.vocabulary import learn, tokenizer_sha256
from logitd.model.text.tokenizer import END_OF_TEXT
from tests.model.conftest import story
from tests.model.convert.theirs import their_tokenizer

LEARNED = learn([story(800)], 340)


def test_ranks_file_is_read_and_others_are_refused(tmp_path: Path) -> None:
    LEARNED.write_ranks(tmp_path / "own.tiktoken")
    tokenizer = published_vocabulary(str(tmp_path / "own.tiktoken"))
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(LEARNED)
    with pytest.raises(DataError, match=r"'no-such-thing'.*'own', one of gpt2"):
        published_vocabulary("no-such-thing")
    (tmp_path / "bad.tiktoken").write_text("not ranks at all\n")
    with pytest.raises(DataError, match=r"line 1 of bad\.tiktoken"):
        published_vocabulary(str(tmp_path / "bad.tiktoken"))


def test_tokenizer_json_has_the_ids_of_its_library(tmp_path: Path) -> None:
    library = their_tokenizer()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = published_vocabulary(str(tmp_path / "tokenizer.json"))
    text = story(800)
    assert tokenizer.encode(text) == library.encode(text).ids
    unended = (tmp_path / "tokenizer.json").read_text("utf-8").replace(END_OF_TEXT, "<|other|>")
    (tmp_path / "unended.json").write_text(unended, "utf-8")
    with pytest.raises(DataError, match=r"tokenizer_config\.json next to it"):
        published_vocabulary(str(tmp_path / "unended.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|other|>"}', "utf-8")
    assert published_vocabulary(str(tmp_path / "unended.json")).end_of_text is not None
    (tmp_path / "list.json").write_text('["a", "b"]')
    with pytest.raises(DataError, match=r"list\.json .*`logitd import` says: "):
        published_vocabulary(str(tmp_path / "list.json"))
