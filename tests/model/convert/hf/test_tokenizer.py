"""An imported `tokenizer.json` produces the same ids as in the `tokenizers` library, or it is
refused with a reason."""

import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.added import with_ends
from logitd.model.convert.hf.export import tokenizer_document
from logitd.model.convert.hf.tokenizer import QWEN2_PATTERN, read_tokenizer
from logitd.model.convert.probe import probe_text
from logitd.model.convert.vocabulary.words import character_tokenizer
from logitd.model.text.published import published_tokenizer
from logitd.model.text.tokenizer import Tokenizer, TokenizerError
from tests.model.convert.theirs import SAMPLE, their_tokenizer
from tests.model.factories import byte_tokenizer, merging_tokenizer

TEXTS = st.text(
    st.sampled_from("ab cS'tTe1234\n\r\t.,(){}é€😀\u00a0") | st.characters(codec="utf-8")
)


def read(tokenizer: Any, path: Path, **options: bool) -> ForeignTokenizer:
    tokenizer.save(str(path / "tokenizer.json"))
    return read_tokenizer(path / "tokenizer.json", **{"skip_normalizer": False} | options)


def document(path: Path) -> dict[str, Any]:
    their_tokenizer().save(str(path / "tokenizer.json"))
    return json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))


def read_document(tokenizer_json: dict[str, Any], path: Path) -> ForeignTokenizer:
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
    return read_tokenizer(path / "tokenizer.json", skip_normalizer=False)


@pytest.mark.parametrize("pattern", [None, QWEN2_PATTERN, r"\p{N}{1,2}+|\s+|[^\s\p{N}]+$|\S"])
@pytest.mark.parametrize("special_first", [False, True])
@pytest.mark.hypothesis
def test_ids_are_the_librarys(pattern: str | None, special_first: bool, tmp_path: Path) -> None:
    library = their_tokenizer(pattern=pattern, special_first=special_first)
    vocabulary = read(library, tmp_path)
    assert vocabulary.order is None, "ids are the library's"

    @given(TEXTS)
    def same(text: str) -> None:
        # In the library it would be the special token; here it is plain text.
        assume(not any(special in text for special in vocabulary.tokenizer.special_tokens))
        ids = vocabulary.tokenizer.encode(text)
        assert ids == library.encode(text).ids

    same()
    assert vocabulary.tokenizer.special_tokens.keys() == {"<|endoftext|>", "<|user|>"}
    name = "<|user|>"
    (token_id,) = vocabulary.tokenizer.encode(name, special_ids=True)
    assert [token_id] == library.encode(name).ids


def test_broken_conversion_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(their_tokenizer(), tmp_path)
    monkeypatch.setattr("logitd.model.convert.hf.tokenizer.GPT2_PATTERN", r"\p{L}+")
    with pytest.raises(ConvertError, match=r"drops \d+ of the text's \d+ bytes"):
        read(their_tokenizer(), tmp_path)


def swap_merges(tokenizer_json: dict[str, Any]) -> None:
    merges = tokenizer_json["model"]["merges"]
    merges[3], merges[60] = merges[60], merges[3]


def drop_merge(tokenizer_json: dict[str, Any]) -> None:
    del tokenizer_json["model"]["merges"][-1]


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tokenizer_json: tokenizer_json.update(changes)


