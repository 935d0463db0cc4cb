"""GraphDecoder: decode steps and sampling on a GPU with two launches per step instead of hundreds.

A step is recorded once for a number of rows and a length of keys, both from a few sizes (buckets).
It is replayed on tensors at fixed addresses, which one copy from pinned memory fills. Padding rows
repeat the first row and write the same values. Keys after a sequence's position are masked, and
`KVCache.clear_behind` keeps them zero. The forward is `GPT.transform`; the host waits only for the
tokens of a step.

The next step can be launched before the host reads the tokens: it takes them from the device. The
host knows everything else, because a random number is a function of its position.

With batch invariance every step has the largest sizes, and prefill computes one block at a time:
then no kernel and no division of work depends on the number of sequences or their lengths. The
self-check on the device (`check.py`) verifies that a kernel treats its rows alike.

Shapes: B rows of a step, H = n_head, K = n_kv_head, G = H / K, D = head_dim, V = vocab_size,
N = keys that are read.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.base import Collect, Launcher, Prefilled, PrefillInput
from logitd.model.inference.kernels.cuda.sample import (
    FIELDS,
    NO_TOKEN,
    SamplingKind,
    kind_of,
    pack,
    sample_rows,
)
from logitd.model.inference.kernels.cuda.stream import CudaStream, DirectStream, Stream, padded
from logitd.model.inference.kernels.eager.decoder import block_logits
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.gpt import GPT

SHORTEST = 128
"""The smallest bucket of keys. Chosen, not measured."""
READS_OF_A_COPY = 3
"""Slots that attention can read in the time of copying one slot and reading the copy."""

Key = tuple[int, ...]
"""Key of a recording: (rows, keys, in place) for a forward, (rows, kind) for sampling, (rows,) for
`_take_sampled`."""
_TOKEN, _SLOT, _POSITION, _SAMPLED_IN = range(4)  # columns of an uploaded row


class GraphDecoder:
    """A GPT over its KV cache, recorded for each combination of sizes at its first use."""

    has_threads = False
    mixed_pass = None
    prefill_matches_decode = False

    def __init__(
        self,
        gpt: GPT,
        cache: KVCache,
        *,
        batch_invariant: bool = False,
        overlap: bool = True,
        stream: Stream | None = None,
    ) -> None:
        """`overlap`: allow launching a step before the tokens of the last one are read."""
        device = gpt.token_embedding.weight.device
        self.batch_invariant = batch_invariant
        self._prefill = TorchPrefill(
            gpt, cache, blockwise=batch_invariant, at_once=not batch_invariant
        )
        self._gpt = gpt
        self._cache = cache
        on_gpu = device.type == "cuda"
        self._stream = stream or (CudaStream(device) if on_gpu else DirectStream())
        self._rows = max(cache.slots, DRAFTED_ROWS)
        self._row_buckets = buckets(1, self._rows)
        self._key_buckets = buckets(SHORTEST, cache.slot_length)
        if batch_invariant:
            self._row_buckets, self._key_buckets = (self._rows,), (cache.slot_length,)
        self.launcher: Launcher | None = self if overlap else None
        self._where = torch.zeros(self._rows, 4, dtype=torch.int64, device=device)
        self._how = torch.zeros(self._rows, FIELDS, dtype=torch.int64, device=device)
        self._logits = torch.zeros(self._rows, gpt.config.vocab_size, device=device)
        self._tokens = torch.zeros(self._rows, dtype=torch.int64, device=device)
        self._recorded: dict[Key, Callable[[], None]] = {}

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        return self._prefill(pieces)

    @torch.inference_mode()
    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Logits (B, V) in float32. The next call overwrites them."""
        self._begin_decode(slots, positions, token_ids=token_ids)
        return self._logits[: len(token_ids)]

    @torch.inference_mode()
    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self._begin_decode(slots, positions, token_ids=token_ids)
        return self._begin_sample(sampling)

    @torch.inference_mode()
    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self._begin_decode(slots, positions, sampled_in=rows)
        return self._begin_sample(sampling)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        if self.batch_invariant:
            return block_logits(self._gpt, hidden)
        return self._gpt.logits(hidden)

    @torch.inference_mode()
    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """A token of each row, as `sample_tokens` chooses it up to the rounding of sums. Replays a
        recording if the rows are the ones that `decode` has just returned."""
        if self._is_own(logits) and self._is_own(computed):
            return self._begin_sample(sampling)()
        return _usable(self._sample_unrecorded(logits, computed, sampling))

    def restore_weights(self) -> None:
        """Do nothing: all weights stay in memory."""

    def close(self) -> None:
        """Free the recordings once nothing runs in their memory."""
        with suppress(RuntimeError):  # a step whose tokens will not be collected may have failed
            self._stream.download(self._tokens[:1])()
        self._recorded.clear()

    def _begin_decode(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        *,
        token_ids: Sequence[int] | None = None,
        sampled_in: Sequence[int] | None = None,
    ) -> None:
        """Start a forward on known tokens, or on the tokens sampled last in these rows."""
        for slot, position in dict(zip(slots, positions, strict=True)).items():  # the last of each
            self._cache.clear_behind(slot, position + 1)
            self._cache.wrote(slot, position + 1)
        rows = bucket(self._row_buckets, len(slots))
        keys = bucket(self._key_buckets, max(positions) + 1)
        in_place = self._reads_in_place(slots)
        unknown = [0] * len(slots)
        where = (token_ids or unknown, slots, positions, sampled_in or unknown)
        self._stream.upload(padded(np.array(where).T, rows), self._where[:rows])
        if sampled_in is not None:
            self._run((rows,), lambda: self._take_sampled(rows))
        self._run((rows, keys, in_place), lambda: self._forward(rows, keys, in_place))

    def _begin_sample(self, sampling: SamplingRows) -> Collect:
        """Start sampling the logits of the last forward. The result waits for the tokens."""
        kind, rows = self._kind(sampling), bucket(self._row_buckets, len(sampling))
        self._stream.upload(padded(pack(sampling), rows), self._how[:rows])
        self._run((rows, kind), lambda: self._sample_recorded(rows, kind))
        download = self._stream.download(self._tokens[: len(sampling)])
        return lambda: _usable(download())

    def _kind(self, sampling: SamplingRows) -> SamplingKind:
        return SamplingKind.FILTERED if self.batch_invariant else kind_of(sampling)

    def _run(self, key: Key, compute: Callable[[], None]) -> None:
        """Replay the recording of a key; make it first if it is missing."""
        if key not in self._recorded:
            self._recorded[key] = self._stream.record(compute)
        self._recorded[key]()

    def _reads_in_place(self, slots: Sequence[int]) -> bool:
        """True if attention reads all slots in place: if enough of them decode one row each, and
        invariance is off."""
        several = len(set(slots)) < len(slots)
        few = READS_OF_A_COPY * len(slots) < self._cache.slots
        return not (self.batch_invariant or several or few)

    def _forward(self, rows: int, keys: int, in_place: bool) -> None:
        """The recorded part of `decode`, from `_where` into `_logits`."""
        where = self._where[:rows, :_SAMPLED_IN]
        token_ids, slots, positions = where.T.contiguous()  # (B,) each
        attend = SlotsAttend(self._cache, slots, positions, keys, in_place=in_place)
        hidden = self._gpt.transform(token_ids[:, None], positions[:, None], attend)
        self._logits[:rows] = self._gpt.logits(hidden[:, 0])

    def _sample_recorded(self, rows: int, kind: SamplingKind) -> None:
        """The recorded part of `sample`, from `_logits` and `_how` into `_tokens`."""
        logits = self._logits[:rows]
        self._tokens[:rows] = sample_rows(logits, logits, self._how[:rows], kind)

    def _take_sampled(self, rows: int) -> None:
        """The recorded part of `launch_next`, from `_tokens` into `_where`. A row without a token
        continues with token 0: its sequence has ended, and its results are discarded."""
        where = self._where[:rows]
        # From one column into another, so that doing it twice changes nothing.
        where[:, _TOKEN] = self._tokens[where[:, _SAMPLED_IN]].clamp(min=0)

    def _sample_unrecorded(
        self, logits: Tensor, computed: Tensor, sampling: SamplingRows
    ) -> list[int]:
        """Sample rows that no recording covers: rows after prompts, or processed logits. With batch
        invariance, in products of the recordings' number of rows."""
        token_ids: list[int] = []
        for start in range(0, len(sampling), self._rows):
            part = slice(start, start + self._rows)
            packed = pack(sampling[part])
            missing = self._rows - len(packed) if self.batch_invariant else 0
            sampled = sample_rows(
                F.pad(logits[part], (0, 0, 0, missing)),
                F.pad(computed[part], (0, 0, 0, missing)),
                torch.from_numpy(padded(packed, len(packed) + missing)).to(logits.device),
                self._kind(sampling),
            )
            token_ids += sampled[: len(packed)].tolist()
        return token_ids

    def _is_own(self, logits: Tensor) -> bool:
        """True if these are the rows that `decode` returned."""
        own = self._logits
        return logits.data_ptr() == own.data_ptr() and logits.stride() == own.stride()


