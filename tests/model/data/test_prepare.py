"""Prepare: shards and records of texts, and texts that are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitd.model.convert.vocabulary.words import character_tokenizer, word_tokenizer
from logitd.model.data.errors import DataError
from logitd.model.data.prepare import (
    PreparedText,
    prepare_text,
    published_vocabulary,
    read_prepared,
    require_window,
)
from logitd.model.data.shards import HEADER, Shard
from logitd.model.data.sources.document import PIECE, Text, text_document
from logitd.model.data.sources.open_text import open_text
from logitd.model.text.chat_template import ChatTemplate
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.training.configuration.presets import PRESETS
from tests.model.conftest import story
from tests.model.factories import CHAT_TEMPLATE, chat_tokenizer

RECIPE = PRESETS["tiny"].recipe


def prepare(text: Text, folder: Path, **given: Any) -> PreparedText:
    values = {"vocab_size": 300, "val_fraction": RECIPE.val_fraction} | given
    return prepare_text(text, folder, **values)


def text_of(*texts: str, **facts: Any) -> Text:
    documents = [text_document(f"{n}", text) for n, text in enumerate(texts)]
    return Text("a text", "CC0", documents, **facts)


def decoded(shard: Shard, tokenizer: Tokenizer) -> list[str]:
    whole = tokenizer.decode(shard.tokens.tolist())
    assert whole.endswith("<|endoftext|>"), "each document is ended"
    return whole.removesuffix("<|endoftext|>").split("<|endoftext|>")


def test_documents_are_separated_and_on_one_side_each(tmp_path: Path) -> None:
    texts = [f"{n}: {story(8, n)}" for n in range(100)]
    downloads = [{"url": "http://host/a.txt", "sha256": "00", "bytes": 3}]
    prepared = prepare(text_of(*texts, downloads=downloads), tmp_path)
    train = decoded(prepared.train, prepared.tokenizer)
    val = decoded(prepared.val, prepared.tokenizer)
    assert sorted([*train, *val]) == sorted(texts)
    assert val == [text for text in texts if text in val]
    assert 8 <= len(val) <= 12
    record = prepared.record
    assert record["documents"] == 100
    assert record["bytes"] == sum(len(text) for text in texts)
    assert record["val_bytes"] == sum(len(text) for text in val)
    assert record["downloads"] == downloads
    assert json.loads((tmp_path / "data.json").read_text())["record"] == record


CONVERSATION = [
    {"role": "user", "content": "red?"},
    {"role": "assistant", "content": "blue.\n" * 40},
]


def test_conversation_has_the_ids_that_serving_sends(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    served = [
        token_id
        for part in ChatTemplate(CHAT_TEMPLATE).render(CONVERSATION, tokenizer)
        for token_id in ([part] if isinstance(part, int) else tokenizer.encode(part))
    ]
    text = text_of(tokenizer.decode(served))
    prepared = prepare(text, tmp_path, vocabulary=tokenizer, special_ids=True)
    assert [*prepared.train.tokens[:-1], *prepared.val.tokens[:-1]] == served
    assert prepared.record["special_names"] == {"<|im_start|>": 3, "<|im_end|>": 2}
    assert (prepared.special_ids, read_prepared(tmp_path).special_ids) == (True, True)
    plain = prepare(text, tmp_path / "plain", vocabulary=tokenizer)
    assert [*plain.train.tokens, *plain.val.tokens].count(257) == 0
    assert (plain.special_ids, plain.record["special_names"]) == (
        False,
        prepared.record["special_names"],
    )


def test_turns_of_a_conversation_are_not_documents(tmp_path: Path) -> None:
    """The id that ends a turn also ends a document: in each pass documents change places, but turns
    must not."""
    tokenizer = chat_tokenizer()
    turns = "<|im_start|>user\n{0}?<|im_end|>\n<|im_start|>assistant\n{0}!<|im_end|>\n"
    texts = [turns.format(number) for number in range(40)]
    folder = tmp_path / "text"
    prepared = prepare(text_of(*texts), folder, vocabulary=tokenizer, special_ids=True)
    assert tokenizer.end_of_text is not None
    again = open_text([str(folder)], licence="CC0")
    reused = prepare(again, tmp_path / "reused", vocabulary=tokenizer, special_ids=True)
    (folder / "val.tokens").unlink()
    alone = open_text([str(folder)], licence="CC0")
    divided = prepare(alone, tmp_path / "divided", vocabulary=tokenizer, special_ids=True)
    found = []
    for one in (prepared, reused, divided):
        shards = [one.train, one.val]
        for shard in shards:
            ends = shard.document_ends(tokenizer.end_of_text)
            parts = np.split(shard.tokens, ends[:-1])
            found.append([tokenizer.decode(part[:-1].tolist()) for part in parts])
    assert sorted(found[0] + found[1]) == sorted(texts)
    assert found[2:4] == found[:2]
    assert sorted(found[4] + found[5]) == sorted(found[0])


def test_name_at_a_border_of_pieces_or_at_the_held_out_cut_stays_whole(tmp_path: Path) -> None:
    """Names at the borders of pieces, and names in the whole stretch in which the cut may be."""
    name = "<|endoftext|>"
    document = "x" * (PIECE - 6) + name + "y" * (PIECE - 13) + name * 3000
    prepared = prepare(text_of(document), tmp_path, special_ids=True)
    assert prepared.val.count > 1
    assert prepared.record["special_names"] == {name: 3001}
    end = prepared.tokenizer.end_of_text
    ids = [*prepared.train.tokens.tolist(), *prepared.val.tokens.tolist()]
    assert ids.count(end) == 3001 + 2


@pytest.mark.parametrize("special_ids", [False, True])
def test_vocabulary_is_learned_without_special_tokens(tmp_path: Path, special_ids: bool) -> None:
    text = text_of("red blue<|endoftext|>\n" * 500)
    prepared = prepare(text, tmp_path, special_ids=special_ids)
    assert (b"endoftext" in prepared.tokenizer.tokens) is not special_ids
    end = prepared.tokenizer.end_of_text
    assert prepared.train.tokens.tolist().count(end) == (451 if special_ids else 0) + 1


def test_same_text_makes_the_same_files(tmp_path: Path) -> None:
    for name in "ab":
        prepare(text_of(story(200)), tmp_path / name)
    for file in ("train.tokens", "val.tokens", "tokenizer.tiktoken", "data.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["One sentence."], r"text has \d+ tokens \(1 byte of 13 in 1 document\), .* needs 33"),
        ([story(60)], r"the validation text has \d+ tokens .* or a context_length of at most 16$"),
        ([f"Sentence {n}." for n in range(40)], "the validation text has .* in 40 documents"),
        (["a"], "the training text has 0 tokens .* another val_fraction$"),
        (["a b"], "text has . tokens .* another val_fraction$"),  # a context of 1 is useless
    ],
)  # fmt: skip
def test_short_text_is_refused_with_its_numbers(
    tmp_path: Path, texts: list[str], message: str
) -> None:
    prepared = prepare(text_of(*texts), tmp_path, val_fraction=0.02)
    with pytest.raises(DataError, match=message):
        require_window(prepared, 32)


def test_shards_need_the_tokenizer_that_wrote_them(tmp_path: Path) -> None:
    prepare(text_of(story(400)), tmp_path / "data")
    text = open_text((str(tmp_path / "data"),))
    beside = tmp_path / "data" / "tokenizer.tiktoken"
    with pytest.raises(DataError, match=re.escape(f"for example --tokenizer {beside}")):
        prepare(text, tmp_path / "again")
    again = prepare(text, tmp_path / "again", vocabulary=str(beside))
    for side in ("train", "val"):
        name = f"{side}.tokens"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "data" / name).read_bytes()
    assert again.record["name"] == str(tmp_path / "data")


@pytest.mark.parametrize("section", [None, "tokenizer"])
def test_ranks_of_a_run_or_checkpoint_are_read_with_their_description(
    tmp_path: Path, section: str | None
) -> None:
    """A pattern and special tokens like those of a chat model."""
    tokenizer = chat_tokenizer()
    prepare(text_of(story(400)), tmp_path / "data", vocabulary=tokenizer, special_ids=True)
    ranks = tmp_path / "data" / "tokenizer.tiktoken"
    if section is None:
        text = open_text((str(tmp_path / "data"),))
        again = prepare(text, tmp_path / "again", vocabulary=str(ranks), special_ids=True)
        assert again.tokenizer.description() == tokenizer.description()
        return
    (tmp_path / "data" / "data.json").unlink()
    config = tmp_path / "data" / "config.json"
    config.write_text(json.dumps({section: tokenizer.description()}))
    assert published_vocabulary(str(ranks)).description() == tokenizer.description()
    config.write_text('{"model": {}}')
    with pytest.raises(DataError, match=r"config\.json does not describe .* another name"):
        published_vocabulary(str(ranks))


MEASURE = """
import resource, sys
from functools import partial
from pathlib import Path
from logitd.model.data.prepare import prepare_text
from logitd.model.data.sources.document import Documents, Text, text_document
from tests.model.conftest import story