def change_model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tokenizer_json: tokenizer_json["model"].update(changes)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (swap_merges, "is out of order; .* of the ids"),
        (drop_merge, "would be merged from .*, which is not one of its merges"),
        (change(normalizer={"type": "Lowercase"}), "normalizer Lowercase.* --skip-normalizer"),
        (change(pre_tokenizer=None), "splits texts with None"),
        (change(pre_tokenizer={"type": "Metaspace"}), "splits texts with Metaspace"),
        (
            change(pre_tokenizer={"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]}),
            "splits texts with Digits and then ByteLevel",
        ),
        (change(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "add_prefix_space"),
        (change_model(type="Unigram"), "model is Unigram; only byte-level BPE"),
        (change_model(byte_fallback=True), "SentencePiece's BPE"),
        (change_model(continuing_subword_prefix="##"), "continuing_subword_prefix is '##'"),
        (change_model(vocab={"▁the": 0}, merges=[]), "the token '▁the' .*byte-level"),
        (change(added_tokens=[{"id": 5, "content": "<x>"}]), "has the id of another token"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused(
    damage: Callable[[dict[str, Any]], None], sentence: str, tmp_path: Path
) -> None:
    tokenizer_json = document(tmp_path)
    damage(tokenizer_json)
    with pytest.raises(ConvertError, match=sentence):
        read_document(tokenizer_json, tmp_path)


def test_normalizer_can_be_left_out_with_a_notice(tmp_path: Path) -> None:
    tokenizer_json = document(tmp_path) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=True)
    (note,) = tokenizer.notes
    assert "normalizer NFC is not imported" in note


def write_files(folder: Path, **files: Any) -> None:
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (380,)),
        ({"config": {"eos_token_id": [381, 380]}}, (381, 380)),
        ({"config": {"eos_token_id": 300}}, (380, 300)),
        ({"config": {"eos_token_id": 999}}, (380,)),
        ({"config": {"eos_token_id": 380}, "generation_config": {"eos_token_id": 381}}, (381,)),
        ({"config": {"eos_token_id": 381}, "generation_config": {"eos_token_id": None}}, (381,)),
        (
            {"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}},
             "generation_config": {"eos_token_id": [381]}},
            (380, 381),
        ),
        ({"special_tokens_map": {"eos_token": "<|user|>"}}, (381,)),
        (
            {"tokenizer_config": {"eos_token": "<|endoftext|>"},
             "special_tokens_map": {"eos_token": "<|user|>"}},
            (381,),
        ),
        ({"tokenizer_config": {"eos_token": "the"}}, (380,)),
    ],
)  # fmt: skip
def test_ends_of_a_text_come_from_the_folder(
    files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    write_files(tmp_path, **files)
    vocabulary = with_ends(read(their_tokenizer(), tmp_path), tmp_path)
    assert vocabulary.tokenizer.ends == ends
    assert vocabulary.tokenizer.end_of_text == ends[0]
    assert any("999" in note for note in vocabulary.notes) == ("999" in str(files))


def test_import_without_an_end_of_text_has_a_note(tmp_path: Path) -> None:
    characters = ForeignTokenizer(tokenizer=character_tokenizer({0: "a", 1: "b"}))
    assert "no end of text" in with_ends(characters, tmp_path).notes[-1]
    write_files(tmp_path, generation_config={"eos_token_id": 1, "temperature": 0.6})
    ended = with_ends(characters, tmp_path)
    assert ended.tokenizer.ends == (1,)
    (note,) = ended.notes
    assert "temperature 0.6" in note


TOKEN_FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)


@pytest.mark.hypothesis
def test_added_tokens_are_the_librarys(tmp_path: Path) -> None:
    contents = ["  ", "    ", "<tool>", "naïve", "<|x|>", "1234"]

    @given(
        st.lists(st.tuples(st.sampled_from(contents), TOKEN_FLAGS), unique_by=lambda t: t[0]),
        st.lists(st.sampled_from([*contents, " ", "\n", "a", "<|user|>", "2"])).map("".join),
    )
    def same(tokens: list[tuple[str, dict[str, bool]]], text: str) -> None:
        library = their_tokenizer()
        for content, flags in tokens:
            library.add_tokens([tokenizers.AddedToken(content, **flags)])
        tokenizer = read(library, tmp_path).tokenizer
        ids = library.encode(text).ids
        assert tokenizer.encode(text, special_ids=True) == ids
        written = Library.from_str(json.dumps(tokenizer_document(tokenizer)))
        assert written.encode(text).ids == ids
        write_files(tmp_path, tokenizer=tokenizer_document(tokenizer))
        back = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False).tokenizer
        assert back.description() == tokenizer.description()

    same()


@pytest.mark.parametrize("older", [False, True])
def test_neighboring_files_add_tokens_as_in_transformers(older: bool, tmp_path: Path) -> None:
    their_tokenizer().save(str(tmp_path / "tokenizer.json"))
    flags = {"lstrip": False, "single_word": False, "normalized": False}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            "381": {"content": "<|user|>", "rstrip": True, "special": True} | flags,
            "382": {"content": "   ", "rstrip": False, "special": False} | flags,
        },
    }
    if older:
        del config["added_tokens_decoder"]
        write_files(tmp_path, added_tokens={"   ": 382, "<pad>": 383},
                    special_tokens_map={"pad_token": "<pad>"})  # fmt: skip
    write_files(tmp_path, tokenizer_config=config)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False)
    for text in ("a    b<|user|>  \n c", "<pad>   <|user|>x"):
        ids = vocabulary.tokenizer.encode(text, special_ids=True)
        assert ids == library(text, add_special_tokens=False).input_ids


