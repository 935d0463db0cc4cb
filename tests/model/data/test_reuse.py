"""Shards of another run are reused unchanged, or refused if they do not fit."""

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data import reuse as module
from logitd.model.data.errors import DataError
from logitd.model.data.reuse import reuse_shards
from logitd.model.data.shards import HEADER, ShardWriter, open_shard, write_shard
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer

BYTES = {bytes([n]): n for n in range(256)}
TOKENIZER = Tokenizer(ranks=BYTES, pattern=".", special_tokens={END_OF_TEXT: 256})
END = 256


IDENTITY = tokenizer_sha256(TOKENIZER)


def write(
    path: Path, documents: list[bytes], *, ended: bool = True, identity: bytes = IDENTITY
) -> Path:
    """Write a shard of byte tokens, and return its path."""
    with writer(path, identity) as shard:
        for number, document in enumerate(documents):
            shard.append(list(document), len(document))
            if ended or number < len(documents) - 1:
                shard.append([END], 0)
            shard.end_document()
    return path


def writer(path: Path, identity: bytes = IDENTITY) -> AbstractContextManager[ShardWriter]:
    return write_shard(path, vocab_size=TOKENIZER.vocab_size, tokenizer_sha256=identity)


def reused(
    folder: Path, *paths: Path, fraction: float = 0.2
) -> tuple[list[bytes], list[bytes], int]:
    """The training documents, the held-out documents, and the number of documents."""
    folder.mkdir(exist_ok=True)
    names = {"train": folder / "train.tokens", "val": folder / "val.tokens"}
    with writer(names["train"]) as train, writer(names["val"]) as val:
        count = reuse_shards(paths, TOKENIZER, fraction, {"train": train, "val": val})
    shards = [open_shard(path, IDENTITY) for path in names.values()]
    sides = []
    for shard in shards:
        raw = [b"\0END" if token == END else bytes([token]) for token in shard.tokens.tolist()]
        sides.append(b"".join(raw).split(b"\0END"))
        assert shard.text_bytes == sum(map(len, sides[-1]))
    return sides[0], sides[1], count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@given(
    documents=st.lists(st.binary(max_size=3).map(bytes.hex).map(str.encode), min_size=20),
    ended=st.booleans(),
    chunk=st.sampled_from([3, 7, 2**20]),
)
def test_documents_stay_whole_and_on_one_side(
    folder: Path, documents: list[bytes], ended: bool, chunk: int
) -> None:
    """The drawn documents are short, so some are equal. All copies of a document are on the same
    side. If one text makes up most of the data, all of its copies are cut at the same place."""
    path = write(folder / "a.tokens", documents, ended=ended or documents[-1] == b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        train, val, count = reused(folder / "out", path)
    together = [shard for side in (train, val) for shard in side]
    given, found = Counter(filter(None, documents)), Counter(filter(None, together))
    cut, pieces = given - found, found - given
    assert len(cut) <= 1
    for text, copies in cut.items():
        places = ([text[:at], text[at:]] * copies for at in range(1, len(text)))
        assert sorted(pieces.elements()) in map(sorted, places)
    whole = documents if ended else documents[:-1]  # the last document has no end token
    assert not {d for d in train if d in whole} & {d for d in val if d in whole} - {
        b"",
        documents[-1],
        *pieces,
    }
    assert count == len(documents)


def test_end_of_a_large_document_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [b"a" * 79, b"b" * 9])
    train, val, count = reused(tmp_path / "out", path)
    assert train == [b"a" * 64, b"b" * 9, b""]
    assert val == [b"a" * 15, b""]
    assert count == 2


def test_existing_split_is_kept(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tokens", [b"a", b"b"])
    more = write(tmp_path / "more.tokens", [b"c"])
    val = write(tmp_path / "val.tokens", [b"d", b"e"])
    assert reused(tmp_path / "out", train, val, more)[:2] == (
        [b"a", b"b", b"c", b""],
        [b"d", b"e", b""],
    )


def test_document_that_another_run_held_out_is_refused(tmp_path: Path) -> None:
    for name, sides in {"a": ([b"1", b"2"], [b"3"]), "b": ([b"3", b"1", b"3"], [b"2"])}.items():
        (tmp_path / name).mkdir()
        for side, documents in zip(("train", "val"), sides, strict=True):
            write(tmp_path / name / f"{side}.tokens", documents)
    with pytest.raises(DataError, match=r"^3 documents of the training shards are in a validation"):
        reused(tmp_path / "out", *sorted(tmp_path.glob("?/*.tokens")))


@pytest.mark.parametrize("documents", [[b"a"], [b"a", b"b", b"c"]])
def test_another_end_of_text_is_refused(tmp_path: Path, documents: list[bytes]) -> None:
    """Both tokenizers have the same special tokens, hence the same hash."""
    special = {END_OF_TEXT: 256, "<|im_end|>": 257}
    ends = [
        Tokenizer(ranks=BYTES, pattern=".", special_tokens=special, end_of_text_name=name)
        for name in special
    ]
    identity, other = map(tokenizer_sha256, ends)
    assert identity == other
    path = write(tmp_path / "train.tokens", documents, identity=identity)
    with (
        writer(tmp_path / "out") as out,
        pytest.raises(DataError, match=r"train\.tokens .* ends with '<\|im_end\|>' \(id 257\)"),
    ):
        reuse_shards([path], ends[1], 0.2, {"train": out, "val": out})


def test_id_outside_the_vocabulary_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    path = write(tmp_path / "a.tokens", [b"a" * 5000])
    raw = bytearray(path.read_bytes())
    at = HEADER.size + 2 * 4321
    raw[at : at + 2] = (50_000).to_bytes(2, "little")
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"token 4,321 of .*a\.tokens has the id 50000, which is "
                       r"outside the vocabulary of 257 ids \(0 to 256\)"):  # fmt: skip
        reused(tmp_path / "out", path)
