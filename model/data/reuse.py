"""Reuse: trains on shards that another run wrote, without tokenizing the text again.

A shard named val.tokens is validation text and all others are training text, as in the run that
wrote them. If there is no val.tokens, documents are held out by the rule of `split.py`, applied to
their ids instead of their bytes. Every id is checked before it is copied. The hash of a tokenizer
leaves out which special token ends a document, so the documents are checked for that token.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard, ShardWriter, open_shard, outside
from logitd.model.data.split import Side, lot_of, plan_split
from logitd.model.data.vocabulary import tokenizer_sha256
from logitd.model.data.windows import byte_lengths
from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import Tokenizer

CHUNK = 2**20
"""Number of ids in memory at a time."""
VALIDATION = "val.tokens"
Ids = npt.NDArray[Any]  # (count,), uint16 or uint32


def reuse_shards(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    val_fraction: float,
    writers: Mapping[Side, ShardWriter],
) -> int:
    """Copy the ids of shards to the new training and validation shards. Returns the number of
    documents. Raises DataError if a shard is damaged, belongs to another tokenizer, has another end
    of text, or has an id outside the vocabulary, or if a document is both in training and in
    validation shards."""
    shards = [open_shard(path, tokenizer_sha256(tokenizer)) for path in paths]
    end_of_text = tokenizer.end_of_text
    assert end_of_text is not None
    for shard in shards:
        _check_ids(shard, tokenizer.vocab_size)
    ends = [shard.document_ends(end_of_text) for shard in shards]
    for shard, borders in zip(shards, ends, strict=True):
        if shard.count and not (shard.tokens[borders - 1] == end_of_text).any():
            raise DataError(
                f"{shard.path} was written with another end of text: none of its documents ends "
                f"with {tokenizer.end_of_text_name!r} (id {end_of_text}), the end of text of this "
                "training's tokenizer: name the text that was tokenized, or use the tokenizer of "
                "the run that wrote the shard"
            )
    count, lengths = sum(map(len, ends)), byte_lengths(tokenizer)

    def documents(name: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[int, Ids]]:
        """The lot and the ids of each document in the shards with such a name."""
        for shard, borders in zip(shards, ends, strict=True):
            for start, end in pairwise([0, *borders.tolist()] if name(shard.path.name) else []):
                ids = shard.tokens[start:end]
                yield lot_of(part.astype("<u4").tobytes() for part in _chunks(ids)), ids

    def write(side: Side, ids: Ids) -> None:
        for part in _chunks(ids):
            writers[side].append(part, int(lengths[part].sum()))

    if any(path.name == VALIDATION for path in paths):
        if len({path.parent for path in paths}) > 1:  # a run holds out all copies of a document
            held_out = {lot for lot, _ in documents(VALIDATION.__eq__)}
            if both := sum(lot in held_out for lot, _ in documents(VALIDATION.__ne__)):
                raise DataError(
                    f"{pluralize(both, 'document')} of the training shards are in a validation "
                    "shard of another run too, so the validation loss would be too low: name the "
                    "shards of one run, or the text that was tokenized"
                )
        for shard, borders in zip(shards, ends, strict=True):
            side: Side = "val" if shard.path.name == VALIDATION else "train"
            writers[side].ends.extend((writers[side].count + borders).tolist())
            write(side, shard.tokens)
        return count

    split = plan_split(((lot, len(ids)) for lot, ids in documents()), val_fraction)
    for lot, ids in documents():
        cut = split.trained(lot, len(ids))
        write("train", ids[:cut])
        if 0 < cut < len(ids):
            writers["train"].append([end_of_text], 0)
        write("val", ids[cut:])
        for writer in writers.values():
            writer.end_document()
    return count


def shards_sha256(paths: Sequence[Path], tokenizer: Tokenizer) -> str:
    """The sha256 of the ids of all shards together. Raises DataError."""
    digest = hashlib.sha256()
    for path in paths:
        for part in _chunks(open_shard(path, tokenizer_sha256(tokenizer)).tokens):
            digest.update(part.astype("<u4").tobytes())
    return digest.hexdigest()


def _check_ids(shard: Shard, vocab_size: int) -> None:
    """Raise DataError for an id outside the vocabulary."""
    first = 0
    for ids in _chunks(shard.tokens):
        if ids.max() >= vocab_size:
            raise outside(ids, first, vocab_size, str(shard.path))
        first += len(ids)


def _chunks(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
