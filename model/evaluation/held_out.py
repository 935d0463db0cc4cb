"""Held-out text: a few thousand tokens that a checkpoint was not trained on.

The tokens come from the text that the caller names. By default they come from the validation shard
of the checkpoint's run. If the checkpoint is not in a run directory but was trained on Python's own
text, they come from the held-out part of that text. Only the needed part of a text is read.
`quantization.py` computes the loss.
"""

import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.run_folder import run_of
from logitd.model.data.errors import DataError
from logitd.model.data.shards import DATA, Shard, open_shard
from logitd.model.data.sources.document import Document
from logitd.model.data.sources.files import documents_of_all, each_once, named_files
from logitd.model.data.sources.python_text import python_text
from logitd.model.data.special_names import SpecialNames
from logitd.model.data.split import Split, lot, sides, split_text
from logitd.model.data.vocabulary import encode, require_vocabulary, tokenizer_sha256
from logitd.model.data.windows import Windows, validation_windows

WINDOW_TOKENS = 2048
"""Number of tokens in all windows together."""
MIN_TOKENS = 1024
"""A text must have more tokens than this: with fewer, the difference between two losses is mostly
noise."""
WINDOW = 128
READ_BYTES = 2**18
"""Number of bytes after which a text that is not tokenized yet is read no further. The windows are
spread evenly over what was read."""


def held_out_windows(checkpoint: CheckpointInfo, path: Path | None = None) -> tuple[str, Windows]:
    """The name of the text at `path`, or of the text that the checkpoint's training held out, and a
    single batch of its windows. Raises DataError if there is no such text, or too little of it."""
    if path is None:
        name, shard = held_out_text(checkpoint, READ_BYTES)
    else:
        require_vocabulary(checkpoint.tokenizer, checkpoint.name)
        name, files = str(path), each_once(named_files(str(path)))
        pieces = (document.pieces() for document in documents_of_all(files, None))
        shard = _tokenized(pieces, checkpoint, READ_BYTES)
        if not shard.count:
            raise DataError(f"{path} has no text: its files are empty")
    window = min(WINDOW, checkpoint.shape.context_length)
    if shard.count <= MIN_TOKENS:
        raise DataError(
            f"{name} has {shard.count:,} tokens; measuring a loss needs more than {MIN_TOKENS:,}"
        )
    windows = validation_windows(
        shard, checkpoint.tokenizer, window=window, batch_size=WINDOW_TOKENS // window, batches=1
    )
    return name, windows


def held_out_text(checkpoint: CheckpointInfo, enough: int = sys.maxsize) -> tuple[str, Shard]:
    """The name and the tokens of the text held out by the checkpoint's training. Of Python's own
    text, no more is read after `enough` bytes."""
    require_vocabulary(checkpoint.tokenizer, checkpoint.name)
    if (run := run_of(checkpoint.path)) is not None:
        identity = tokenizer_sha256(checkpoint.tokenizer)
        return "the run's validation text", open_shard(run / DATA / "val.tokens", identity)
    data = checkpoint.training.data
    if data.get("built_in") is not True and "python_split" not in data:
        raise DataError(
            "the checkpoint has no held-out text, because it is not in a run directory and was not "
            "trained on Python's own text"
        )
    documents = python_text(Path(sysconfig.get_path("stdlib"))).documents
    names = SpecialNames(checkpoint.tokenizer.special_tokens)
    pieces = _held_out(documents, _split(data, documents), names)
    return "the validation part of Python's own text", _tokenized(pieces, checkpoint, enough)


def _split(data: Mapping[str, Any], documents: Iterable[Document]) -> Split:
    """The split of Python's own text in a training, which may have had other text too."""
    share = _val_fraction(data)
    if "python_split" not in data:  # older records, of Python's own text alone
        return split_text(documents, share)
    try:
        return Split.described(share, data["python_split"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the checkpoint's python_split cannot be read: {error!r}") from error


def _val_fraction(data: Mapping[str, Any]) -> float:
    """The share of the text that a training held out. Raises DataError if its record lacks it."""
    if isinstance(asked := data.get("val_fraction"), float):
        return asked
    held_out, whole = data.get("val_bytes"), data.get("bytes")  # before val_fraction was recorded
    if not isinstance(held_out, int) or not isinstance(whole, int) or not 0 < held_out < whole:
        raise DataError(
            "the checkpoint does not record which share of Python's own text its training held "
            "out: name a text with --data"
        )
    return held_out / whole


def _held_out(
    documents: Iterable[Document], split: Split, names: SpecialNames
) -> Iterator[list[str]]:
    """The pieces of each document's held-out part, if it has one."""
    for document in sorted(documents, key=lot):
        pieces = [piece for side, piece in sides(document, split, names) if side == "val"]
        if pieces:
            yield pieces


def _tokenized(
    documents: Iterable[Iterable[str]], checkpoint: CheckpointInfo, enough: int
) -> Shard:
    """The tokens of documents, given as pieces, as a shard in memory. The piece that reaches
    `enough` bytes is the last one, and is whole, because a cut could divide a word."""
    tokenizer, ids, size = checkpoint.tokenizer, list[int](), 0
    names = SpecialNames(tokenizer.special_tokens)
    try:
        for pieces in documents:
            for piece in names.pieces(pieces):
                ids += encode(tokenizer, piece, special_ids=checkpoint.special_ids)
                size += len(piece.encode())
                if size >= enough:
                    return Shard(Path(), np.array(ids, dtype=np.int64), size)
            if tokenizer.end_of_text is not None:
                ids.append(tokenizer.end_of_text)
    except OSError as error:
        raise DataError(f"the text cannot be read: {error}") from error
    return Shard(Path(), np.array(ids, dtype=np.int64), size)
