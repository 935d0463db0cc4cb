"""Vocabularies of whole words over HTTP: constraints, stop strings, streams and offsets."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd.model.convert.vocabulary.words import word_tokenizer
from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.text.tokenizer import Tokenizer
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import Serving, serving

WORDS = ["<pad>", "the", "cat", "sat", "on", "mat", ".", "42", "7", "{", "}", '"', ":", "<eos>"]
JOINED = [*WORDS[:-1], " ", "\n", "<eos>"]

LONG = "the cat " * 10_000
SOURCE = {"stage": "blocks.0.output", "operation": "set", "from": {"prompt": LONG}}


def vocabulary(words: list[str]) -> Tokenizer:
    return word_tokenizer(dict(enumerate(words)), "here")[0]


def checkpoint(folder: Path, words: list[str]) -> Path:
    gpt = tiny_gpt(tiny_config(vocab_size=len(words), n_layer=2))
    return save_tiny_checkpoint(folder / "words", gpt=gpt, tokenizer=vocabulary(words)).path


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(checkpoint(tmp_path_factory.mktemp("spaced"), WORDS), slots=4) as running:
        yield running


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(checkpoint(tmp_path_factory.mktemp("joined"), JOINED), slots=4) as running:
        yield running


def test_slow_split_pattern_of_a_checkpoint_leaves_the_loop_free(tmp_path: Path) -> None:
    slow = Tokenizer(
        ranks={b" a": 0}, pattern=r"(?:a|aa)+\d|a", special_tokens={}, kind="words"
    )  # fmt: skip
    gpt = tiny_gpt(tiny_config(vocab_size=1, n_layer=1))
    path = save_tiny_checkpoint(tmp_path / "slow", gpt=gpt, tokenizer=slow).path
    with serving(path, slots=4) as server, ThreadPoolExecutor() as threads:
        body = {"prompt": "a" * 60, "max_tokens": 1}
        pending = threads.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
        time.sleep(0.3)
        for _ in range(5):
            assert server.client.get("/health").status_code == 200
        assert not pending.done()
        reply = pending.result()
    assert reply.status_code == 400
    assert "seconds" in reply.json()["error"]["message"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": " (the|a) (cat|dog)( sat)?"}, " the cat( sat)?"),
        ({"regex": "( (42|7)){3}"}, "( (42|7)){3}"),
        ({"choice": [" the mat", " on", "cat"]}, " the mat| on"),
        ({"grammar": 'start: " the" noun " ."\nnoun: " cat" | " mat"'}, r" the (cat|mat) \."),
    ],
)
def test_constraints_include_leading_spaces(
    fields: dict[str, Any], pattern: str, seed: int, spaced: Serving
) -> None:
    (choice,) = spaced.generate("the cat", seed=seed, max_tokens=20, **fields)["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_constraints_work_if_white_space_is_a_token(seed: int, joined: Serving) -> None:
    fields = {"seed": seed, "max_tokens": 30}
    (choice,) = joined.generate("the cat", regex="(the|cat)( sat)*\\.", **fields)["choices"]
    assert (
        re.fullmatch("(the|cat)( sat)*\\.", choice["text"]) or choice["finish_reason"] == "length"
    )
    schema = {"type": "object", "properties": {"cat": {"enum": [42, 7]}}, "required": ["cat"],
              "additionalProperties": False}  # fmt: skip
    (choice,) = joined.generate("the", json_schema=schema, **fields)["choices"]
    assert json.loads(choice["text"]) in ({"cat": 42}, {"cat": 7})


@pytest.mark.parametrize(
    "fields", [{"regex": "the cat"}, {"regex": " the dog"}, {"json_schema": {"type": "object"}}]
)
def test_constraint_that_no_words_match_is_refused(fields: dict[str, Any], spaced: Serving) -> None:
    reply = spaced.post("/generate", {"prompt": "the", **fields, "seed": 1})
    assert reply.status_code == 400
    assert ": no text matches from here on" in reply.json()["error"]["message"]


def test_masks_allow_exactly_the_words_that_continue_a_match() -> None:
    constraint = Compiler(vocabulary(WORDS)).compile(Source("regex", " the (cat|mat)"))
    matcher = constraint.matcher()
    assert matcher.allowed().nonzero()[0].tolist() == [1]
    matcher.advance(1)
    assert matcher.allowed().nonzero()[0].tolist() == [2, 5]
    matcher.advance(5)
    assert matcher.complete


@pytest.mark.parametrize("name", ["spaced", "joined"])
def test_streams_and_stop_strings_work_with_words(
    name: str, request: pytest.FixtureRequest
) -> None:
    server: Serving = request.getfixturevalue(name)
    body = {"prompt": "the cat", "max_tokens": 30, "seed": 5, "ignore_eos": True}
    (whole,) = server.generate(**body)["choices"]
    tokenizer = server.served.checkpoint.tokenizer
    assert whole["text"] == tokenizer.decode(whole["token_ids"])
    lines = server.post("/generate", body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(parts) == whole["text"]
    stop = tokenizer.token_text(whole["token_ids"][4]).strip() or " "
    (cut,) = server.generate(**body, stop=stop)["choices"]
    assert cut["text"] == whole["text"].partition(stop)[0]
    assert cut["stop_reason"] == stop


def test_offsets_of_words_leave_white_space_out(spaced: Serving) -> None:
    text = "the  cat\nsat<eos>."
    pieces = spaced.json("/tokenize", {"prompt": text})["pieces"]
    assert [text[piece["start"] : piece["end"]] for piece in pieces] == [
        "the", "cat", "sat", "<eos>", ".",
    ]  # fmt: skip
    assert [piece["id"] for piece in pieces] == [1, 2, 3, 13, 6]
    assert spaced.json("/detokenize", {"tokens": [1, 2]})["prompt"] == " the cat"


def test_unknown_word_is_rejected_by_name(spaced: Serving) -> None:
    for path, body in (("/generate", {"prompt": "the dog"}), ("/tokenize", {"prompt": "the dog"}),
                       ("/probs", {"prompt": "the", "tokens": ["dog"]})):  # fmt: skip
        reply = spaced.post(path, body)
        assert reply.status_code == 400
        assert "'dog', at character" in reply.json()["error"]["message"]


def test_continuations_of_a_text_begin_a_word(spaced: Serving) -> None:
    reply = spaced.json("/score", {"prompt": "the", "continuations": ["cat sat", " mat"]})
    scores = reply["prompts"][0]["continuations"]
    assert [score["token_ids"] for score in scores] == [[2, 3], [5]]


def test_long_white_space_is_not_a_long_prompt(spaced: Serving) -> None:
    assert (
        spaced.generate("the" + " \n" * 5000 + "cat", max_tokens=1)["usage"]["prompt_tokens"] == 2
    )


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/generate", {}, "make at least"),
        ("/generate", {"prompt": "the", "interventions": [SOURCE]}, "make at least"),
        ("/probs", {"prompt": "the", "tokens": [LONG]}, "tokens needs a single token"),
    ],
)
def test_text_of_too_many_words_is_refused_before_it_is_encoded(
    spaced: Serving,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    message: str,
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    assert message in spaced.refused(path, {"prompt": LONG, **fields}).message
    assert LONG not in encoded
