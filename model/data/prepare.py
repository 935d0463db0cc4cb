"""Prepare: turns a text into a tokenizer and two shards, in a run's `data/` folder.

  data/tokenizer.tiktoken   ranks of the vocabulary
  data/train.tokens         shard of training text
  data/val.tokens           shard of validation text
  data/data.json            description of the text and of the tokenizer, without its ranks, and the
                            sha256 of each shard

END_OF_TEXT separates documents. The vocabulary is learned only from the training text. The text is
read as a stream three times: to plan the split, to learn a vocabulary, and to tokenize the text.
Memory grows by a few bytes per document.
"""

import hashlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import read_tokenizer
from logitd.model.data.errors import DataError
from logitd.model.data.reuse import reuse_shards, shards_sha256
from logitd.model.data.shards import (
    DESCRIPTION,
    Shard,
    ShardWriter,
    open_shard,
    shard_sha256,
    write_shard,
)
from logitd.model.data.sources.document import Text
from logitd.model.data.special_names import SpecialNames
from logitd.model.data.split import Side, Split, lot_of, sides, split_text
from logitd.model.data.vocabulary import (
    check,
    encode,
    learn,
    require_end_of_text,
    tokenizer_sha256,
)
from logitd.model.files import CONFIG_BYTES, VOCABULARY_BYTES, parse_json, read_regular, write_whole
from logitd.model.first_error import first_error
from logitd.model.plural import pluralize
from logitd.model.text.published import published_tokenizer
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer, TokenizerError, parse_ranks

RANKS = "tokenizer.tiktoken"
"""File name of the vocabulary."""
CONFIG = "config.json"
"""File of a checkpoint whose section `tokenizer` describes the vocabulary."""
CHECKED_PIECES = 64
"""Number of pieces that are decoded to check that a tokenizer loses no text."""


@dataclass(frozen=True)
class PreparedText:
    """A text as token ids."""

    tokenizer: Tokenizer
    train: Shard
    val: Shard
    record: Mapping[str, Any]  # part of every checkpoint

    @property
    def special_ids(self) -> bool:
        """True if names of special tokens in the text were encoded as the tokens' ids."""
        return bool(self.record.get("special_tokens") == "ids")


@dataclass
class Found:
    """Counts of properties of a text that its user may not expect."""

    names: Counter[str]  # of special tokens, by name
    lines: int
    windows_lines: int  # ending in CR LF

    @property
    def mostly_windows(self) -> bool:
        return 2 * self.windows_lines > self.lines


def prepare_text(
    text: Text,
    folder: Path,
    *,
    vocabulary: str | Tokenizer = "own",
    vocab_size: int = 0,
    val_fraction: float,
    special_ids: bool = False,
) -> PreparedText:
    """Learn or read the vocabulary, tokenize every document, and write `folder`. Raises DataError.

    vocabulary    "own": learn a vocabulary of `vocab_size` ids from the text. Otherwise the name or
                  path that `published_vocabulary` reads, or a checkpoint's tokenizer
    val_fraction  share of the text that is held out for validation
    special_ids   encode names of special tokens as their ids instead of as plain text. For shards:
                  how they were encoded
    """
    folder.mkdir(parents=True, exist_ok=True)
    split = split_text(text.documents, val_fraction)
    tokenizer = _tokenizer(text, vocabulary, vocab_size, split, special_ids=special_ids)
    identity = tokenizer_sha256(tokenizer)
    paths, vocab = (folder / "train.tokens", folder / "val.tokens"), tokenizer.vocab_size
    with (
        write_shard(paths[0], vocab_size=vocab, tokenizer_sha256=identity) as train_writer,
        write_shard(paths[1], vocab_size=vocab, tokenizer_sha256=identity) as val_writer,
    ):
        writers: dict[Side, ShardWriter] = {"train": train_writer, "val": val_writer}
        if text.shards:
            sha256, found = shards_sha256(text.shards, tokenizer), Found(Counter(), 0, 0)
            documents = reuse_shards(text.shards, tokenizer, val_fraction, writers)
        else:
            sha256, documents, found = _tokenize(
                text, tokenizer, split, writers, special_ids=special_ids
            )
    train, val = (open_shard(path, identity) for path in paths)
    record = {
        "name": text.name,
        "licence": text.licence,
        "sha256": sha256,
        "documents": documents,
        "bytes": train.text_bytes + val.text_bytes,
        "train_bytes": train.text_bytes,
        "val_bytes": val.text_bytes,
        "val_fraction": val_fraction,
        "train_tokens": train.count,
        "val_tokens": val.count,
        "built_in": text.built_in,
        **({"python_split": _python_split(text, split, val_fraction)} if text.python else {}),
        "python": sys.version.split()[0],
        "special_tokens": "ids" if special_ids else "text",
        **({"special_names": dict(found.names)} if found.names else {}),
        **({"windows_lines": found.windows_lines} if found.mostly_windows else {}),
        **({"downloads": list(text.downloads)} if text.downloads else {}),
    }
    tokenizer.write_ranks(folder / RANKS)
    shards = {path.name: shard_sha256(path) for path in paths}
    document = {"record": record, "shards": shards, **tokenizer.description()}
    write_whole(folder / DESCRIPTION, (json.dumps(document, indent=2) + "\n").encode())
    return PreparedText(tokenizer, train, val, record)


