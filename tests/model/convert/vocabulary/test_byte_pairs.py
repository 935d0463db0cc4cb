"""Home-made byte pair encodings, compared with the encoders of the lectures on which they are
based."""

import base64
import json
import pickle
from base64 import b64encode
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tiktoken
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.probe import probe_text
from logitd.model.convert.vocabulary.byte_pairs import CUTS, GPT4_PATTERN
from logitd.model.convert.vocabulary.choose import choose_vocabulary
from logitd.model.convert.vocabulary.files import vocabulary_in
from logitd.model.convert.vocabulary.named import named_vocabulary
from logitd.model.text.published import KNOWN_FILES, WITH_MORE
from tests.model.convert.theirs import their_tokenizer
from tests.model.factories import merging_tokenizer

BUNDLED = Path(__file__).parents[4] / "checkpoints" / "python-small"
Merges = dict[tuple[int, int], int]


def replaced(ids: list[int], pair: tuple[int, int], token_id: int) -> list[int]:
    """Replace every occurrence of a pair with one id, from left to right."""
    out, place = list[int](), 0
    while place < len(ids):
        if tuple(ids[place : place + 2]) == pair:
            out.append(token_id)
            place += 2
        else:
            out.append(ids[place])
            place += 1
    return out


def learned(pieces: list[str], count: int, *, first: int = 256) -> Merges:
    """Merges of the most common pairs, learned as in the lecture."""
    rows = [list(piece.encode()) for piece in pieces]
    merges: Merges = {}
    for token_id in range(first, first + count):
        counts: dict[tuple[int, int], int] = {}
        for ids in rows:
            for pair in pairwise(ids):
                counts[pair] = counts.get(pair, 0) + 1
        pair = max(counts, key=counts.__getitem__)
        merges[pair] = token_id
        rows = [replaced(ids, pair, token_id) for ids in rows]
    return merges


def encoded(text: str, merges: Merges, pattern: str | None = None) -> list[int]:
    """The lecture's encoder: of the merges whose pairs occur, apply the earliest; repeat until no
    pair can be merged."""
    out = []
    for piece in [text] if pattern is None else regex.findall(pattern, text):
        ids = list(piece.encode())
        while len(ids) > 1:
            pair = min(pairwise(ids), key=lambda pair: merges.get(pair, 10**9))
            if pair not in merges:
                break
            ids = replaced(ids, pair, merges[pair])
        out += ids
    return out


TEXT = ("the cat sat on the mat and the other cat sat there. it's a café, isn't it? "
        "in 2026 they said: \"the theme is then the thesis\"\n") * 3  # fmt: skip
WHOLE = learned([TEXT], 40)
CUT = learned(regex.findall(GPT4_PATTERN, TEXT), 40)


def vocabulary(merges: Merges) -> dict[int, bytes]:
    tokens = {byte: bytes([byte]) for byte in range(256)}
    for (left, right), token_id in merges.items():
        tokens[token_id] = tokens[left] + tokens[right]
    return tokens


def of(
    contents: Any, rows: int = 296, folder: Path = Path("nowhere"), **more: Any
) -> ForeignTokenizer:
    return choose_vocabulary(None, contents=contents, folder=folder, facts={}, rows=rows, **more)


def texts(merges: Merges) -> dict[str, str]:
    return {str(i): token.decode(errors="replace") for i, token in vocabulary(merges).items()}


def coded(merges: Merges) -> dict[str, str]:
    return {str(i): base64.b64encode(token).decode() for i, token in vocabulary(merges).items()}