def test_older_list_of_added_tokens_changes_no_token_of_the_library(tmp_path: Path) -> None:
    library = their_tokenizer()
    library.add_special_tokens([tokenizers.AddedToken("<|start|>", rstrip=True)])
    read(library, tmp_path)
    write_files(tmp_path, added_tokens={"<|start|>": 382, "<|user|>": 381})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False).tokenizer
    text = "<|start|>  \n<|user|> x"
    assert vocabulary.encode(text, special_ids=True) == theirs(text).input_ids
    assert "<|start|>" in vocabulary.special_tokens
    write_files(tmp_path, added_tokens={"<|start|>": 383})
    with pytest.raises(ConvertError, match=r"added_tokens.json gives .* id 383, .* 382"):
        read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False)


@pytest.mark.parametrize("listed", [False, True])
def test_token_of_texts_with_a_role_is_met_in_texts(listed: bool, tmp_path: Path) -> None:
    library = their_tokenizer()
    if listed:
        library.add_special_tokens(["!"])
    library.save(str(tmp_path / "tokenizer.json"))
    write_files(tmp_path, tokenizer_config={"pad_token": "!"})
    vocabulary = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False).tokenizer
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="!")
    assert vocabulary.encode("a! !b") == theirs("a! !b").input_ids
    assert "!" in vocabulary.added_tokens


def added(**members: Any) -> dict[str, Any]:
    return {"tokenizer": {"added_tokens": [{"id": 380, "content": "<x>", **members}]}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": {"shuffle": True}}, "tokenizer.json: shuffle is True"),
        (added(fuzzy=True), "fuzzy is True"),
        (added(id=-1), "id of the added token '<x>' is -1; expected an integer, at least 0"),
        ({"tokenizer": {"pre_tokenizer": {"type": "ByteLevel", "upper": 1}}}, "upper is 1"),
        ({"tokenizer": {"decoder": {"type": "Metaspace"}}}, "Metaspace"),
        ({"tokenizer": {"post_processor": {"type": "Reverse"}}}, "Reverse"),
        ({"tokenizer_config": {"do_lower_case": True}}, "do_lower_case is True"),
        ({"tokenizer_config": {"add_prefix_space": True}}, "add_prefix_space is True"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "<|user|>"}}}},
         r"<\|user\|>.* 7,.* 381"),
        ({"added_tokens": {"<x>": 381}}, r"<\|user\|>.*<x>.*381"),
        ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id.*'2'"),
    ],
)  # fmt: skip
def test_unknown_member_of_the_files_is_refused_by_name(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_files(tmp_path, **files | {"tokenizer": document(tmp_path) | files.get("tokenizer", {})})
    with pytest.raises(ConvertError, match=message):
        read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False)


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({"tokenizer": {"post_processor": {"type": "RobertaProcessing"}}}, "RobertaProcessing"),
        ({"tokenizer_config": {"add_bos_token": True}}, "add_bos_token"),
        ({"tokenizer_config": {"pad_token": "[PAD]"}}, r"pad_token is '\[PAD\]'"),
    ],
)
def test_tokens_around_a_text_are_noted(files: Any, note: str, tmp_path: Path) -> None:
    write_files(tmp_path, **files | {"tokenizer": document(tmp_path) | files.get("tokenizer", {})})
    (said,) = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False).notes
    assert re.search(note, said)


