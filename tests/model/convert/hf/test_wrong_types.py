"""A member of a wrong type, in any file of a Hugging Face vocabulary, is accepted or refused with a
ConvertError that names the file."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.added import with_ends
from logitd.model.convert.hf.merges import BYTE_CHARACTERS
from logitd.model.convert.vocabulary.files import vocabulary_in
from tests.model.damage import places

VALUES = [json.dumps(value) for value in (7, "x", [3], {"a": [1]})]
MOST_PLACES = 36
"""Number of members of a file that are replaced; the rest are entries of its vocabulary."""
BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}
TOKENIZER = {
    "added_tokens": [{"id": 257, "content": "<x>", "special": True, "normalized": False}],
    "normalizer": {"type": "Sequence", "normalizers": []},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    },
    "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}]},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "merges": [["a", "b"]], "vocab": {"ab": 256, **BYTES}},
}
WORDS = {
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]},
    "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
BESIDE = {
    "tokenizer_config": {
        "eos_token": {"content": "<x>"},
        "pad_token": "<x>",
        "additional_special_tokens": ["<x>"],
        "extra_special_tokens": {"image_token": "<x>"},
        "added_tokens_decoder": {"257": {"content": "<x>", "special": True}},
        "chat_template": "{{ messages[0].content }}",
    },
    "special_tokens_map": {"eos_token": "<x>", "additional_special_tokens": ["<x>"]},
    "added_tokens": {"<x>": 257},
    "generation_config": {"eos_token_id": [257], "temperature": 0.5},
    "config": {"eos_token_id": 257},
}
ALONE = {"merges": [["a", "b"]], "vocab": {"ab": 256, **BYTES}}


def write(folder: Path, **files: Any) -> None:
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def read(path: Path) -> None:
    vocabulary = vocabulary_in(path, skip_normalizer=False)
    if vocabulary is not None:
        with_ends(vocabulary, path.parent)


def check(document: Any, file: str, vocabulary: Path) -> int:
    """Replace each member of a file by each of the wrong values, and read the vocabulary. Returns
    the number of refused files."""
    write(vocabulary.parent, **{file: document})
    read(vocabulary)
    document, messages = copy.deepcopy(document), list[str]()
    for container, key in places(document)[:MOST_PLACES]:
        right = container[key]
        for value in VALUES:
            container[key] = json.loads(value)
            write(vocabulary.parent, **{file: document})
            try:
                read(vocabulary)
            except ConvertError as error:
                messages.append(str(error))
        container[key] = right
    assert [said for said in messages if str(vocabulary.parent) not in said] == []
    return len(messages)


def test_wrong_type_in_a_tokenizer_json_is_refused(tmp_path: Path) -> None:
    assert check(TOKENIZER, "tokenizer", tmp_path / "tokenizer.json") > 60


def test_wrong_type_in_a_tokenizer_of_words_is_refused(tmp_path: Path) -> None:
    assert check(WORDS, "tokenizer", tmp_path / "tokenizer.json") > 20


@pytest.mark.parametrize("file", list(BESIDE))
def test_wrong_type_beside_a_tokenizer_json_is_refused(file: str, tmp_path: Path) -> None:
    write(tmp_path, tokenizer=WORDS | {"added_tokens": TOKENIZER["added_tokens"]})
    assert check(BESIDE[file], file, tmp_path / "tokenizer.json") > 1


@pytest.mark.parametrize("file", list(ALONE))
def test_wrong_type_in_a_vocabulary_with_merges_is_refused(file: str, tmp_path: Path) -> None:
    write(tmp_path, **ALONE)
    assert check(ALONE[file], file, tmp_path / "vocab.json") > 5