SHAPES: dict[str, Any] = {
    "tuples": lambda merges: {"merges": merges},
    "text with commas": lambda merges: {"merges": {f"{a},{b}": i for (a, b), i in merges.items()}},
    "text of tuples": lambda merges: {"merges": {str(pair): i for pair, i in merges.items()}},
    "a list": lambda merges: {"merges": [[list(pair), i] for pair, i in merges.items()]},
    "with bytes": lambda merges: {"merges": merges, "vocab": vocabulary(merges)},
    "with base64": lambda merges: {"merges": merges, "vocab": coded(merges)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_merges_of_ids_encode_as_in_the_lecture(shape: str) -> None:
    given = of(SHAPES[shape](WHOLE))
    assert given.tokenizer.encode(TEXT) == encoded(TEXT, WHOLE)
    assert given.tokenizer.decode(encoded(TEXT, WHOLE)) == TEXT
    assert "texts are not split before merging" in given.notes[1]


WHOLE_TOKENIZER, CUT_TOKENIZER = of({"merges": WHOLE}), of({"merges": CUT})


@given(st.text() | st.text(alphabet="the catsoin.' \n2é"))
def test_any_text_gets_the_ids_of_the_lectures_encoder(text: str) -> None:
    assert WHOLE_TOKENIZER.tokenizer.encode(text) == encoded(text, WHOLE)
    assert CUT_TOKENIZER.tokenizer.encode(text) == encoded(text, CUT, GPT4_PATTERN)


def test_split_pattern_is_assumed_if_no_token_crosses_it() -> None:
    assert CUT_TOKENIZER.tokenizer.pattern == GPT4_PATTERN
    assert (
        "no token crosses a split by GPT-4's pattern, so that is assumed" in CUT_TOKENIZER.notes[1]
    )
    told = of({"merges": CUT, "pattern": r"\s?\S+|\s+"})
    assert told.tokenizer.pattern == r"\s?\S+|\s+"
    assert not [note for note in told.notes if "assumed" in note]


@pytest.mark.parametrize("pattern", CUTS.values(), ids=CUTS)
def test_tokens_decide_the_split_pattern(pattern: str) -> None:
    merges = learned(regex.findall(pattern, probe_text()), 200)
    tokenizer = of({"merges": merges}, rows=456).tokenizer
    assert tokenizer.pattern != r"[\s\S]+"
    assert tokenizer.encode(probe_text()) == encoded(probe_text(), merges, pattern)


def test_special_token_may_have_an_id_in_between(tmp_path: Path) -> None:
    merges = learned([TEXT], 30, first=257)
    name = base64.b64encode(b"[EOD]").decode()
    (tmp_path / "vocab.json").write_text(json.dumps(coded(merges) | {"256": name}))
    by_text = {f"{left},{right}": i for (left, right), i in merges.items()}
    (tmp_path / "merges.json").write_text(json.dumps(by_text))
    given = of({}, rows=287, folder=tmp_path)
    assert given.order is None, "ids are those of the source"
    assert given.tokenizer.encode(TEXT) == encoded(TEXT, merges)
    assert given.tokenizer.special_tokens == {"[EOD]": 256}
    assert given.tokenizer.end_of_text == 256


def test_lectures_file_is_read(tmp_path: Path) -> None:
    lines = ["minbpe v1", GPT4_PATTERN, "1", "<|endoftext|> 296", *(f"{a} {b}" for a, b in CUT)]
    (tmp_path / "my_tokenizer.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = of({}, rows=297, folder=tmp_path)
    assert given.tokenizer.encode(TEXT) == encoded(TEXT, CUT, GPT4_PATTERN)
    assert given.tokenizer.end_of_text == 296
    (tmp_path / "my_tokenizer.model").write_text("minbpe v1\n\nmany\n")
    with pytest.raises(ConvertError, match=r"my_tokenizer\.model is damaged: invalid literal"):
        of({}, folder=tmp_path)


def test_pickled_tiktoken_encoding_is_read(tmp_path: Path) -> None:
    ranks = {token: i for i, token in vocabulary(CUT).items()}
    encoding = tiktoken.Encoding(
        "own", pat_str=GPT4_PATTERN, mergeable_ranks=ranks, special_tokens={"<|bos|>": 296}
    )
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    given = of({}, rows=297, folder=tmp_path)
    assert given.tokenizer.encode(TEXT) == encoding.encode(TEXT)
    assert given.tokenizer.special_tokens == {"<|bos|>": 296}


def ranks_file(path: Path, merges: Merges) -> Path:
    """A file that `tiktoken.load.load_tiktoken_bpe` reads."""
    lines = (b64encode(token) + b" %d\n" % i for i, token in vocabulary(merges).items())
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("name", ["GPT-4's pattern", "GPT-2's pattern", "GPT-4o's pattern"])
def test_ranks_file_encodes_as_tiktoken(name: str, tmp_path: Path) -> None:
    """Texts were cut by logitd's own pattern, and an end of text was made up."""
    text = "the HOW'S it's they're in 2026 12345 67890 3.14159\n\n  x=1000 " * 4
    merges = learned(regex.findall(CUTS[name], text), 24)
    path = ranks_file(tmp_path / "vocab.tiktoken", merges)
    given = of({}, rows=280, folder=tmp_path)
    encoding = tiktoken.Encoding(
        "own", pat_str=CUTS[name], mergeable_ranks=load_tiktoken_bpe(str(path)), special_tokens={}
    )
    assert given.tokenizer.encode(text) == encoding.encode(text)
    assert f"no token crosses a split by {name}" in given.notes[1]
    assert "no special tokens" in given.notes[2]
    assert given.tokenizer.special_tokens == {}
    path.write_bytes(path.read_bytes().replace(b" 279\n", b" 278\n"))
    with pytest.raises(ConvertError, match="have the same rank"):
        named_vocabulary(str(path), ids=280, skip_normalizer=False)


def test_ranks_file_of_a_checkpoint_has_its_pattern_and_special_tokens() -> None:
    path = BUNDLED / "tokenizer.tiktoken"
    given = named_vocabulary(str(path), ids=2048, skip_normalizer=False)
    stated = json.loads((BUNDLED / "config.json").read_text())["tokenizer"]
    assert given.tokenizer.pattern == stated["pattern"]
    assert given.tokenizer.special_tokens == stated["special_tokens"]
    assert given.notes == ()


def test_published_ranks_file_is_known_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ranks_file(tmp_path / "vocab.tiktoken", CUT)
    known = GPT4_PATTERN, {"<|fim_prefix|>": 300}
    monkeypatch.setitem(KNOWN_FILES, sha256(path.read_bytes()).hexdigest(), known)
    monkeypatch.setitem(WITH_MORE, 301, "more")
    given = of({}, rows=301, folder=tmp_path)
    assert (given.tokenizer.pattern, given.tokenizer.special_tokens) == known
    assert "--tokenizer more has the same ranks" in given.notes[1]


@pytest.mark.parametrize(
    ("merges", "sentence"),
    [
        (
            {(97, 98): 256, (256, 99): 257, (98, 99): 258, (97, 258): 259},
            "two merges create b'abc'",
        ),
        ({(97, 300): 256}, "the id 256 is merged from later ids"),
        ({(97, 98): 256, (97, 99): 256}, "the id 256 is created twice"),
        (
            {(98, 99): 256, (97, 98): 257, (257, 99): 258},
            "merged from b'ab' and b'c', but with",
        ),
    ],
)
def test_merges_without_equal_ranks_are_refused(merges: Merges, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence):
        of({"merges": merges}, rows=max(merges.values()) + 1)


def test_texts_must_agree_with_the_merges() -> None:
    with pytest.raises(ConvertError, match="id 256 has the text 'zz', but its merges form b'th'"):
        of({"merges": {(116, 104): 256}, "vocab": {256: "zz"}}, rows=257)


# Merges of texts


def write_older_files(folder: Path, library: tokenizers.Tokenizer, ends: dict[str, int]) -> None:
    document = json.loads(library.to_str())
    (folder / "vocab.json").write_text(json.dumps(document["model"]["vocab"] | ends))
    lines = [merge if isinstance(merge, str) else " ".join(merge)
             for merge in document["model"]["merges"]]  # fmt: skip
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_older_files_are_split_as_their_class_splits(name: str, tmp_path: Path) -> None:
    """GPT-2's pattern was used for every class, and the chat template was left out."""
    write_older_files(tmp_path, their_tokenizer(size=330), {"<|endoftext|>": 330})
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"tokenizer_class": name, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(library).__name__ == name
    given = of({}, rows=331, folder=tmp_path, skip_normalizer=True)
    text = "In 2024, it's 12\n\n 345  x"
    assert given.tokenizer.encode(text) == library(text, add_special_tokens=False)["input_ids"]
    assert given.chat_template == template


def test_gpt2s_older_files_are_read_as_a_tokenizer_json(tmp_path: Path) -> None:
    library = their_tokenizer(size=330)
    ends = {"<|endoftext|>": 330, "<|user|>": 331}
    write_older_files(tmp_path, library, ends)
    given = of({}, rows=332, folder=tmp_path)
    assert given.tokenizer.encode(TEXT) == library.encode(TEXT).ids
    assert given.tokenizer.special_tokens == ends
    assert "GPT-2's is assumed" in given.notes[-1]
    library.save(str(tmp_path / "tokenizer.json"))
    whole = of({}, rows=332, folder=tmp_path)
    assert whole.notes[0].endswith("tokenizer.json"), "which says more"


def test_token_formed_by_merges_is_text(tmp_path: Path) -> None:
    document = json.loads(their_tokenizer(size=330).to_str())["model"]
    vocab = document["vocab"] | {"<b": 330, "<b>": 331, "<pad>": 332}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" "))
              for merge in document["merges"]]  # fmt: skip
    merges += [("<", "b"), ("<b", ">")]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges))
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    given = of({}, rows=333, folder=tmp_path)
    assert given.tokenizer.special_tokens == {"<pad>": 332}
    assert given.tokenizer.encode("the<b>cat") == library.encode("the<b>cat").ids
    assert 331 in given.tokenizer.tokens.values()


