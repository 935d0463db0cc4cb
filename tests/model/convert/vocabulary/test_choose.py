"""Vocabularies in every form that training scripts save: the ids equal the ids of a plain
encoder."""

import collections
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.pt_file import read_pt, without_tensors
from logitd.model.convert.vocabulary.choose import choose_vocabulary

CHARACTERS = sorted("\n !,.0123abcdefgABCé€😀")
STOI = {character: index for index, character in enumerate(CHARACTERS)}
ITOS = dict(enumerate(CHARACTERS))
TEXT = "A bad cab,\nfée €: 😀!".replace(":", "")

WORDS = ["the", "cat", "sat", "on", "a", "mat", ".", ",", "café"]


def chosen(
    named: str | None = None,
    *,
    contents: dict[str, Any] | None = None,
    folder: Path = Path("nowhere/at/all"),
    rows: int = len(CHARACTERS),
    **more: Any,
) -> ForeignTokenizer:
    return choose_vocabulary(
        named, contents=contents or {}, folder=folder, facts=more.pop("facts", {}), rows=rows,
        **more,
    )  # fmt: skip


def as_text(table: dict[int, str]) -> dict[str, str]:
    return {str(key): value for key, value in table.items()}


SHAPES: dict[str, Any] = {
    "stoi and itos": {"stoi": STOI, "itos": ITOS},
    "stoi alone": {"stoi": STOI},
    "itos as a list, and config": {"itos": CHARACTERS, "config": {"n_layer": 2}},
    "keys of JSON": {"stoi": STOI, "itos": as_text(ITOS)},
    "characters as a list": {"chars": CHARACTERS},
    "characters as a string": {"chars": "".join(CHARACTERS)},
    "vocab as a list": {"vocab": CHARACTERS, "vocab_size": len(CHARACTERS)},
    "vocab by token": {"vocab": STOI},
    "vocab by id": {"vocab": ITOS},
    "token2id": {"token2id": STOI, "id2token": as_text(ITOS)},
    "char_to_int": {"vocab": CHARACTERS, "char_to_int": STOI, "int_to_char": ITOS},
    "word_to_idx": {"word_to_idx": STOI},
    "nested": {"tokenizer": {"stoi": STOI, "itos": ITOS}},
}


def check_characters(vocabulary: ForeignTokenizer) -> None:
    """Compare a vocabulary with the usual hand-written encoder for characters."""
    ids = [STOI[character] for character in TEXT]
    assert vocabulary.order is None
    assert vocabulary.tokenizer.vocab_size == len(CHARACTERS)
    assert vocabulary.tokenizer.encode(TEXT) == ids
    assert vocabulary.tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("shape", SHAPES)
def test_vocabulary_in_the_checkpoint_is_read(shape: str) -> None:
    vocabulary = chosen(contents=SHAPES[shape])
    check_characters(vocabulary)
    assert "ids is from '" in vocabulary.notes[0]
    assert "the checkpoint" in vocabulary.notes[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["pickle", "json"])
def test_vocabulary_next_to_the_model_is_read(shape: str, form: str, tmp_path: Path) -> None:
    if form == "json":
        path = tmp_path / "vocab.json"
        path.write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    else:
        path = tmp_path / "meta.pkl"
        path.write_bytes(pickle.dumps(SHAPES[shape]))
    vocabulary = chosen(folder=tmp_path)
    check_characters(vocabulary)
    assert vocabulary.notes[0].endswith(f"is from {path}")


def test_vocabulary_may_be_in_a_section_of_a_section(tmp_path: Path) -> None:
    """A file near the checkpoint was taken instead."""
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": "".join(reversed(CHARACTERS))}))
    check_characters(chosen(contents={"config": {"tokenizer": {"stoi": STOI}}}, folder=tmp_path))


@pytest.mark.parametrize(
    "whole",
    [STOI, ITOS, (STOI, ITOS), (ITOS, STOI), CHARACTERS, collections.OrderedDict(STOI)],
    ids=["stoi", "itos", "both", "both turned", "list", "ordered"],
)
def test_whole_pickle_may_be_a_vocabulary(whole: Any, tmp_path: Path) -> None:
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(whole))
    check_characters(chosen(folder=tmp_path))


