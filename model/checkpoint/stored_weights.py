"""StoredWeights: reads parts of a checkpoint's weights from its file.

A running model may hold its weights in another form (quantized, compressed, on a GPU), so they are
read from the file each time. Only the needed rows are in memory. In addition to the stored tensors
there are derived tensors, which clients can read but the rest of the code does not use: the
embedding, the unembedding and the matrices of each head, in the orientation that is usual in the
literature (a row vector times the matrix). They are computed from the weights alone: norms,
rotation and biases are not part of them.

    W_E   (vocab_size, d_model)        embedding             W_U  (d_model, vocab_size)  head
    blocks.N.attention.
    W_Q   (n_head, d_model, head_dim)  queries
    W_K   (n_kv_head, d_model, head_dim)                     W_V  the same for values
    W_O   (n_head, head_dim, d_model)  output projection
    W_OV  (n_head, d_model, d_model)   W_V W_O               W_QK  W_Q W_K^T

These can also be read under the names that TransformerLens gives them: `blocks.N.attn.W_Q`,
`embed.W_E`, `unembed.W_U`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitd.model.checkpoint.checkpoint import WEIGHTS, CheckpointError, CheckpointInfo, read_files
from logitd.model.checkpoint.weights_file import StoredTensor, WeightsFileError, read_header
from logitd.model.files import open_regular
from logitd.model.plain_integer import plain_integer
from logitd.model.transformer.config import GPTConfig

READ_BYTES = 2**22
"""Number of bytes read at a time."""

Floats = npt.NDArray[np.float32]
Part = tuple[range, ...]
"""A part of a weight: for each axis, a range of consecutive indices."""
EMBEDDING, HEAD = "token_embedding.weight", "head.weight"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor: its name, its shape, and its dtype in the file (None for a derived tensor)."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None


class StoredWeights:
    """The weights of one checkpoint; use it in a `with` block. Raises CheckpointError if the file
    cannot be read, or if the folder no longer has the weights that `info` describes (judged by the
    sha256 in config.json)."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._config = info.shape
        self._file = _File(info.path / WEIGHTS)
        try:
            # Checked after opening: the open file stays the same even if the folder is replaced.
            if read_files(info.path).get(WEIGHTS) != info.weights_sha256:
                raise CheckpointError(
                    f"{info.path} no longer has the loaded weights; load it again"
                )
            stored = read_header(self._file)
        except WeightsFileError as error:
            self._file.close()
            raise CheckpointError(f"{self._file.path} cannot be read: {error}") from error
        except BaseException:
            self._file.close()
            raise
        self._start = self._file.taken
        self._stored: Mapping[str, StoredTensor] = {tensor.name: tensor for tensor in stored}

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def all(self) -> list[Weight]:
        """All weights: the stored ones in the file's order, then the derived ones."""
        stored = [
            Weight(each.name, each.shape, str(each.dtype).removeprefix("torch."))
            for each in self._stored.values()
        ]
        derived = (Weight(name, shape, None) for name, shape in _derived_shapes(self._config))
        return [*stored, *derived]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight with this name; None if there is none."""
        name = _own_name(name)
        return next((each.shape for each in self.all() if each.name == name), None)

    def read(self, name: str, part: Part) -> Floats:
        """A part of the weight with this name, which must exist (see `shape_of`)."""
        name = _own_name(name)
        if name in self._stored:
            return self._tensor(name, part)
        if name == "W_E":
            return self._tensor(EMBEDDING, part)
        if name == "W_U":
            stored = HEAD if HEAD in self._stored else EMBEDDING
            return self._tensor(stored, part[::-1]).T
        block, _, kind = name.rpartition(".attention.")
        heads, rows, columns = part
        result = np.empty((len(heads), len(rows), len(columns)), np.float32)
        for place, head in enumerate(heads):
            result[place] = self._head(block, kind, head, rows, columns)
        return result

    def _head(self, block: str, kind: str, head: int, rows: range, columns: range) -> Floats:
        config = self._config
        assert isinstance(config, GPTConfig)
        width, group = config.head_dim, config.n_head // config.n_kv_head
        inner = range(width)
        if kind == "W_OV":
            values = self._head(block, "W_V", head // group, rows, inner)
            return values @ self._head(block, "W_O", head, inner, columns)
        if kind == "W_QK":
            keys = self._head(block, "W_K", head // group, columns, inner)
            return self._head(block, "W_Q", head, rows, inner) @ keys.T
        first = head * width
        if kind == "W_O":
            return self._tensor(f"{block}.attention_out.weight", (columns, _shifted(rows, first))).T
        first += {"W_Q": 0, "W_K": config.n_head, "W_V": config.n_head + config.n_kv_head}[
            kind
        ] * width
        return self._tensor(f"{block}.qkv.weight", (_shifted(columns, first), rows)).T

    def _tensor(self, name: str, part: Part) -> Floats:
        """A part of a stored tensor, read in pieces of whole rows."""
        tensor = self._stored[name]
        if not tensor.shape:
            return _numbers(self._bytes(tensor, 0, 1), tensor.dtype).reshape(())
        row = prod(tensor.shape[1:])
        inner = tuple(slice(each.start, each.stop) for each in part[1:])
        result = np.empty([len(each) for each in part], np.float32)
        step = max(1, READ_BYTES // max(1, row * tensor.dtype.itemsize))
        for done in range(0, len(part[0]), step):
            rows = part[0][done : done + step]
            raw = self._bytes(tensor, rows.start * row, len(rows) * row)
            whole = _numbers(raw, tensor.dtype).reshape(len(rows), *tensor.shape[1:])
            result[done : done + len(rows)] = whole[(slice(None), *inner)]
        return result

    def _bytes(self, tensor: StoredTensor, first: int, count: int) -> bytes:
        width = tensor.dtype.itemsize
        start = self._start + tensor.start + first * width
        raw = self._file.read_at(start, count * width)
        if len(raw) < count * width:
            raise CheckpointError(f"{self._file.path} ends within {tensor.name}")
        return raw


def parse_part(text: str | None, shape: Sequence[int]) -> tuple[Part, tuple[int, ...]]:
    """Parse a slice such as "3,:,0:64", in NumPy's syntax but without step sizes. Returns the part,
    and the shape of the result. As in NumPy, an axis with a single index is dropped from the shape.
    Raises ValueError."""
    pieces = [] if text is None else text.split(",")
    if len(pieces) > len(shape):
        raise ValueError(f"slice has {len(pieces)} axes; the weight has {len(shape)}")
    part, kept = [], []
    for axis, size in enumerate(shape):
        piece = pieces[axis] if axis < len(pieces) else ":"
        start, colon, stop = piece.partition(":")
        try:
            bounds = [plain_integer(each) if each else None for each in (start, stop)]
        except ValueError as error:
            raise _not_a_slice(piece) from error
        if colon:
            chosen = range(size)[slice(*bounds)]
            kept.append(len(chosen))
        elif bounds[0] is None:
            raise _not_a_slice(piece)
        elif not -size <= bounds[0] < size:
            raise ValueError(f"slice has {bounds[0]} for axis {axis}, whose size is {size}")
        else:
            chosen = range(size)[bounds[0] :][:1]
        if not chosen:
            raise ValueError(
                f"slice has {piece!r} for axis {axis}, whose size is {size}: it selects nothing"
            )
        part.append(chosen)
    return tuple(part), tuple(kept)


def _not_a_slice(piece: str) -> ValueError:
    return ValueError(f"slice has {piece[:20]!r}; write an index or first:last for each axis")


def _own_name(name: str) -> str:
    """Translate TransformerLens's name of a derived weight into logitd's. Other names stay
    unchanged."""
    if name in ("embed.W_E", "unembed.W_U"):
        return name.rpartition(".")[2]
    return name.replace(".attn.W_", ".attention.W_")


def _derived_shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    if not isinstance(config, GPTConfig):
        return []
    vocabulary, d, width = config.vocab_size, config.d_model, config.head_dim
    of_head = {
        "W_Q": (config.n_head, d, width),
        "W_K": (config.n_kv_head, d, width),
        "W_V": (config.n_kv_head, d, width),
        "W_O": (config.n_head, width, d),
        "W_OV": (config.n_head, d, d),
        "W_QK": (config.n_head, d, d),
    }
    layers = range(config.n_layer)
    return [
        ("W_E", (vocabulary, d)),
        ("W_U", (d, vocabulary)),
        *((f"blocks.{n}.attention.{kind}", of_head[kind]) for n in layers for kind in of_head),
    ]


def _shifted(indices: range, by: int) -> range:
    return range(indices.start + by, indices.stop + by)


def _numbers(raw: bytes, dtype: torch.dtype) -> Floats:
    if dtype is torch.bfloat16:
        bits = np.frombuffer(raw, "<u2").astype("<u4") << 16
        return bits.view("<f4")
    return np.frombuffer(raw, torch.empty(0, dtype=dtype).numpy().dtype).astype(np.float32)


class _File:
    """A file of weights, read at arbitrary offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(str(error)) from error
        self.size = os.fstat(self._file.fileno()).st_size
        self.taken = 0

    def take_all(self, count: int) -> bytes:
        raw = self.read_at(self.taken, count)
        self.taken += len(raw)
        return raw

    def read_at(self, start: int, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            more = os.pread(self._file.fileno(), count - len(parts), start + len(parts))
            if not more:
                break
            parts += more
        return bytes(parts)

    def close(self) -> None:
        self._file.close()
