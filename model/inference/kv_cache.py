"""KV cache: the slots, and attention over their contents.

A slot is one contiguous row of positions per layer. `prefill` and `decode` return functions
(`Attend`) that write new keys and values into slots and attend over the slots' contents.

The result of a prefilled position depends only on its own block of 32 positions and the cache
before it; the result of a decoded position depends only on its slot up to the position. Neither
depends on the number of other rows. So attention is computed block by block and slot by slot,
except by `prefill_at_once`, whose bits may differ. `model/inference/engine/slots.py` records who
owns a slot and which positions may be shared.

The cache of a model with `smear` also holds the token ids of its slots, because a token's embedding
depends on the token before it.

Keys and values are stored in the dtype of attention, or in int8 with a scale for each key and value
of a head (`Cells`). Torch converts int8 before it attends; the native decoder reads the bytes.

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
    causal_bias,
    first_visible,
    visible_keys,
)
from logitd.model.transformer.config import BLOCK, GPTConfig

Index = tuple[int | slice | Tensor, ...]
"""An index into the axes (n_layer, S, K, L)."""


class Cells:
    """The keys, or the values, of all slots.

    numbers  (n_layer, S, K, L, D)
    scales   (n_layer, S, K, L) float32: in int8, the factor of each position's numbers; else None

    In int8 the numbers of a position are integers from -127 to 127; the largest magnitude is 127.
    If a number is not finite, the scale of its position is not finite either.
    """

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, kept: KVCacheDType
    ) -> None:
        self._dtype = dtype
        quantized = kept == "int8"
        self.numbers = _zeros(shape, device, torch.int8 if quantized else dtype)
        self.scales = _zeros(shape[:-1], device, torch.float32) if quantized else None

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(self, index: Index, rows: Tensor) -> None:
        if self.scales is None:
            self.numbers[index] = rows
        else:
            self.numbers[index], self.scales[index] = quantized_rows(rows)

    def read(self, index: Index) -> Tensor:
        """Rows (..., D) in the dtype of attention. They are a view or, if the cache is int8, a
        converted copy."""
        numbers = self.numbers[index]
        if self.scales is None:
            return numbers
        return (numbers * self.scales[index][..., None]).to(self._dtype)

    def copy(self, to: Index, source: Index) -> None:
        for cells in self._kept():
            cells[to] = cells[source]

    def _kept(self) -> tuple[Tensor, ...]:
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (..., D) to integers (..., D) in int8 and scales (...) in float32."""
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
        # Rounded up, because prefill writes whole blocks.
        self.slot_length = -(-config.context_length // BLOCK) * BLOCK
        shape = (config.n_layer, slots, config.n_kv_head, self.slot_length, config.head_dim)
        self._keys = Cells(shape, device, dtype, kept)
        self._values = Cells(shape, device, dtype, kept)
        self.keys, self.values = self._keys.numbers, self._values.numbers  # (n_layer, S, K, L, D)
        self.key_scales, self.value_scales = self._keys.scales, self._values.scales
        self.token_ids = None
        if config.smear:
            self.token_ids = _zeros((slots, self.slot_length), device, torch.int32)  # (S, L)
        self._block_masks = {
            window: visible_keys(BLOCK, self.slot_length, device, window)  # (BLOCK, L)
            for window in {config.window(layer) for layer in range(config.n_layer)}
        }

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        ids = 0 if self.token_ids is None else self.token_ids.nbytes
        return self._keys.nbytes + self._values.nbytes + ids

    def read(self, layer: int, slot: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [first, end) of a slot, in the dtype of attention: (K, end -
        first, D) each."""
        index = (layer, slot, slice(None), slice(first, end))
        return self._keys.read(index), self._values.read(index)

    def put_token_ids(
        self,
        token_ids: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
    ) -> Tensor | None:
        """Write token ids (N,) into slots, and return the id before each of them (N,), which is
        undefined at position 0. Returns None if the model does not need them. Must be called before
        each forward pass."""
        if self.token_ids is None:
            return None
        device = self.token_ids.device
        ids, rows, places = (
            torch.as_tensor(each, device=device) for each in (token_ids, slots, positions)
        )
        self.token_ids[rows, places] = ids.int()
        return self.token_ids[rows, (places - 1).clamp(min=0)].long()

    def prefill(self, slot: int, start: int, observe: Observer | None = None) -> Attend:
        """Attention for whole blocks of new positions in one slot, starting at `start`."""

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
        ) -> Tensor:
            # q (1, H, T, D); k, v (1, K, T, D); T a multiple of BLOCK
            keys, values = self._extend(layer, slot, start, k[0], v[0])
            return attend_blocks(
                layer,
                q,
                keys,
                values,
                start=start,
                mask=self._block_masks[window],
                window=window,
                observe=observe,
            )

        return attend

    def prefill_at_once(self, slot: int, start: int) -> Attend:
        """Like `prefill`, but with one operation per layer for all positions of the piece."""
        biases: dict[int | None, Tensor] = {}  # shared by all layers with this window

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
        ) -> Tensor:
            keys, values = self._extend(layer, slot, start, k[0], v[0])
            if (start or window is not None) and window not in biases:
                biases[window] = causal_bias(k.shape[2], start + k.shape[2], q, window)
            return attend_piece(q, keys, values, biases.get(window))

        return attend

    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> Attend:
        """Attention for one new position per row. Several rows may be successive positions of the
        same slot; each attends to the earlier ones.

        The batch may have more rows than `slots`: the additional rows are padding, and their result
        is zero.
        """
        count = len(slots)
        slot_index = torch.tensor(slots, device=self.keys.device)
        position_index = torch.tensor(positions, device=self.keys.device)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
        ) -> Tensor:
            # q (B, H, 1, D); k, v (B, K, 1, D)
            index = (layer, slot_index, slice(None), position_index)
            self._keys.write(index, k[:count, :, 0])
            self._values.write(index, v[:count, :, 0])
            q, out = _aligned(q), torch.zeros_like(q)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                first = first_visible(position, window)
                keys, values = self.read(layer, slot, position + 1, first)  # (K, seen, D)
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
            if self.token_ids is not None:
                self.token_ids[target, here] = self.token_ids[source, here]

    def _extend(
        self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (K, T, D) at `start`. Returns all keys and values of positions [0,
        start + T)."""
        end = start + keys.shape[1]
        index = (layer, slot, slice(None), slice(start, end))
        self._keys.write(index, keys)
        self._values.write(index, values)
        return self.read(layer, slot, end)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros that, on a CPU, take memory only when they are written to. `torch.zeros` writes all of
    them: with it, a server running GPT-2 with 64 slots took 2.3 GiB before its first request.

    The memory uses small pages. Large pages would make a step 1 to 2 % faster (7 % for a small
    model), but the first prompt in a slot 50 % slower.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    # Private, because shared memory would be accounted as files.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # keeps `memory` alive


def _aligned(rows: Tensor) -> Tensor:
    """A copy of a tensor (B, ...) in which every row begins on a cache line, because the bits of
    torch's kernels may depend on alignment (float32, head_dim not a multiple of 4)."""
    width, line = rows[0].numel(), 64 // rows.element_size()
    copy = rows.new_empty(len(rows), -(-width // line) * line)[:, :width]
    return copy.unflatten(1, rows.shape[1:]).copy_(rows)
