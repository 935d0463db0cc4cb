"""KV cache: slots, and attention over them.

One slot is one contiguous row of positions per layer. `prefill` and `decode` give the two `Attend`s
that write new keys and values into slots and attend over what is there.

What a row of a result depends on is fixed: a prefilled position only on its own block of 32
positions and the cache before it, a decoded one only on its slot up to its own position; never on
how many others are computed beside it. That is why attention here goes block by block and slot by
slot. `prefill_at_once` alone does not, and promises no bits. Who owns a slot and what may be shared
is decided in `model/inference/engine/slots.py`.

Shapes: S slots, K = n_kv_head, D = head_dim, L = slot_length.
"""

import math
import mmap
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.transformer.attention import (
    Attend,
    Observer,
    attend_blocks,
    attend_piece,
    block_mask,
    causal_bias,
)
from model.transformer.config import BLOCK, GPTConfig


class KVCache:
    """Keys and values of `slots` sequences, each up to the context length."""

    def __init__(
        self, config: GPTConfig, slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Prefill writes whole blocks, so a row ends on a block's end.
        self.slot_length = -(-config.context_length // BLOCK) * BLOCK
        shape = (config.n_layer, slots, config.n_kv_head, self.slot_length, config.head_dim)
        self.keys = _zeros(shape, device, dtype)  # (n_layer, S, K, L, D)
        self.values = _zeros(shape, device, dtype)
        self._block_mask = block_mask(self.slot_length, device)  # (BLOCK, L)
        self._written = [0] * slots  # positions of each slot from here on were never written

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def prefill(self, slot: int, start: int, observe: Observer | None = None) -> Attend:
        """Attention of whole blocks of new positions of one slot, the first at `start`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # q (1, H, T, D); k, v (1, K, T, D); T a multiple of BLOCK
            keys, values = self.keys[layer, slot], self.values[layer, slot]  # (K, L, D)
            keys[:, start : start + k.shape[2]] = k[0]
            values[:, start : start + v.shape[2]] = v[0]
            self.wrote(slot, start + k.shape[2])
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
            keys, values = self.keys[layer, slot, :, :end], self.values[layer, slot, :, :end]
            keys[:, start:], values[:, start:] = k[0], v[0]  # (K, T, D) each
            self.wrote(slot, end)
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
            keys, values = self.keys[layer], self.values[layer]  # (S, K, L, D)
            keys[slot_index, :, position_index] = k[:count, :, 0]
            values[slot_index, :, position_index] = v[:count, :, 0]
            q, out = _aligned(q), torch.zeros_like(q)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                out[row] = F.scaled_dot_product_attention(
                    q[row : row + 1],
                    keys[slot : slot + 1, :, : position + 1],
                    values[slot : slot + 1, :, : position + 1],
                    enable_gqa=q.shape[1] != k.shape[1],
                )[0]
            return out

        return attend

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy positions [0, length) of one slot into another, in every layer."""
        if source != target:
            self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]
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
            self.keys[:, slot, :, length:written] = 0
            self.values[:, slot, :, length:written] = 0
            self._written[slot] = length


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
