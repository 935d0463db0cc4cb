"""Reuse: train on shards that another run has tokenised, without tokenising again.

A shard named val.tokens is validation text, the others are training text, as in the run that wrote
them. Without one, documents (each ends with END_OF_TEXT) are held out as those of a text are: of
many, whole ones by the sha256 of their ids; of few, the end of each. Every id is checked first.
Does not read text (`model/data/prepare.py`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.model.data.shards import Shard, ShardWriter, open_shard, outside
from logitd.model.data.split import MANY, Side, lot_of, whole_side
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.data.windows import byte_lengths
from logitd.model.text.tokenizer import Tokenizer

CHUNK = 2**20
"""Ids in memory at a time."""

VALIDATION = "val.tokens"

Ids = npt.NDArray[Any]  # (count,), uint16 or uint32


@dataclass(frozen=True)
class Written:
    """What is known of a text once it is written to shards."""

    sha256: str  # of its content
    documents: int


def reuse_shards(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    val_fraction: float,
    writers: Mapping[Side, ShardWriter],
) -> Written:
    """Copy the ids of shards. Raises ShardError for ids or files that cannot be trained on."""
    shards = [open_shard(path, tokenizer_sha256(tokenizer)) for path in paths]
    end_of_text = tokenizer.end_of_text
    assert end_of_text is not None
    for shard in shards:
        _check_ids(shard, tokenizer.vocab_size)
    documents = [(shard, _document_ends(shard, end_of_text)) for shard in shards]
    count = sum(len(ends) - 1 for _, ends in documents)
    split_is_made = any(path.name == VALIDATION for path in paths)
    lengths, digest = byte_lengths(tokenizer), hashlib.sha256()

    def write(side: Side, ids: Ids) -> None:
        for part in _chunks(ids):
            writers[side].append(part, int(lengths[part].sum()))
            digest.update(part.astype("<u4").tobytes())

    for shard, ends in documents:
        if split_is_made:
            write("val" if shard.path.name == VALIDATION else "train", shard.tokens)
            continue
        for start, end in pairwise(ends):
            ids = shard.tokens[start:end]
            if count >= MANY:
                write(whole_side(_lot(ids), val_fraction), ids)
                continue
            cut = int(len(ids) * (1 - val_fraction))
            write("train", ids[:cut])
            writers["train"].append([end_of_text], 0)
            write("val", ids[cut:])
    return Written(sha256=digest.hexdigest(), documents=count)


def _check_ids(shard: Shard, vocab_size: int) -> None:
    first = 0
    for ids in _chunks(shard.tokens):
        if ids.max() >= vocab_size:
            raise outside(ids, first, vocab_size, str(shard.path))
        first += len(ids)


def _document_ends(shard: Shard, end_of_text: int) -> list[int]:
    """0, and where each document ends: after its END_OF_TEXT, or at the end of the shard."""
    ends, first = [0], 0
    for ids in _chunks(shard.tokens):
        ends += (first + 1 + np.flatnonzero(ids == end_of_text)).tolist()
        first += len(ids)
    if ends[-1] != first:
        ends.append(first)
    return ends


def _chunks(ids: Ids) -> Iterator[Ids]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _lot(ids: Ids) -> int:
    """The number that decides the side of a document, from its ids."""
    digest = hashlib.sha256()
    for part in _chunks(ids):
        digest.update(part.astype("<u4").tobytes())
    return lot_of(digest.digest())
