"""Reuse: train on shards that another run has tokenised, without tokenising again.

A shard named val.tokens is validation text, the others are training text, as in the run that wrote
them. Without one, documents (each ends with END_OF_TEXT) are held out as those of a text are: of
many, whole ones by the sha256 of their ids; of few, the end of each. Every id is checked first.
Does not read text (`model/data/prepare.py`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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


def reuse_shards(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    val_fraction: float,
    writers: Mapping[Side, ShardWriter],
) -> tuple[str, int]:
    """Copy the ids of shards. Returns the sha256 of the ids and the number of documents. Raises
    ShardError for ids or files that cannot be trained on."""
    shards = [open_shard(path, tokenizer_sha256(tokenizer)) for path in paths]
    end_of_text = tokenizer.end_of_text
    assert end_of_text is not None
    documents = [(shard, _document_ends(shard, tokenizer.vocab_size, end_of_text))
                 for shard in shards]  # fmt: skip
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
    return digest.hexdigest(), count


def _document_ends(shard: Shard, vocab_size: int, end_of_text: int) -> list[int]:
    """0, and the end of each document: after its END_OF_TEXT, or at the end of the shard. Raises
    ShardError for an id outside the vocabulary."""
    ends, first = [0], 0
    for ids in _chunks(shard.tokens):
        if ids.max() >= vocab_size:
            raise outside(ids, first, vocab_size, str(shard.path))
        ends += (first + 1 + np.flatnonzero(ids == end_of_text)).tolist()
        first += len(ids)
    if ends[-1] != first:
        ends.append(first)
    return ends


def _chunks(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def _lot(ids: Ids) -> int:
    """The number that decides the side of a document, from its ids."""
    return lot_of(part.astype("<u4").tobytes() for part in _chunks(ids))
