"""KV cache: slots, and attention over them.

One slot is one contiguous row of positions per layer. `prefill` and `decode` give the two `Attend`s
that write new keys and values into slots and attend over what is there.

What a row of a result depends on is fixed: a prefilled position only on its own block of 32
positions and the cache before it, a decoded one only on its slot up to its own position; never on
how many others are computed beside it. That is why attention here goes block by block and slot by
slot. `prefill_at_once` alone does not, and promises no bits. Who owns a slot and what may be shared
is decided in `model/inference/engine/slots.py`.

Keys and values are kept in the dtype that attention computes in, or in int8 with a scale for each
head's key and value (`Cells`). Torch then attends over what was kept, converted to its dtype; the
native decoder reads the bytes themselves.

Shapes: S slots, K = n_kv_head, D = head_dim, L = slot_length.
"""

import math
import mmap
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.options import KVCacheDType
from logitd.model.transformer.attention import (
    Attend,
    Observer,
    attend_blocks,
    attend_piece,
    block_mask,
    causal_bias,
)
from logitd.model.transformer.config import BLOCK, GPTConfig

Index = tuple[int | slice | Tensor, ...]
"""Into (n_layer, S, K, L)."""


class Cells:
    """The keys, or the values, of all slots.

    numbers  (n_layer, S, K, L, D)
    scales   (n_layer, S, K, L) float32: what a position's numbers are multiplied by, in int8; else
             None

    In int8 a position's numbers are in 127 steps to either side of zero, as long as the largest of
    them needs. A scale is not finite where one of them was not, so that it is not lost.
    """

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, kept: KVCacheDType
    ) -> None:
        """`dtype` is what `read` gives."""
        self._dtype = dtype
        quantized = kept == "int8"
        self.numbers = _zeros(shape, device, torch.int8 if quantized else dtype)
        self.scales = _zeros(shape[:-1], device, torch.float32) if quantized else None

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(self, index: Index, rows: Tensor) -> None:
        """Keep rows (..., D)."""
        if self.scales is None:
            self.numbers[index] = rows
        else:
            self.numbers[index], self.scales[index] = quantized_rows(rows)

    def read(self, index: Index) -> Tensor:
        """What was kept of rows, (..., D): a view, in int8 a copy."""
        numbers = self.numbers[index]
        if self.scales is None:
            return numbers
        return (numbers * self.scales[index][..., None]).to(self._dtype)

    def copy(self, to: Index, source: Index) -> None:
        """Copy rows as they are kept."""
        for cells in self._kept():
            cells[to] = cells[source]

    def clear(self, index: Index) -> None:
        """Zero rows."""
        for cells in self._kept():
            cells[index] = 0

    def _kept(self) -> tuple[Tensor, ...]:
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., D) as steps (..., D) in int8 and the size of these (...) in float32."""
    rows = rows.float()
    most = rows.abs().amax(dim=-1)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    steps = (rows * inverse[..., None]).round().nan_to_num(0.0)
    return steps.to(torch.int8), most / 127 + (rows * 0).sum(dim=-1)


class KVCache:
    """Keys and values of `slots` sequences, each up to the context length."""

    def __init__(
        self,
        config: GPTConfig,
        slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kept: KVCacheDType = "auto",
    ) -> None:
        """`dtype` is what attention computes in, `kept` what keys and values are kept in."""
        # Prefill writes whole blocks, so a row ends on a block's end.
        self.slot_length = -(-config.context_length // BLOCK) * BLOCK
        shape = (config.n_layer, slots, config.n_kv_head, self.slot_length, config.head_dim)
        self._keys = Cells(shape, device, dtype, kept)
        self._values = Cells(shape, device, dtype, kept)
        self._block_mask = block_mask(self.slot_length, device)  # (BLOCK, L)
        self._written = [0] * slots  # positions of each slot from here on were never written

    @property
    def keys(self) -> Tensor:
        """As they are kept: (n_layer, S, K, L, D)."""
        return self._keys.numbers

    @property
    def values(self) -> Tensor:
        """As they are kept: (n_layer, S, K, L, D)."""
        return self._values.numbers

    @property
    def key_scales(self) -> Tensor | None:
        """(n_layer, S, K, L), where keys are kept in int8."""
        return self._keys.scales

    @property
    def value_scales(self) -> Tensor | None:
        """(n_layer, S, K, L), where values are kept in int8."""
        return self._values.scales

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def read(self, layer: int, slot: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [0, end) of a slot, as attention computes with them:
        (K, end, D) each."""
        index = (layer, slot, slice(None), slice(0, end))
        return self._keys.read(index), self._values.read(index)

    def prefill(self, slot: int, start: int, observe: Observer | None = None) -> Attend:
        """Attention of whole blocks of new positions of one slot, the first at `start`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # q (1, H, T, D); k, v (1, K, T, D); T a multiple of BLOCK
            end = start + k.shape[2]
            self._write(layer, slot, start, end, k[0], v[0])
            keys, values = self.read(layer, slot, end)  # (K, end, D)
            return attend_blocks(
                layer, q, keys, values, start=start, mask=self._block_mask, observe=observe
            )

        return attend

    def prefill_at_once(self, slot: int, start: int) -> Attend:
        """As `prefill`, all positions of the piece in one operation a layer."""
        bias: Tensor | None = None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal bias
            end = start + k.shape[2]
            self._write(layer, slot, start, end, k[0], v[0])
            keys, values = self.read(layer, slot, end)  # (K, end, D)
            if start and bias is None:  # of all layers
                bias = causal_bias(k.shape[2], end, q)
            return attend_piece(q, keys, values, bias)

        return attend

    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> Attend:
        """Attention of new positions in several slots, a row each. A slot may have several, which
        follow one another: each sees those before it.

        The batch may have more rows than `slots` names (padding): their result is zero.
        """
        count = len(slots)
        slot_index = torch.tensor(slots, device=self.keys.device)
        position_index = torch.tensor(positions, device=self.keys.device)
        for slot, position in zip(slots, positions, strict=True):
            self.wrote(slot, position + 1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # q (B, H, 1, D); k, v (B, K, 1, D)
            index = (layer, slot_index, slice(None), position_index)
            self._keys.write(index, k[:count, :, 0])
            self._values.write(index, v[:count, :, 0])
            q, out = _aligned(q), torch.zeros_like(q)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                keys, values = self.read(layer, slot, position + 1)  # (K, position + 1, D)
                out[row] = F.scaled_dot_product_attention(
                    q[row : row + 1],
                    keys[None],
                    values[None],
                    enable_gqa=q.shape[1] != k.shape[1],
                )[0]
            return out

        return attend

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy positions [0, length) of one slot into another, in every layer."""
        if source != target:
            every, here = slice(None), slice(0, length)
            for cells in (self._keys, self._values):
                cells.copy((every, target, every, here), (every, source, every, here))
            self.wrote(target, length)

    def wrote(self, slot: int, length: int) -> None:
        """Take note that positions up to `length` of a slot may hold something."""
        self._written[slot] = max(self._written[slot], length)

    def clear_behind(self, slot: int, length: int) -> None:
        """Zero what a slot holds from position `length` on: what an earlier sequence, the padding
        of a prefill or a wrong draft left there. Costs nothing where nothing is.

        For attention that masks positions instead of leaving them out: a weight of 0 times a
        number that is not finite would not be 0.
        """
        written = self._written[slot]
        if written > length:
            for cells in (self._keys, self._values):
                cells.clear((slice(None), slot, slice(None), slice(length, written)))
            self._written[slot] = length

    def _write(
        self, layer: int, slot: int, start: int, end: int, keys: Tensor, values: Tensor
    ) -> None:
        """Keep keys and values (K, T, D) of positions [start, end) of a slot."""
        index = (layer, slot, slice(None), slice(start, end))
        self._keys.write(index, keys)
        self._values.write(index, values)
        self.wrote(slot, end)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros that on a CPU take memory only where they were used: slots that nobody has needed take
    none, and of a slot that was needed, positions that no sequence has reached. `torch.zeros`
    writes all of them, so that a server of 64 slots of GPT-2 held 2.3 GiB before its first request.

    On the usual small pages: with large ones a step is 1 to 2 % faster (7 % of a small model), but
    the first prompt in a slot takes half as long again, for touching them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    # Private: what processes could share would count as files do.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # keeps the memory


def _aligned(rows: Tensor) -> Tensor:
    """A copy of (B, ...) in which every row begins on a cache line, as every slot does: stock
    kernels may give a row other bits where it begins (float32, head_dim not a multiple of 4)."""
    width, line = rows[0].numel(), 64 // rows.element_size()
    copy = rows.new_empty(len(rows), -(-width // line) * line)[:, :width]
    return copy.unflatten(1, rows.shape[1:]).copy_(rows)
