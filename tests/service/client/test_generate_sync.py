"""The synchronous client is the asynchronous one, without what asyncio needs."""

import ast

import pytest

from logitd.service.client.generate_sync import NAMES, SENTENCES, SOURCE, TARGET, sync_source


def test_the_client_is_current() -> None:
    expected = sync_source(SOURCE.read_text(encoding="utf-8"))
    assert TARGET.read_text(encoding="utf-8") == expected, "run `make client`"


def test_nothing_asynchronous_is_left() -> None:
    tree = ast.parse(TARGET.read_text(encoding="utf-8"))
    kinds = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_every_word_is_one_of_the_source() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert {name for name in NAMES if name not in source} == set()


def test_a_sentence_that_was_changed_is_noticed() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    for sentence in SENTENCES:
        with pytest.raises(ValueError, match="does not say once"):
            sync_source(source.replace(sentence, "something else"))


def test_words_are_changed_whole_and_sentences_kept() -> None:
    source = "\n".join([*SENTENCES, "async with a: await b.aclose(); disasyncio anext_ = 1"])
    *sentences, code = sync_source(source).split("\n")[2:]
    assert sentences == list(SENTENCES.values())
    assert code == "with a: b.close(); disasyncio anext_ = 1"
