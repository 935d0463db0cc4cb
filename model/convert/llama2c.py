"""llama2.c's `.bin` files, versions 0 and 1: the shape of Llama in float32.

Version 0 has no magic number, only seven numbers before the weights; it is recognized by its exact
size. `run.c` defines the computation: RMSNorm with eps 1e-5, and rotary positions of adjacent
channels with theta 10,000. Version 2 is quantized and refused.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from logitd.model.convert.containers import LLAMA2C_MAGIC
from logitd.model.convert.foreign import ConvertError, ForeignModel, StateDictReader, naming
from logitd.model.convert.layouts import LLAMA2C, read_weights, tie_if_equal
from logitd.model.convert.source_file import require_source
from logitd.model.transformer.shapes import gpt2_shape

HEADER = struct.Struct("<7i")
FIRST_VERSION_BYTES, HEADER_BYTES = HEADER.size, 256
LARGEST = 2**24
"""Largest number that a header may have."""


@dataclass(frozen=True, slots=True)
class _Header:
    """The numbers of a header, in the order of the file. If `shared`, the head is the embedding."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    version: int
    shared: bool

    @property
    def plausible(self) -> bool:
        sizes = (self.width, self.hidden, self.layers, self.heads, self.kv_heads, self.vocab)
        whole = all(0 < size <= LARGEST for size in (*sizes, self.context))
        return whole and self.width % self.heads == 0 and self.heads % self.kv_heads == 0

    @property
    def offset(self) -> int:
        """Number of bytes before the weights."""
        return HEADER_BYTES if self.version else FIRST_VERSION_BYTES

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order of the file. A name with {N} stands for a tensor of each
        layer; the first axis of its shape counts the layers."""
        layers, width, hidden = self.layers, self.width, self.hidden
        size = width // self.heads
        layer, square = "layers.{N}.", (layers, width, width)
        keys, wide = (layers, self.kv_heads * size, width), (layers, hidden, width)
        embedding = {"tok_embeddings.weight": (self.vocab, width)}
        norms = [{f"{layer}{name}_norm.weight": (layers, width)} for name in ("attention", "ffn")]
        attention = {
            f"{layer}attention.{name}.weight": shape
            for name, shape in (("wq", square), ("wk", keys), ("wv", keys), ("wo", square))
        }
        feed_forward = {
            f"{layer}feed_forward.{name}.weight": shape
            for name, shape in (("w1", wide), ("w2", (layers, width, hidden)), ("w3", wide))
        }
        final = {"norm.weight": (width,)}
        head = {} if self.shared else {"output.weight": (self.vocab, width)}
        if self.version:
            parts = (*norms, final, embedding, attention, feed_forward, head)
        else:
            tables = dict.fromkeys(("freqs_cos", "freqs_sin"), (self.context, size // 2))
            parts = (embedding, norms[0], attention, norms[1], feed_forward, final, tables, head)
        return {name: shape for part in parts for name, shape in part.items()}

    def file_bytes(self) -> int:
        return self.offset + 4 * sum(map(math.prod, self.shapes().values()))


def read_llama2c(path: Path) -> ForeignModel | None:
    """Read a file of llama2.c; None if it has another format. Raises ConvertError."""
    require_source(path)
    header = _read_header(path)
    if header is None:
        return None
    reader = StateDictReader(str(path), dict(_tensors(path, header)))
    reader.ignore("freqs_cos", "freqs_sin")
    with naming(path):
        config = gpt2_shape(
            vocab_size=header.vocab,
            context_length=header.context,
            n_layer=header.layers,
            n_head=header.heads,
            n_kv_head=header.kv_heads,
            d_model=header.width,
            d_ff=header.hidden,
            norm="rmsnorm",
            norm_eps=1e-5,
            positions="rotary",
            rope_theta=10_000.0,
            activation="swiglu",
            bias=False,
            qkv_bias=False,
            tied_head=header.shared,
        )
    config, weights = tie_if_equal(config, read_weights(reader, config, LLAMA2C))
    return ForeignModel(
        kind="llama2.c",
        config=config,
        weights=weights,
        dtype=reader.finish(),
        facts={"file": path.name, "version": header.version},
        notes=("rows of query and key reordered: the source rotates adjacent channels",),
    )


def _read_header(path: Path) -> _Header | None:
    """Read the header; None if the file is not llama2.c's. Raises ConvertError if the file is
    quantized or has the wrong size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if head[:4] == LLAMA2C_MAGIC and len(head) == HEADER_BYTES:
        version = int.from_bytes(head[4:8], "little")
        if version != 1:
            raise ConvertError(
                f"{path} is a llama2.c file of version {version}; only 0 and 1 can be read, and "
                "version 2 is quantized: export it with --version 1"
            )
        numbers: tuple[int, ...] = HEADER.unpack_from(head, 8)
        header = _Header(*numbers, version=1, shared=bool(head[8 + HEADER.size]))
        if not header.plausible or header.file_bytes() != size:
            raise ConvertError(
                f"{path} has {size:,} bytes, but its header {numbers} needs "
                f"{header.file_bytes() if header.plausible else 'other numbers'}: it is damaged or "
                "incomplete"
            )
        return header
    if len(head) < FIRST_VERSION_BYTES or head[:2] in (b"PK", b"\x80\x02"):
        return None
    # A negative vocabulary size means that the head is not the embedding.
    *first, vocab, context = HEADER.unpack_from(head)
    header = _Header(*first, abs(vocab), context, version=0, shared=vocab > 0)
    return header if header.plausible and header.file_bytes() == size else None


def _tensors(path: Path, header: _Header) -> Iterator[tuple[str, Tensor]]:
    offset = header.offset
    for name, shape in header.shapes().items():
        count = math.prod(shape)
        values = torch.from_numpy(np.fromfile(path, "<f4", count, offset=offset)).view(shape)
        offset += 4 * count
        if "{N}" not in name:
            yield name, values
            continue
        for layer, tensor in enumerate(values):
            yield name.replace("{N}", str(layer)), tensor