def test_pattern_that_the_class_replaces_is_noted(tmp_path: Path) -> None:
    """transformers 5 uses the pattern of GPT2Tokenizer instead of the file's."""
    tokenizer_json = json.loads(their_tokenizer().to_str())
    split = {"type": "Split", "pattern": {"Regex": r"\d|[^\d]+"}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    cuts = [split | {"invert": False}, level | {"trim_offsets": True}]
    for other in (False, True):
        if other:
            tokenizer_json["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
        write_files(
            tmp_path,
            tokenizer=tokenizer_json,
            tokenizer_config={"tokenizer_class": "GPT2Tokenizer"},
        )
        read = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False)
        library = transformers.AutoTokenizer.from_pretrained(tmp_path)
        same = library("ab 12")["input_ids"] == read.tokenizer.encode("ab 12")
        assert same is not other
        assert ("GPT2Tokenizer instead" in " ".join(read.notes)) is other


@pytest.mark.parametrize("template", ["$A", "[CLS] $A"])
def test_template_is_noted_only_if_it_adds_tokens(template: str, tmp_path: Path) -> None:
    """transformers writes a template that adds nothing for a tokenizer without special tokens."""
    processor = processors.TemplateProcessing(single=template, special_tokens=[("[CLS]", 0)])
    state = json.loads(processor.__getstate__())
    notes = read_document({**document(tmp_path), "post_processor": state}, tmp_path).notes
    assert len(notes) == ("[CLS]" in template)


def test_many_added_tokens_take_seconds(tmp_path: Path) -> None:
    tokenizer_json = document(tmp_path)
    tokenizer_json["added_tokens"] += [
        {"id": 383 + i, "content": f"<{i}>", "special": i % 2 == 0} for i in range(100_000)
    ]
    began = time.process_time()
    vocabulary = read_document(tokenizer_json, tmp_path)  # 382 has no token
    first, *others = vocabulary.tokenizer.encode("<7> <8>")
    assert (first, vocabulary.tokenizer.decode(others)) == (390, " <8>")
    assert time.process_time() - began < 20


def test_token_that_is_too_long_is_refused(tmp_path: Path) -> None:
    tokenizer_json = document(tmp_path)
    tokenizer_json["model"]["vocab"]["x" * 100_000] = 500
    with pytest.raises(ConvertError, match=r"100,000 bytes.*2,048"):
        read_document(tokenizer_json, tmp_path)


BUNDLED = Path(__file__).parents[4] / "checkpoints" / "python-small"


def bundled() -> Tokenizer:
    return published_tokenizer(str(BUNDLED / "tokenizer.tiktoken"))


@pytest.mark.parametrize(
    "make", [byte_tokenizer, merging_tokenizer, bundled], ids=["bytes", "odd", "bundled"]
)
@pytest.mark.hypothesis
def test_written_tokenizer_encodes_alike_and_is_read_back(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = make()
    written = json.dumps(tokenizer_document(tokenizer))
    library = Library.from_str(written)

    @given(TEXTS)
    def same(text: str) -> None:
        assert library.encode(text).ids == tokenizer.encode(text)

    same()
    assert library.encode(probe_text()).ids == tokenizer.encode(probe_text())
    (tmp_path / "tokenizer.json").write_text(written, encoding="utf-8")
    back = read_tokenizer(tmp_path / "tokenizer.json", skip_normalizer=False)
    assert back.order is None
    assert back.tokenizer.ranks == tokenizer.ranks
    assert back.tokenizer.special_tokens == tokenizer.special_tokens


def test_ids_that_the_source_leaves_out_are_closed_up(tmp_path: Path) -> None:
    library, tokenizer_json = their_tokenizer(), document(tmp_path)
    vocab = {name: i + 2 * (i >= 300) for name, i in tokenizer_json["model"]["vocab"].items()}
    tokenizer_json["model"]["vocab"] = vocab
    tokenizer_json["added_tokens"] = [
        token | {"id": token["id"] + 2} for token in tokenizer_json["added_tokens"]
    ]
    moved = read_document(tokenizer_json, tmp_path)
    assert moved.order == [i for i in range(384) if i not in (300, 301)]
    assert moved.tokenizer.encode(SAMPLE) == library.encode(SAMPLE).ids
    assert "some of those have no token" in moved.notes[0]


# Words


def word_level(cut: Any, special: list[str]) -> Library:
    words = [*special, "the", "cat", "sat", ".", "it", "'", "s", "it's", "न्", "²", "[UNK]"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    library = Library(model)
    library.pre_tokenizer = cut
    library.add_special_tokens([*special, "[UNK]"])
    return library


@pytest.mark.parametrize(
    "cut",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(tokenizers.Regex(r"\w+'\w+|\w+|[^\w\s]"), "removed", invert=True),
    ],
    ids=["words and marks", "white space", "own"],
)
@given(st.lists(st.sampled_from(["the", "cat", " ", "\n ", ".", "it", "'", "s", "dog", "न्"])))
@example(["न्", " ", "cat"])
def test_words_are_the_librarys(cut: Any, parts: list[str]) -> None:
    library, text = word_level(cut, ["<pad>"]), "".join(parts)
    ids = library.encode(text).ids
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = read(library, Path(folder)).tokenizer
    if library.token_to_id("[UNK]") in ids:
        with pytest.raises(TokenizerError, match="is not one of the"):
            tokenizer.encode(text)
    else:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids).split() == library.decode(ids).split()


def test_raised_digit_is_a_mark_as_in_the_library(tmp_path: Path) -> None:
    """It is a part of a word in Python's expressions."""
    library = word_level(pre_tokenizers.Whitespace(), [])
    ids = read(library, tmp_path).tokenizer.encode("the cat²")
    assert ids == library.encode("the cat²").ids


def test_other_ways_to_cut_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConvertError, match=r"splits texts with Digits; for .* words, only Whitespace, W"
    ):
        read(word_level(pre_tokenizers.Digits(), []), tmp_path)
    library = word_level(pre_tokenizers.Whitespace(), [])
    library.normalizer = normalizers.Lowercase()
    with pytest.raises(ConvertError, match=r"normalizer Lowercase.* --skip-normalizer"):
        read(library, tmp_path)