class SlotsAttend:
    """Attention of new positions over the first `keys` positions of their slots. Slots and
    positions (B,) are on the device, and keys after a position are masked.

    `in_place`: queries move to the indices of their slots and attend over all S slots; only copies
    of one row may share a slot, and results of slots without a row are dropped. Otherwise the keys
    and values of each row are gathered first.
    """

    def __init__(
        self, cache: KVCache, slots: Tensor, positions: Tensor, keys: int, *, in_place: bool = False
    ) -> None:
        self._cache = cache
        self._slots, self._positions, self._keys = slots, positions, keys
        self._in_place = in_place
        seen = self._placed(positions) if in_place else positions  # (S,) or (B,)
        hidden = torch.arange(keys, device=slots.device) > seen[:, None]  # (S or B, N)
        mask = torch.zeros(hidden.shape, dtype=cache.keys.dtype, device=slots.device)
        self._mask = mask.masked_fill_(hidden, -math.inf)[:, None, None]  # (S or B, 1, 1, N)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q (B, H, 1, D); k, v (B, K, 1, D)
        cells = self._cache.keys[layer], self._cache.values[layer]  # (S, K, L, D) each
        for cell, new in zip(cells, (k, v), strict=True):
            cell[self._slots, :, self._positions] = new[:, :, 0]
        keys, values = (cell[:, :, : self._keys] for cell in cells)  # (S, K, N, D), no copies
        # Queries that share a key head are adjacent: (B, K, G, D).
        queries = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        if self._in_place:
            queries = self._placed(queries)  # (S, K, G, D)
        else:
            keys, values = (cells.index_select(0, self._slots) for cells in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask)
        if self._in_place:
            out = out.index_select(0, self._slots)  # (B, K, G, D)
        return out.reshape(q.shape)

    def _placed(self, rows: Tensor) -> Tensor:
        """Scatter rows (B, ...) to the indices of their slots: (S, ...), zeros elsewhere."""
        placed = rows.new_zeros(self._cache.slots, *rows.shape[1:])
        placed[self._slots] = rows
        return placed


def buckets(first: int, last: int) -> tuple[int, ...]:
    """`first`, its doubles below `last`, and `last`."""
    doubles = (first << power for power in range(last.bit_length()))
    return (*(size for size in doubles if size < last), last)


def bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size that is at least `count`."""
    return sizes[bisect.bisect_left(sizes, count)]


def _usable(token_ids: list[int]) -> list[int | None]:
    return [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
