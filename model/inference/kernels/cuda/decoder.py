"""GraphDecoder: decode steps and sampling on a GPU, two launches a step instead of some hundreds.

A small model's step is short on a GPU, and to start its kernels one by one is expected to take
longer than they do. So a step is recorded once and replayed: on tensors that stay where they are,
filled by one copy from pinned memory (`pinned.py`), for a number of rows and a length of keys taken
from a few sizes (buckets). Rows beyond those asked for repeat the first one, so that they write
what it writes where it writes it; keys beyond a sequence's position are masked, and
`KVCache.clear_behind` keeps them zero. The forward is `GPT.transform`, sampling is
`model/inference/kernels/cuda/sample.py`; the tokens of a step are the only thing that the host
waits for. While the forward runs, the host packs what sampling needs.

The next step can be launched before the tokens of the one in flight were read: it takes them on the
device, where sampling leaves them. The host knows everything else about it beforehand, the random
numbers too, because each is a function of its position and not the next of a stream. So the device
has the next step before it has finished the present one, and the host waits for the tokens of one
step while the next computes.

Attention reads keys and values where they lie when most slots decode, those of the others for
nothing; else it reads copies of those that do. A piece of a prompt attends in one operation for
each layer.

Batch-invariant, every step takes the largest sizes: then no kernel is chosen, nor work divided, by
how many sequences run or how long they are. What is left is that a kernel treats its rows alike,
which can be seen on a GPU alone (`python -m benchmarks.gpu`). It costs the time of a full batch at
full length for every step, and prefill a block at a time.

The same code runs on a CPU without recording, for its tests. It has never been run on a GPU.

Shapes: B rows of a step, H = n_head, K = n_kv_head, G = H / K, D = head_dim, V = vocab_size,
N = keys looked at.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.inference.kernels.base import Collect, Launcher, Prefilled, PrefillInput
from logitd.model.inference.kernels.cuda.capture import Capture, Compute, capture_for
from logitd.model.inference.kernels.cuda.pinned import PinnedDownload, PinnedUpload
from logitd.model.inference.kernels.cuda.sample import (
    FIELDS,
    NO_TOKEN,
    SamplingKind,
    kind_of,
    pack,
    sample_rows,
)
from logitd.model.inference.kernels.eager.decoder import block_logits
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.gpt import GPT

SHORTEST = 128
"""The smallest bucket of keys. Chosen, not measured."""
READS_OF_A_COPY = 3
"""To copy a slot and attend over the copy is to read, write and read it: as much as to attend over
three slots where they lie."""
MOST_RECORDED = 96
"""Recordings kept; the one that was not used for longest goes. 256 slots of 1,024 positions need 80
if every combination comes up."""

DecodeKey = tuple[int, int, bool]  # rows, keys, whether these are read in place
SampleKey = tuple[int, SamplingKind]  # rows, kind
TakeKey = tuple[int]  # rows
Key = DecodeKey | SampleKey | TakeKey
_TOKEN, _SLOT, _POSITION, _SAMPLED_IN = range(4)  # what the host says of a row of a step


class GraphDecoder:
    """A GPT over its KV cache, recorded for each combination of sizes when it first comes up."""

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
        capture: Capture | None = None,
    ) -> None:
        """`overlap`: whether a step may be launched before the tokens of the last are read."""
        device = gpt.token_embedding.weight.device
        self.batch_invariant = batch_invariant
        self._prefill = TorchPrefill(
            gpt, cache, blockwise=batch_invariant, at_once=not batch_invariant
        )
        self._gpt = gpt
        self._cache = cache
        self._capture = capture or capture_for(device)
        self._rows = max(cache.slots, DRAFTED_ROWS)
        self._row_buckets = buckets(1, self._rows)
        self._key_buckets = buckets(SHORTEST, cache.slot_length)
        if batch_invariant:
            self._row_buckets, self._key_buckets = (self._rows,), (cache.slot_length,)
        self._overlap = overlap
        self._where = PinnedUpload(self._rows, 4, device)
        self._how = PinnedUpload(self._rows, FIELDS, device)
        self._logits = torch.zeros(self._rows, gpt.config.vocab_size, device=device)
        self._tokens = PinnedDownload(self._rows, device)
        self._recorded: OrderedDict[Key, Compute] = OrderedDict()

    @property
    def launcher(self) -> Launcher | None:
        return self if self._overlap else None

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        return self._prefill(pieces)

    @torch.inference_mode()
    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Logits (B, V) in float32 that follow the tokens, whose keys and values are written into
        the cache. The tensor is overwritten by the next call."""
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
        """A token of each row of `logits` (R, V), float32: what `sample_tokens` gives, up to the
        rounding of sums. Replayed where the rows are those that `decode` has just returned."""
        if self._is_own(logits) and self._is_own(computed):
            return self._begin_sample(sampling)()
        return _usable(self._sample_unrecorded(logits, computed, sampling, self._kind(sampling)))

    def restore_weights(self) -> None:
        """All weights are there."""

    def close(self) -> None:
        """Let go of the recordings and their memory, once nothing runs in it any more. Nothing may
        be decoded afterwards."""
        with suppress(RuntimeError):  # of a step whose tokens will not be collected
            self._tokens.wait()
        self._recorded.clear()

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._recorded)

    def _begin_decode(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        *,
        token_ids: Sequence[int] | None = None,
        sampled_in: Sequence[int] | None = None,
    ) -> None:
        """Start a forward on known tokens, or on those sampled last, by their rows."""
        count = len(slots)
        if count > self._rows:
            raise ValueError(
                f"{count} rows are asked for, and this decoder has buffers for {self._rows}"
            )
        for slot, position in dict(zip(slots, positions, strict=True)).items():  # the last of each
            self._cache.clear_behind(slot, position + 1)
            self._cache.wrote(slot, position + 1)
        rows = bucket(self._row_buckets, count)
        keys = bucket(self._key_buckets, max(positions) + 1)
        in_place = self._reads_in_place(slots)
        unknown = [0] * count
        where = (token_ids or unknown, slots, positions, sampled_in or unknown)
        self._where.upload(np.array(where).T, rows)
        if sampled_in is not None:
            self._run((rows,), lambda: self._take_sampled(rows))
        self._run((rows, keys, in_place), lambda: self._forward(rows, keys, in_place))

    def _begin_sample(self, sampling: SamplingRows) -> Collect:
        """Start sampling the logits that the last forward leaves; returns what waits for the
        tokens."""
        kind, rows = self._kind(sampling), bucket(self._row_buckets, len(sampling))
        self._how.upload(pack(sampling), rows)
        self._run((rows, kind), lambda: self._sample_recorded(rows, kind))
        download = self._tokens.begin(len(sampling))
        return lambda: _usable(download.values())

    def _kind(self, sampling: SamplingRows) -> SamplingKind:
        return SamplingKind.FILTERED if self.batch_invariant else kind_of(sampling)

    def _run(self, key: Key, compute: Compute) -> None:
        """Replay what was recorded under a key, recording it first if need be."""
        if key not in self._recorded:
            if len(self._recorded) == MOST_RECORDED:
                self._recorded.popitem(last=False)
            self._recorded[key] = self._capture.record(compute)
        self._recorded.move_to_end(key)
        self._recorded[key]()

    def _reads_in_place(self, slots: Sequence[int]) -> bool:
        """Whether attention goes over all slots. Not where a slot has several rows, as drafts
        have; nor batch-invariant, where no step may differ from another."""
        several = len(set(slots)) < len(slots)
        few = READS_OF_A_COPY * len(slots) < self._cache.slots
        return not (self.batch_invariant or several or few)

    def _forward(self, rows: int, keys: int, in_place: bool) -> None:
        """The recorded part of `decode`, from `_where` into `_logits`."""
        where = self._where.device[:rows, :_SAMPLED_IN]
        token_ids, slots, positions = where.T.contiguous()  # (B,) each
        attend = SlotsAttend(self._cache, slots, positions, keys, in_place=in_place)
        hidden = self._gpt.transform(token_ids[:, None], positions[:, None], attend)
        self._logits[:rows] = self._gpt.logits(hidden[:, 0])

    def _sample_recorded(self, rows: int, kind: SamplingKind) -> None:
        """The recorded part of `sample`, from `_logits` and `_how` into `_tokens`."""
        logits = self._logits[:rows]
        self._tokens.device[:rows] = sample_rows(logits, logits, self._how.device[:rows], kind)

    def _take_sampled(self, rows: int) -> None:
        """The recorded part of `launch_next`, from `_tokens` into `_where`. A row that got no
        token goes on with any: its sequence has ended, and what follows is discarded."""
        where = self._where.device[:rows]
        # From one column into another: to do it twice is to do it once.
        where[:, _TOKEN] = self._tokens.device[where[:, _SAMPLED_IN]].clamp(min=0)

    def _sample_unrecorded(
        self, logits: Tensor, computed: Tensor, sampling: SamplingRows, kind: SamplingKind
    ) -> list[int]:
        """Sample rows that are not those of a recording: first tokens of prompts came with them, or
        a request changes its logits. Batch-invariant, as many rows at a time as the recordings."""
        token_ids: list[int] = []
        for start in range(0, len(sampling), self._rows):
            part = slice(start, start + self._rows)
            some = pack(sampling[part])
            missing = self._rows - len(some) if self.batch_invariant else 0
            packed = np.concatenate((some, some[:1].repeat(missing, axis=0)))
            sampled = sample_rows(
                F.pad(logits[part], (0, 0, 0, missing)),
                F.pad(computed[part], (0, 0, 0, missing)),
                torch.from_numpy(packed).to(logits.device),
                kind,
            )
            token_ids += sampled[: len(some)].tolist()
        return token_ids

    def _is_own(self, logits: Tensor) -> bool:
        """Whether rows are those that `decode` gave."""
        own = self._logits
        return logits.data_ptr() == own.data_ptr() and logits.stride() == own.stride()


class SlotsAttend:
    """Attention of new positions over the first `keys` positions of their slots, without a word
    from the host: slots and positions (B,) are on the device, what lies behind is masked.

    `in_place`: queries are put where their slots are and attend over all S slots as they lie; no
    two rows but copies of one row may have the same slot. What comes out for slots without a row
    is never looked at. Else the keys and values of each row are copied together first.
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
        # Queries that share a key head stand below each other: (B, K, G, D).
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
        """Rows (B, ...) where their slots are: (S, ...), zeros elsewhere."""
        placed = rows.new_zeros(self._cache.slots, *rows.shape[1:])
        placed[self._slots] = rows
        return placed


def buckets(first: int, last: int) -> tuple[int, ...]:
    """`first` and its doubles below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest of the sizes that holds so many."""
    return sizes[bisect.bisect_left(sizes, count)]


def _usable(token_ids: list[int]) -> list[int | None]:
    return [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