def _python_split(text: Text, split: Split, val_fraction: float) -> dict[str, Any]:
    """What finds the held-out part of Python's own text again, without the rest of the text."""
    lots = {lot_of([each.name.encode()]) for each in text.documents if each.drawn_by_name}
    return split.description(val_fraction, lots)


def text_sha256(text: Text, tokenizer: Tokenizer) -> str:
    if text.shards:
        return shards_sha256(text.shards, tokenizer)
    digest = hashlib.sha256()
    for document in text.documents:
        for piece in document.pieces():
            digest.update(piece.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _tokenizer(
    text: Text, vocabulary: str | Tokenizer, vocab_size: int, split: Split, *, special_ids: bool
) -> Tokenizer:
    if isinstance(vocabulary, Tokenizer):
        require_end_of_text(vocabulary, "the checkpoint's tokenizer")
        return vocabulary
    if vocabulary != "own":
        return published_vocabulary(vocabulary)
    if text.shards:
        ranks = text.shards[0].with_name(RANKS)
        raise DataError(
            f"{text.name} is already tokenized, so no vocabulary can be learned from it: name the "
            f"tokenizer that wrote it, for example --tokenizer {shlex.quote(str(ranks))}"
        )
    names = SpecialNames([END_OF_TEXT])
    pieces = (
        part
        for document in text.documents
        for side, piece in sides(document, split, names)
        if side == "train"
        for part in (piece.split(END_OF_TEXT) if special_ids else [piece])
    )
    return learn(pieces, vocab_size)


def published_vocabulary(name: str) -> Tokenizer:
    """Read a published encoding, given by name, or a ranks file or a Hugging Face `tokenizer.json`,
    given by path. The ranks file of a run or a checkpoint is read with the description next to it.
    Raises DataError."""
    try:
        if (described := _described_vocabulary(Path(name))) is not None:
            tokenizer = described
        elif Path(name).suffix == ".json" and Path(name).is_file():
            # Gaps between ids may be closed, because no weights depend on the ids yet.
            tokenizer = read_tokenizer(Path(name), skip_normalizer=False).tokenizer
        else:
            tokenizer = published_tokenizer(name)
    except TokenizerError as error:
        raise DataError(str(error)) from error
    except ConvertError as error:  # may name flags of `logitd import`
        raise DataError(
            f"the tokenizer {name} cannot be used; `logitd import` says: {error}"
        ) from error
    require_end_of_text(tokenizer, f"the tokenizer {name}")
    return tokenizer


def _described_vocabulary(path: Path) -> Tokenizer | None:
    """The tokenizer of the ranks file of a run or a checkpoint; None for other files. Raises
    DataError."""
    if path.name != RANKS or not path.is_file():
        return None
    for name in (DESCRIPTION, CONFIG):
        if not (beside := path.with_name(name)).is_file():
            continue
        try:
            document = parse_json(read_regular(beside, CONFIG_BYTES))
            description = document["tokenizer"] if name == CONFIG else document
            ranks = parse_ranks(read_regular(path, VOCABULARY_BYTES), RANKS)
            return Tokenizer.described(description, ranks)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{beside} does not describe the tokenizer of {path} ({error}): to use the ranks "
                "alone, copy them to another name"
            ) from error
    return None


