"""Prepare: from a text to a tokenizer and two shards, in a run's `data/` folder.

  data/tokenizer.tiktoken   ranks
  data/train.tokens         shard
  data/val.tokens           shard
  data/data.json            the record of the text; pattern and special tokens

Documents are separated by END_OF_TEXT. The vocabulary is learned from the training side alone.
Does not choose documents (`model/training/text.py`) or windows (`model/training/batches.py`).
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.presets import Recipe
from model.tokenizer import Tokenizer
from model.training.shards import Shard, ShardWriter, open_shard
from model.training.text import Side, Text, TextError, sides
from model.training.vocabulary import check, learn, ready_made, tokenizer_sha256

CHECKED_PIECES = 64
"""Pieces that are decoded again to see that a tokenizer loses nothing."""


@dataclass(frozen=True)
class PreparedText:
    """What the trainer needs of a text."""

    tokenizer: Tokenizer
    train: Shard
    val: Shard
    record: Mapping[str, Any]


def prepare_text(text: Text, recipe: Recipe, folder: Path) -> PreparedText:
    """Learn or take the vocabulary, tokenise every document, and write `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    fraction, count = recipe.val_fraction, len(text.documents)
    if recipe.tokenizer == "own":
        tokenizer = learn(_training_pieces(text, fraction), recipe.vocab_size)
    else:
        tokenizer = ready_made(recipe.tokenizer)
    identity = tokenizer_sha256(tokenizer)
    digest = hashlib.sha256()
    total = unchecked = 0
    writers: dict[Side, ShardWriter] = {
        side: ShardWriter(
            folder / f"{side}.tokens",
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=identity,
        )
        for side in ("train", "val")
    }
    with writers["train"], writers["val"]:
        for document in text.documents:
            touched: set[Side] = set()
            for side, piece in sides(document, fraction, count):
                raw = piece.encode()
                if unchecked < CHECKED_PIECES:
                    check(tokenizer, piece)
                    unchecked += 1
                digest.update(raw)
                total += len(raw)
                writers[side].append(tokenizer.encode(piece), len(raw))
                touched.add(side)
            digest.update(b"\0")
            for side in touched:
                assert tokenizer.end_of_text is not None
                writers[side].append([tokenizer.end_of_text], 0)
    train = open_shard(folder / "train.tokens", identity)
    val = open_shard(folder / "val.tokens", identity)
    record = {
        "name": text.name,
        "licence": text.licence,
        "sha256": digest.hexdigest(),
        "documents": count,
        "bytes": total,
        "train_bytes": train.text_bytes,
        "val_bytes": val.text_bytes,
        "train_tokens": train.count,
        "val_tokens": val.count,
        "built_in": text.built_in,
        "python": sys.version.split()[0],
    }
    tokenizer.write_ranks(folder / "tokenizer.tiktoken")
    document_ = {
        "record": record,
        "pattern": tokenizer.pattern,
        "special_tokens": tokenizer.special_tokens,
    }
    (folder / "data.json").write_text(json.dumps(document_, indent=2) + "\n", encoding="utf-8")
    return PreparedText(tokenizer, train, val, record)


def read_prepared(folder: Path) -> PreparedText:
    """Read what `prepare_text` wrote: a run is resumed on the very same tokens."""
    try:
        document = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.read_ranks(
            folder / "tokenizer.tiktoken",
            pattern=document["pattern"],
            special_tokens=document["special_tokens"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise TextError(f"the prepared text in {folder} cannot be read: {error}") from error
    identity = tokenizer_sha256(tokenizer)
    return PreparedText(
        tokenizer,
        open_shard(folder / "train.tokens", identity),
        open_shard(folder / "val.tokens", identity),
        document["record"],
    )


def require_window(prepared: PreparedText, context_length: int) -> None:
    """Refuse a text in which a window of the model's context does not fit."""
    for side, shard in (("training", prepared.train), ("validation", prepared.val)):
        if shard.count < context_length + 1:
            raise TextError(
                f"the {side} text has {shard.count} tokens ({shard.text_bytes} bytes), a window "
                f"takes {context_length + 1} (context_length {context_length} and the token after "
                "it): give more text, another val_fraction or a smaller context_length"
            )


def _training_pieces(text: Text, fraction: float) -> Iterator[str]:
    for document in text.documents:
        for side, piece in sides(document, fraction, len(text.documents)):
            if side == "train":
                yield piece