megabytes, folder = int(sys.argv[1]), Path(sys.argv[2])
block = story(27_000)[:1_000_000]

def documents():
    for number in range(megabytes):
        yield text_document(str(number), f"{number} {block}")

text = Text("long", "none", Documents(documents))
prepared = prepare_text(text, folder, vocab_size=600, val_fraction=0.05)
print(prepared.record["bytes"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_memory(megabytes: int, folder: Path) -> int:
    """Peak memory in bytes of a process that prepares a text."""
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(megabytes), str(folder)],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert int(output[0]) > megabytes * 1_000_000
    return int(output[1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """If the text were held in memory, 30 MB more text would take 30 MB more memory, and lists of
    its ids would take twice that."""
    small, large = peak_memory(10, tmp_path / "a"), peak_memory(40, tmp_path / "b")
    assert large - small < 12_500_000


WORDS = ["<pad>", "the", "cat", "sat", ".", "<eos>"]


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_imported_vocabulary_is_restored_from_disk(kind: str, tmp_path: Path) -> None:
    """Special tokens come first, the end-of-text token has another name, and some bytes have no
    token."""
    if kind == "words":
        tokenizer, _ = word_tokenizer(dict(enumerate(WORDS)), "here")
    else:
        tokenizer = character_tokenizer(dict(enumerate(["<pad>", *sorted("the cas.\n"), "<eos>"])))
    text = text_of("the cat sat.\n" * 300)
    prepared = prepare(text, tmp_path, vocabulary=tokenizer)
    assert prepared.val.tokens[-1] == tokenizer.end_of_text
    ids = [*prepared.train.tokens[:-1], *prepared.val.tokens[:-1]]  # each side ends the document
    assert ids == tokenizer.encode("the cat sat.\n" * 300)
    again = read_prepared(tmp_path)
    assert again.tokenizer.description() == tokenizer.description()
    assert again.tokenizer.tokens == tokenizer.tokens
    with pytest.raises(DataError, match=r"the text cannot be encoded: .*'[dq]"):
        prepare(text_of("the dog"), tmp_path / "other", vocabulary=tokenizer)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (7, "the document is 7"),
        ({}, "record is missing"),
        ({"record": []}, r"record is \[\]"),
        ({"record": {"name": 7}}, "record.name is 7"),
    ],
)
def test_damaged_description_of_a_prepared_text_is_refused(
    tmp_path: Path, document: object, reason: str
) -> None:
    (tmp_path / "tokenizer.tiktoken").write_bytes(b"")
    (tmp_path / "data.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=f"data.json: {reason}"):
        read_prepared(tmp_path)


@pytest.mark.parametrize("name", ["train.tokens", "val.tokens"])
def test_damaged_shard_is_refused(tmp_path: Path, name: str) -> None:
    """A changed bit often gives another valid id. A resumed run once trained on it."""
    prepare(text_of("the cat sat.\n" * 300), tmp_path)
    read_prepared(tmp_path)
    raw = bytearray((tmp_path / name).read_bytes())
    raw[HEADER.size] ^= 1
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=f"{name} has sha256 .*data.json.*Restore it"):
        read_prepared(tmp_path)