def _tokenize(
    text: Text,
    tokenizer: Tokenizer,
    split: Split,
    writers: Mapping[Side, ShardWriter],
    *,
    special_ids: bool,
) -> tuple[str, int, Found]:
    """Encode every document, piece by piece, and append the ids to the training or validation
    shard. Returns the sha256 of the text, the number of documents, and what was counted."""
    assert tokenizer.end_of_text is not None
    names = SpecialNames(tokenizer.special_tokens)
    digest, found = hashlib.sha256(), Found(Counter(), 0, 0)
    count = unchecked = 0
    for document in text.documents:
        count += 1
        touched: set[Side] = set()
        for side, piece in sides(document, split, names):
            raw = piece.encode()
            if unchecked < CHECKED_PIECES:
                check(tokenizer, piece)
                unchecked += 1
            digest.update(raw)
            found.names.update(names.find(piece))
            found.lines += piece.count("\n")
            found.windows_lines += piece.count("\r\n")
            writers[side].append(encode(tokenizer, piece, special_ids=special_ids), len(raw))
            touched.add(side)
        digest.update(b"\0")
        for side in touched:
            writers[side].append([tokenizer.end_of_text], 0)
            writers[side].end_document()
    return digest.hexdigest(), count, found


class _Record(BaseModel):
    """The description of a text. It may have further members."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    licence: str
    sha256: str
    documents: int
    bytes: int
    train_bytes: int
    val_bytes: int
    train_tokens: int
    val_tokens: int
    built_in: bool
    special_names: dict[str, int] = {}


class _Prepared(BaseModel):
    record: _Record


def read_prepared(folder: Path) -> PreparedText:
    """Read the files that `prepare_text` wrote, for a resumed run."""
    try:
        document = parse_json(read_regular(folder / DESCRIPTION, CONFIG_BYTES))
        ranks = parse_ranks(read_regular(folder / RANKS, VOCABULARY_BYTES), RANKS)
        _Prepared.model_validate(document)
        tokenizer = Tokenizer.described(document, ranks)
    except ValidationError as error:
        raise DataError(f"{folder / DESCRIPTION}: {first_error(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the prepared text in {folder} cannot be read: {error}") from error
    identity = tokenizer_sha256(tokenizer)
    return PreparedText(
        tokenizer,
        open_shard(folder / "train.tokens", identity),
        open_shard(folder / "val.tokens", identity),
        document["record"],
    )


def require_window(prepared: PreparedText, context_length: int) -> None:
    """Raise DataError if the training or the validation text is shorter than one window."""
    record, shards = prepared.record, {"training": prepared.train, "validation": prepared.val}
    side, shard = min(shards.items(), key=lambda item: item[1].count)
    if shard.count > context_length:
        return
    fits = shard.count - 1
    near = 4 * fits >= context_length  # do not suggest a much shorter context
    shorter = f", or a context_length of at most {fits}" if near else ""
    raise DataError(
        f"the {side} text has {pluralize(shard.count, 'token')} ("
        f"{pluralize(shard.text_bytes, 'byte')} of {record['bytes']} in "
        f"{pluralize(record['documents'], 'document')}), but a window needs "
        f"{context_length + 1} (context_length {context_length} and the token after "
        f"it): use more text, or another val_fraction{shorter}"
    )
