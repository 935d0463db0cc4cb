"""llama2.c's `.bin` files, versions 0 and 1: models with Llama's shape, in float32.

Version 0 has no magic number; its header is only seven numbers. It is recognized by the exact size
of the file. `run.c` defines the computation: RMSNorm with eps 1e-5, and rotary positions that
rotate adjacent channels together, with theta 10,000. Version 2 is quantized and refused.
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
"""Largest number that is accepted in a header."""


@dataclass(frozen=True, slots=True)
class _Header:
    """The version and the numbers in a header. If `shared` is True, the head shares the embedding's
    weights."""

    version: int
    shared: bool
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int

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
        """Shapes by name, in the order of the file. A name with {N} denotes the tensors of all
        layers, which are stacked along the first axis."""
        layers, width, hidden = self.layers, self.width, self.hidden
        size = width // self.heads
        keys = self.kv_heads * size
        shapes: dict[str, tuple[int, ...]] = {
            "tok_embeddings": (self.vocab, width),
            "layers.{N}.attention_norm": (layers, width),
            "layers.{N}.attention.wq": (layers, width, width),
            "layers.{N}.attention.wk": (layers, keys, width),
            "layers.{N}.attention.wv": (layers, keys, width),
            "layers.{N}.attention.wo": (layers, width, width),
            "layers.{N}.ffn_norm": (layers, width),
            "layers.{N}.feed_forward.w1": (layers, hidden, width),
            "layers.{N}.feed_forward.w2": (layers, width, hidden),
            "layers.{N}.feed_forward.w3": (layers, hidden, width),
            "norm": (width,),
        }
        if self.version:  # all norms come first
            shapes = dict(sorted(shapes.items(), key=lambda item: "norm" not in item[0]))
        else:
            shapes |= dict.fromkeys(("freqs_cos", "freqs_sin"), (self.context, size // 2))
        if not self.shared:
            shapes["output"] = (self.vocab, width)
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def file_bytes(self) -> int:
        return self.offset + 4 * sum(map(math.prod, self.shapes().values()))


def read_llama2c(path: Path) -> ForeignModel | None:
    """Read a file of llama2.c; None if it has another format. Raises ConvertError."""
    require_source(path)
    header = _read_header(path)
    if header is None:
        return None
    reader = StateDictReader(str(path), dict(_tensors(path, header)))
    reader.ignore("freqs_cos.weight", "freqs_sin.weight")
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
    """Read the header; None if the file is not a llama2.c file. Raises ConvertError if the file is
    quantized or has the wrong size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if head[:4] == LLAMA2C_MAGIC and len(head) == HEADER_BYTES:
        version = int.from_bytes(head[4:8], "little")
        if version != 1:
            raise ConvertError(
                f"{path} is a llama2.c file of version {version}; only versions 0 and 1 can be "
                "imported, and version 2 is quantized: export the model with --version 1"
            )
        numbers: tuple[int, ...] = HEADER.unpack_from(head, 8)
        header = _Header(1, bool(head[8 + HEADER.size]), *numbers)
        if not header.plausible or header.file_bytes() != size:
            raise ConvertError(
                f"{path} has {size:,} bytes, but its header {numbers} "
                + (
                    f"needs {header.file_bytes():,} bytes"
                    if header.plausible
                    else "is not plausible"
                )
                + ": it is damaged or incomplete"
            )
        return header
    if len(head) < FIRST_VERSION_BYTES or head[:2] in (b"PK", b"\x80\x02"):
        return None
    sizes = list(HEADER.unpack_from(head))
    # A negative vocabulary size means that the head is not the embedding.
    shared, sizes[5] = sizes[5] > 0, abs(sizes[5])
    header = _Header(0, shared, *sizes)
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
