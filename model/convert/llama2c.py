"""llama2.c's `.bin` files, versions 0 and 1: the shape of Llama in float32.

Version 0 has no magic number: seven numbers, then weights; it is recognized by its exact size. Its
program, `run.c`, fixes the computation: RMSNorm with eps 1e-5, rotary positions of adjacent
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

from logitd.model.convert.by_role.build import build
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.tensor_map import MappedTensors, Part, Role, TensorMap, check
from logitd.model.convert.containers import LLAMA2C_MAGIC
from logitd.model.convert.foreign import ConvertError, ForeignModel, naming
from logitd.model.convert.source_file import require_source

KIND = "llama2.c"
HEADER = struct.Struct("<7i")
FIRST_VERSION_BYTES, HEADER_BYTES = HEADER.size, 256
LARGEST = 2**24
"""Largest number that a header may have."""
_Sizes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    shared: bool

    @property
    def plausible(self) -> bool:
        sizes = (self.width, self.hidden, self.layers, self.heads, self.kv_heads, self.vocab)
        whole = all(0 < size <= LARGEST for size in (*sizes, self.context))
        return whole and self.width % self.heads == 0 and self.heads % self.kv_heads == 0

    @property
    def offset(self) -> int:
        return HEADER_BYTES if self.version else FIRST_VERSION_BYTES

    def sizes(self) -> _Sizes:
        """Names and shapes in the order of the file. The first axis of a name with {N} counts the
        layers."""
        layers, width, hidden = self.layers, self.width, self.hidden
        size = width // self.heads
        keys = self.kv_heads * size
        embedding = ("tok_embeddings.weight", (self.vocab, width))
        norms = tuple((f"layers.{{N}}.{n}.weight", (layers, width)) for n in _NORMS)
        attention = tuple(
            (f"layers.{{N}}.attention.{name}.weight", (layers, rows, columns))
            for name, rows, columns in (
                *(("wq", width, width), ("wk", keys, width)),
                *(("wv", keys, width), ("wo", width, width)),
            )
        )
        feed_forward = tuple(
            (f"layers.{{N}}.feed_forward.{name}.weight", (layers, rows, columns))
            for name, rows, columns in (
                ("w1", hidden, width),
                ("w2", width, hidden),
                ("w3", hidden, width),
            )
        )
        final, head = ("norm.weight", (width,)), ("output.weight", (self.vocab, width))
        heads = () if self.shared else (head,)
        if self.version:
            return (*norms, final, embedding, *attention, *feed_forward, *heads)
        table = (self.context, size // 2)
        tables = (("freqs_cos", table), ("freqs_sin", table))
        return (embedding, norms[0], *attention, norms[1], *feed_forward, final, *tables, *heads)

    def file_bytes(self) -> int:
        return self.offset + 4 * sum(math.prod(shape) for _, shape in self.sizes())


_NORMS = ("attention_norm", "ffn_norm")
_ROLES: dict[Role, str] = {
    "token_embedding": "tok_embeddings.weight",
    "attention_norm": "layers.{N}.attention_norm.weight",
    "query": "layers.{N}.attention.wq.weight",
    "key": "layers.{N}.attention.wk.weight",
    "value": "layers.{N}.attention.wv.weight",
    "attention_out": "layers.{N}.attention.wo.weight",
    "mlp_norm": "layers.{N}.ffn_norm.weight",
    "mlp_gate": "layers.{N}.feed_forward.w1.weight",
    "mlp_up": "layers.{N}.feed_forward.w3.weight",
    "mlp_down": "layers.{N}.feed_forward.w2.weight",
    "final_norm": "norm.weight",
    "head": "output.weight",
}


def read_llama2c(path: Path) -> ForeignModel | None:
    """Read a file of llama2.c; None if it has another format. Raises ConvertError."""
    require_source(path)
    header = _read_header(path)
    if header is None:
        return None
    tensors = dict(_tensors(path, header))
    names: dict[tuple[Role, Part], str] = {
        (role, "weight"): name
        for role, name in _ROLES.items()
        if role != "head" or not header.shared
    }
    ignored = tuple(name for name in tensors if name.startswith("freqs"))
    mapped = TensorMap(n_layer=header.layers, names=names, ignored=ignored)
    check(str(path), tensors, mapped)
    how = Computation(
        n_head=header.heads,
        context_length=header.context,
        norm="rmsnorm",
        norm_eps=1e-5,
        norm_position="pre",
        final_norm=True,
        residual="sequential",
        positions="rotary",
        rotary_layout="interleaved",
        rope_theta=10_000.0,
        activation="swiglu",
        score_scale="head_dim",
        qkv_layout="qkv",
        gate_order="gate_first",
        qk_norm="none",
        qk_norm_eps=1e-5,
        embedding_scale="one",
        causal=True,
    )
    with naming(path):
        built = build(MappedTensors(str(path), tensors, mapped), how)
    return ForeignModel(
        kind=KIND,
        config=built.config,
        weights=built.weights,
        dtype=torch.float32,
        facts={"file": path.name, "version": header.version},
        notes=built.folds,
    )


def _read_header(path: Path) -> _Header | None:
    """Read the header; None if the file is not llama2.c's. Raises ConvertError if it is, but has
    the wrong size or is quantized."""
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
        header = _header(1, numbers, shared=bool(head[8 + HEADER.size]))
        if not header.plausible or header.file_bytes() != size:
            raise ConvertError(
                f"{path} has {size:,} bytes, but its header {numbers} needs "
                f"{header.file_bytes() if header.plausible else 'other numbers'}: it is damaged or "
                "incomplete"
            )
        return header
    if len(head) < FIRST_VERSION_BYTES or head[:2] in (b"PK", b"\x80\x02"):
        return None
    numbers = HEADER.unpack_from(head)
    # A negative vocabulary size means that the head is not the embedding.
    header = _header(0, (*numbers[:5], abs(numbers[5]), numbers[6]), shared=numbers[5] > 0)
    return header if header.plausible and header.file_bytes() == size else None


def _header(version: int, numbers: tuple[int, ...], *, shared: bool) -> _Header:
    width, hidden, layers, heads, kv_heads, vocab, context = numbers
    return _Header(version, width, hidden, layers, heads, kv_heads, vocab, context, shared)


def _tensors(path: Path, header: _Header) -> Iterator[tuple[str, Tensor]]:
    offset = header.offset
    for name, shape in header.sizes():
        count = math.prod(shape)
        values = torch.from_numpy(np.fromfile(path, "<f4", count, offset=offset)).view(shape)
        offset += 4 * count
        if "{N}" not in name:
            yield name, values
            continue
        for layer, tensor in enumerate(values):
            yield name.replace("{N}", str(layer)), tensor