class SimpleTokenizer:
    """A tokenizer object that is pickled whole."""

    def __init__(self) -> None:
        self.stoi, self.itos, self.unused = STOI, ITOS, SimpleTokenizer


def test_object_is_read_without_its_class(tmp_path: Path) -> None:
    raw = pickle.dumps(SimpleTokenizer())
    gone = raw.replace(b"SimpleTokenizer", b"SimpleTokenizeR")  # a class that does not exist
    assert gone != raw
    (tmp_path / "tokenizer.pkl").write_bytes(gone)
    check_characters(chosen(folder=tmp_path))


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


class Bare:
    """An object that is pickled as a call without arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (SimpleTokenizer, ())


def test_pickle_that_calls_without_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": STOI, "x": Bare()}))
    with pytest.raises(ConvertError, match=r"refers to \S+SimpleTokenizer; creating that would"):
        chosen(folder=tmp_path)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickle_that_calls_something_is_refused_and_calls_nothing(
    inside: bool, protocol: int, tmp_path: Path
) -> None:
    hostile: Any = Hostile(tmp_path / "touched")
    raw = pickle.dumps({"stoi": STOI, "x": hostile} if inside else hostile, protocol)
    path = tmp_path / "meta.pkl"
    path.write_bytes(raw)
    sentence = r"it refers to \S+; creating that would run code"
    with pytest.raises(ConvertError, match=sentence):
        chosen(folder=tmp_path)
    with pytest.raises(ConvertError, match=sentence):
        chosen(str(path))
    assert not (tmp_path / "touched").exists()
    pickle.loads(raw)
    assert (tmp_path / "touched").exists(), "it would have"


@pytest.mark.parametrize(
    "place",
    [
        "meta.pkl", "my_vocab.pkl", "Tokenizer/vocab.pkl", "vocab/stoi.pkl", "data/plays/meta.pkl",
        "../vocab/v_vocab.pkl", "../data/plays/meta.pkl", "../tokenizer/char_to_idx.pkl",
    ],
)  # fmt: skip
def test_usual_places_are_searched(place: str, tmp_path: Path) -> None:
    path = (tmp_path / "out" / place).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"stoi": STOI}))
    (tmp_path / "out").mkdir(exist_ok=True)
    vocabulary = chosen(folder=tmp_path / "out")
    check_characters(vocabulary)
    assert str(path) in vocabulary.notes[0]


def save_characters(path: Path, characters: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"itos": characters}))


def test_disagreeing_vocabularies_are_refused(tmp_path: Path) -> None:
    save_characters(tmp_path / "data" / "one" / "meta.pkl", CHARACTERS)
    save_characters(tmp_path / "data" / "two" / "meta.pkl", CHARACTERS[::-1])
    sentence = r"fit the model's 22 rows and disagree: \S+one/meta\.pkl, \S+two/meta\.pkl\. .* --to"
    with pytest.raises(ConvertError, match=sentence):
        chosen(folder=tmp_path)
    save_characters(tmp_path / "data" / "two" / "meta.pkl", CHARACTERS)
    check_characters(chosen(folder=tmp_path))
    save_characters(tmp_path / "data" / "two" / "meta.pkl", CHARACTERS[:5])
    check_characters(chosen(folder=tmp_path))  # only one of them fits


def test_named_vocabulary_has_precedence(tmp_path: Path) -> None:
    save_characters(tmp_path / "meta.pkl", CHARACTERS[::-1])
    save_characters(tmp_path / "other.pkl", [*CHARACTERS[1:], CHARACTERS[0]])
    inside = {"stoi": STOI}
    assert chosen(folder=tmp_path).tokenizer.token_text(0) == CHARACTERS[-1]
    assert chosen(folder=tmp_path, contents=inside).tokenizer.token_text(0) == CHARACTERS[0]
    named = chosen(str(tmp_path / "other.pkl"), folder=tmp_path, contents=inside)
    assert named.tokenizer.token_text(0) == CHARACTERS[1]


def test_nanogpts_data_folder_has_precedence(tmp_path: Path) -> None:
    save_characters(tmp_path / "data" / "one" / "meta.pkl", CHARACTERS[::-1])
    save_characters(tmp_path / "data" / "two" / "meta.pkl", CHARACTERS)
    vocabulary = chosen(folder=tmp_path / "out", facts={"dataset": "two"})
    check_characters(vocabulary)


def test_contradictory_vocabulary_is_refused() -> None:
    for contents, sentence in (
        ({"stoi": STOI, "itos": CHARACTERS[::-1]}, None),
        (
            {"stoi": {"a": 0, "b": 1}, "itos": {0: "b", 1: "a"}},
            "'itos' is not the inverse of 'stoi'",
        ),
        ({"stoi": {"a": 0, "b": 1}, "chars": ["a", "z"]}, "'chars' has 'z', which 'stoi' lacks"),
        ({"chars": ["a", "b"], "vocab": ["b", "a"]}, "'chars' and 'vocab' are different"),
        ({"stoi": {"a": 0, "b": 0}}, "'a' and 'b' share the id 0"),
        ({"itos": ["a", "a"]}, "'a' has two ids, 0 and 1"),
        ({"itos": ["a", ""]}, "the text of id 1 is empty"),
        ({"itos": ["a", "\ud800"]}, "is not Unicode"),
        ({"stoi": {"a": -1, "b": 0}}, "has the id -1"),
    ):
        if sentence is None:
            check_characters(chosen(contents=contents))  # a list next to a dictionary has no ids
            continue
        with pytest.raises(ConvertError, match=sentence):
            chosen(contents=contents, rows=2)


def test_other_entries_of_a_checkpoint_are_not_vocabularies() -> None:
    contents = {
        "vocab_size": 22, "vocab": 22, "tokens": 5, "words": None, "decoder": {"n_layer": 2},
        "history": [{"step": 1}], "config": {"chars": CHARACTERS, "n_head": 2}, "tokenizer": "gpt2",
    }  # fmt: skip
    check_characters(chosen(contents=contents))
    data = {"words": ["emma", "olivia"], "tokens": ["a", "b"], "chars": CHARACTERS, "merges": []}
    check_characters(chosen(contents=data))  # names the text that it was trained on
    del contents["config"]
    with pytest.raises(ConvertError, match=r"Its settings name gpt2: try --tokenizer gpt2\."):
        chosen(contents=contents, rows=50_304)
    with pytest.raises(ConvertError, match=r"no vocabulary for the model's 22 ids") as caught:
        chosen(contents=contents)
    assert "try --tokenizer" not in str(caught.value)


def test_contents_exclude_tensors(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2)}
    optimizer = {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 1.0}]}
    whole = {"model": state, "optimizer": optimizer, "itos": ITOS, "config": {"n_layer": 2},
             "loss": torch.ones(1), 5: "a key that is not text"}  # fmt: skip
    torch.save(whole, tmp_path / "ckpt.pt")
    contents = without_tensors(read_pt(tmp_path / "ckpt.pt"))
    assert contents == {"itos": ITOS, "config": {"n_layer": 2}}


# Rows of the embedding


@pytest.mark.parametrize(
    ("ids", "rows", "settings"),
    [
        (65, 65, None), (65, 128, None), (65, 72, None), (65, 80, None), (50257, 50304, None),
        (1000, 1020, None), (65, 512, {"vocab_size": 65}), (65, 300, {"n_vocab": 65}),
    ],
)  # fmt: skip
def test_rows_beyond_the_ids_are_padding(ids: int, rows: int, settings: Any) -> None:
    texts = [chr(0x20000 + index) for index in range(ids)]
    vocabulary = chosen(contents={"itos": texts, "config": settings or {}}, rows=rows)
    assert vocabulary.tokenizer.vocab_size == ids


@pytest.mark.parametrize("key", ["chars", "vocab"])
def test_list_without_ids_may_not_begin_at_zero(key: str) -> None:
    """The characters of a source whose id 0 is padding got the ids of their neighbors."""
    characters = [chr(0x20000 + index) for index in range(65)]
    for rows in (66, 72):
        with pytest.raises(ConvertError, match=r"is a list of 65 tokens, so its first id may not"):
            chosen(contents={key: characters, "config": {"vocab_size": 66}}, rows=rows)
    stated = chosen(contents={key: characters, "config": {"vocab_size": 65}}, rows=72)
    assert stated.tokenizer.encode(characters[7]) == [7]
    with pytest.raises(ConvertError, match=r"the special token '<pad>' and .* the same id, 0"):
        chosen(contents={key: characters, "special_tokens": {"<pad>": 0}}, rows=65)


@pytest.mark.parametrize(
    ("ids", "rows", "sentence"),
    [
        (45, 36, r"36 rows .* ids up to 44: they do not belong together\. .* --tokenizer"),
        (1, 50257, r"50,257 rows .* 1 ids: 50,256 rows without a token .* --unused-rows"),
        (45, 65, r"65 rows .* 45 ids: 20 rows without a token"),
        (980, 1001, r"1,001 rows .* 980 ids: 21 rows"),
    ],
)
def test_size_that_does_not_fit_is_refused_with_its_numbers(
    ids: int, rows: int, sentence: str
) -> None:
    texts = [chr(0x20000 + index) for index in range(ids)]
    with pytest.raises(ConvertError, match=sentence):
        chosen(contents={"itos": texts}, rows=rows)
    if ids < rows:
        vocabulary = chosen(contents={"itos": texts}, rows=rows, unused_rows=True)
        assert vocabulary.tokenizer.vocab_size == ids
    else:
        with pytest.raises(ConvertError, match="do not belong together"):
            chosen(contents={"itos": texts}, rows=rows, unused_rows=True)


@pytest.mark.parametrize("working_directory", [False, True])
def test_missing_vocabulary_is_reported_with_the_fix(
    working_directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConvertError) as caught:
        chosen(folder=Path() if working_directory else tmp_path)
    assert f"{tmp_path} has no vocabulary for the model's 22 ids" in str(caught.value)
    assert "tokenizer.model is in the format of SentencePiece or another library" in str(
        caught.value
    )
    assert "tokenizer_config" not in str(caught.value)
    (tmp_path / "input.txt").write_text("".join(CHARACTERS) * 3, encoding="utf-8")
    with pytest.raises(ConvertError, match=r"exactly 22 .* --tokenizer characters:\S+input\.txt "):
        chosen(folder=tmp_path)


# Special tokens and characters of several code points


def test_entries_that_are_not_characters_are_special_tokens() -> None:
    texts = ["<pad>", "a", "b", "[UNK]", "c", "<eos>", "e\u0301", "PAD", " "]
    vocabulary = chosen(contents={"itos": texts}, rows=9)
    tokenizer = vocabulary.tokenizer
    assert tokenizer.encode("ab c") == [1, 2, 8, 4]
    assert tokenizer.special_tokens == {
        "<pad>": 0, "[UNK]": 3, "<eos>": 5, "e\u0301": 6, "PAD": 7,
    }  # fmt: skip
    assert tokenizer.end_of_text == 5
    assert [tokenizer.token_text(i) for i in range(9)] == texts
    assert tokenizer.encode("<eos>", special_ids=True) == [5]


def test_ids_without_a_text_get_a_name() -> None:
    vocabulary = chosen(contents={"stoi": {"a": 1, "b": 2, "c": 5}}, rows=6)
    assert vocabulary.tokenizer.encode("cab") == [5, 1, 2]
    assert vocabulary.tokenizer.special_tokens == {
        "<|extra_0|>": 0, "<|extra_3|>": 3, "<|extra_4|>": 4,
    }  # fmt: skip
    assert "no text for the ids 0, 3, 4" in vocabulary.notes[1]


@given(st.lists(st.sampled_from(CHARACTERS)).map("".join))
def test_text_of_known_characters_round_trips(text: str) -> None:
    tokenizer = CHARACTER_TOKENIZER.tokenizer
    assert tokenizer.encode(text) == [STOI[character] for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


CHARACTER_TOKENIZER = chosen(contents={"stoi": STOI})


# Values of --tokenizer


def test_characters_of_a_text_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes((TEXT * 2).replace("\n", "\r\n").encode())
    plain = sorted(set((tmp_path / "input.txt").read_text(encoding="utf-8")))
    named = f"characters:{tmp_path / 'input.txt'}"
    vocabulary = chosen(named, rows=len(plain))
    assert vocabulary.tokenizer.encode(TEXT) == [plain.index(character) for character in TEXT]
    assert "the characters of" in vocabulary.notes[0]
    shifted = chosen(f"{named},first=2,last=1", rows=len(plain) + 3)
    assert shifted.tokenizer.encode(TEXT) == [2 + plain.index(c) for c in TEXT]
    assert sorted(shifted.tokenizer.special_tokens.values()) == [0, 1, len(plain) + 2]
    raw = sorted(set((tmp_path / "input.txt").read_bytes().decode()))
    exact = chosen(named, rows=len(raw))
    assert exact.tokenizer.encode("\r\n") == [raw.index("\r"), raw.index("\n")]


def test_check_text_is_the_last_resort_for_a_vocabulary(tmp_path: Path) -> None:
    """The characters of the check text become the vocabulary only if no other vocabulary is found
    and the model has as many ids as the text has distinct characters. A wrong choice would show in
    the measured loss."""
    text = tmp_path / "elsewhere.txt"
    text.write_text("".join(CHARACTERS) * 2, encoding="utf-8")
    vocabulary = chosen(folder=tmp_path / "empty", text=text)
    check_characters(vocabulary)
    assert f"the characters of {text}" in vocabulary.notes[0]
    inside = chosen(contents={"itos": CHARACTERS[::-1]}, text=text)
    assert inside.tokenizer.encode("a") == [CHARACTERS[::-1].index("a")], "the file's own first"
    with pytest.raises(ConvertError, match="has no vocabulary"):
        chosen(folder=tmp_path / "empty", text=text, rows=len(CHARACTERS) + 1)
    with pytest.raises(ConvertError, match="has no vocabulary"):
        chosen(folder=tmp_path / "empty", text=tmp_path / "missing.txt")


def test_text_with_other_characters_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abc", encoding="utf-8")
    named = f"characters:{tmp_path / 'input.txt'}"
    with pytest.raises(ConvertError, match=r"3 different .* 4 ids: .* first=1 .* or last=1"):
        chosen(named, rows=4)
    with pytest.raises(ConvertError, match=r"3 different .* 2 ids: .* it has 1 too many"):
        chosen(named, rows=2)
    with pytest.raises(ConvertError, match=r"3 different characters and 2 extra ids"):
        chosen(f"{named},first=2", rows=4)
    with pytest.raises(ConvertError, match="does not exist"):
        chosen("characters:nowhere.txt", rows=4)


NUMBERED = [
    *("{word}\t{index}", "{word} {index}", "{word}: {index}", "{word},{index}"),
    *("{index}\t{word}", "{index} {word}", "{index}: {word}", "{index}, {word}"),
]


@pytest.mark.parametrize("form", ["lines", "crlf", "list", "object", *NUMBERED])
def test_file_of_words_is_a_vocabulary(form: str, tmp_path: Path) -> None:
    """Lines with the id in front, or with a comma or a colon, became tokens as a whole."""
    path = tmp_path / ("words.json" if form in ("list", "object") else "words.txt")
    numbered = [form.format(word=word, index=index) for index, word in enumerate(WORDS)]
    path.write_bytes({
        "lines": "\n".join(WORDS) + "\n",
        "crlf": "\r\n".join(WORDS),
        "list": json.dumps(WORDS),
        "object": json.dumps({word: index for index, word in enumerate(WORDS)}),
    }.get(form, "\n".join(reversed(numbered))).encode())  # fmt: skip
    vocabulary = chosen(f"words:{path}", rows=len(WORDS))
    assert vocabulary.tokenizer.encode("the cat sat") == [0, 1, 2]
    with pytest.raises(ConvertError, match=r"rows .* 9 ids"):
        chosen(f"words:{path}", rows=100)
    more = chosen(f"words:{path},first=1", rows=len(WORDS) + 1)
    assert more.tokenizer.encode("the cat sat") == [1, 2, 3]


@pytest.mark.parametrize("form", NUMBERED)
def test_numbered_characters_may_hold_any_character(form: str, tmp_path: Path) -> None:
    characters = [*"\n ,.:012ab", "\t"]
    lines = [form.format(word=character, index=i) for i, character in enumerate(characters)]
    (tmp_path / "vocab.txt").write_text("\n".join(lines), encoding="utf-8")
    vocabulary = chosen(str(tmp_path / "vocab.txt"), rows=len(characters))
    assert vocabulary.tokenizer.encode("".join(characters)) == list(range(len(characters)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("the 9\ncat 4\nsat 4\n", "several lines have the same one"),
        ("the 9\ncat 40\nsat 400\n", "398 ids have no text"),
        ("word,id\nthe,0\ncat,1\nsat,2\n", "except the first, 'word,id': remove it"),
        ("0 2\n1 0\n2 1\n", "has two numbers in each line"),
        ("<s>\t0\n▁the\t-3.2\ns\t-4\n▁cat\t-5.11\n", "has several columns, and neither"),
    ],
)
def test_numbers_that_are_not_ids_are_refused(text: str, sentence: str, tmp_path: Path) -> None:
    """Counts of words and the names of columns became parts of the tokens."""
    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConvertError, match=sentence):
        chosen(f"words:{tmp_path / 'words.txt'}", rows=3)


def test_tokens_that_end_with_numbers_are_words(tmp_path: Path) -> None:
    notes = [f"{kind}:{pitch}" for kind in ("ON", "OFF") for pitch in range(4)]
    (tmp_path / "words.txt").write_text("\n".join(notes), encoding="utf-8")
    vocabulary = chosen(f"words:{tmp_path / 'words.txt'}", rows=8)
    assert vocabulary.tokenizer.encode("OFF:0 ON:3") == [4, 3]


def test_list_of_lines_may_hold_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n\n\nb\n", encoding="utf-8")
    vocabulary = chosen(str(tmp_path / "vocab.txt"), rows=3)
    assert vocabulary.tokenizer.encode("a\nb") == [0, 1, 2]
    (tmp_path / "vocab.txt").write_text("a\n\nb\n", encoding="utf-8")
    with pytest.raises(ConvertError, match="line 2 is empty"):
        chosen(str(tmp_path / "vocab.txt"), rows=3)


@pytest.mark.parametrize("written", [repr, json.dumps])
def test_list_of_lines_in_quotes_is_refused(written: Any, tmp_path: Path) -> None:
    """The quotes became parts of the tokens."""
    (tmp_path / "vocab.txt").write_text("\n".join(map(written, "a b\n'")), encoding="utf-8")
    with pytest.raises(ConvertError, match="has its tokens in quotes"):
        chosen(str(tmp_path / "vocab.txt"), rows=5)


def test_list_of_characters_may_be_a_sorted_text(tmp_path: Path) -> None:
    """A file with one character per line may be a list of tokens, or a text whose sorted characters
    are the tokens. If both are possible and give different ids, the import is refused."""
    path = tmp_path / "vocab.txt"
    path.write_text("b\nc\n\n\na\n", encoding="utf-8")
    sentence = r"fit the model's 4 rows and disagree: \S+vocab\.txt, characters:\S+vocab\.txt\."
    with pytest.raises(ConvertError, match=sentence):
        chosen(folder=tmp_path, rows=4)
    assert chosen(f"words:{path}", rows=4).tokenizer.encode("ab\n") == [3, 0, 2]
    assert chosen(f"characters:{path}", rows=4).tokenizer.encode("ab\n") == [1, 2, 0]
    path.write_text("b\nc\na\n", encoding="utf-8")
    assert chosen(folder=tmp_path, rows=3).tokenizer.encode("ab") == [2, 0]  # without line breaks


def test_vocabulary_none_has_token_ids_alone() -> None:
    vocabulary = chosen("none", rows=81, contents={"itos": CHARACTERS})
    assert (vocabulary.tokenizer.kind, vocabulary.tokenizer.vocab_size) == ("none", 81)
    assert "there is no vocabulary" in vocabulary.notes[0]
    for rows, said, ids in ((128, 100, 100), (512, 65, 65), (51_000, 50_257, 50_257), (81, 20, 81)):
        stated = chosen("none", rows=rows, contents={"config": {"vocab_size": said}})
        assert stated.tokenizer.vocab_size == ids


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: "gpt5", "the tokenizer 'gpt5' is not a file; --tokenizer takes gpt2, "),
        (lambda folder: str(folder / "x.json"), "does not hold a vocabulary in a known form"),
        (lambda folder: f"words:{folder / 'x.json'}", "a JSON list of tokens nor"),
        (lambda folder: f"words:{folder / 'y.txt'}", "does not exist"),
    ],
)
def test_wrong_tokenizer_name_is_refused(
    make: Callable[[Path], str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text('{"n_layer": "two"}')
    with pytest.raises(ConvertError, match=sentence):
        chosen(make(tmp_path))