def test_merges_that_end_in_whole_words() -> None:
    merges = [("e", "</w>"), ("t", "h"), ("th", "e</w>"), ("t", "</w>"), ("c", "a"),
              ("ca", "t</w>")]  # fmt: skip
    vocab = {"<PAD>": 0, "<UNK>": 1, "the</w>": 2, "cat</w>": 3}
    given = of({"vocab": vocab, "merges": merges}, rows=4)
    assert given.tokenizer.encode("the cat\nthe") == [2, 3, 2]
    assert given.tokenizer.special_tokens == {"<PAD>": 0, "<UNK>": 1}
    with pytest.raises(ConvertError, match="do not form its token 'the</w>' from 'the'"):
        of({"vocab": vocab, "merges": merges[2:]}, rows=4)
    parts = {"vocab": vocab | {"ca": 4}, "merges": merges}
    with pytest.raises(ConvertError, match=r"the token 'ca' is part of a word.* --tokenizer n"):
        of(parts, rows=5)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_model_file_is_read_with_any_line_ends(end: str, tmp_path: Path) -> None:
    lines = ["minbpe v1", GPT4_PATTERN, "1", "<|endoftext|> 296", *(f"{a} {b}" for a, b in CUT)]
    (tmp_path / "my.model").write_bytes((end.join(lines) + end).encode())
    found = vocabulary_in(tmp_path / "my.model", skip_normalizer=False)
    assert found is not None
    assert found.tokenizer.encode(TEXT) == encoded(TEXT, CUT, GPT4_PATTERN)


def test_ranks_with_the_suffix_of_a_model_are_read(tmp_path: Path) -> None:
    """Llama 3's tokenizer.model is such a file; it was taken for SentencePiece's."""
    tokenizer = merging_tokenizer()
    tokenizer.write_ranks(tmp_path / "tokenizer.model")
    found = vocabulary_in(tmp_path / "tokenizer.model", skip_normalizer=False)
    assert found is not None
    assert found.tokenizer.ranks == tokenizer.ranks
