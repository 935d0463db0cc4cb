"""GraphDecoder: prompts, decode steps and sampling on a GPU, with one launch per step.

A step is recorded once for a number of rows and a length of keys, both from a few sizes (buckets).
It is replayed on tensors at fixed addresses, which one copy from pinned memory fills. Padding rows
repeat the first row and write the same values. This module handles sizes, recordings and copies;
`forward.py` computes a step. The host waits only for the tokens of a step.

The next step can be launched before the host reads the tokens: it takes them from the device. The
host knows everything else, because a random number is a function of its position.

Positions of prompts are rows of steps too. With batch invariance, every row's sums have the same
order for any number of rows, so prompts, decoded tokens and drafts have the same bits in any batch.
The self-check on the device (`check.py`) verifies it.

Shapes: R rows of a step, C = d_model, V = vocab_size.
"""

import bisect
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Collect, Launcher, Prefilled, PrefillInput
from logitd.model.inference.kernels.cpu.library import kernel_cache
from logitd.model.inference.kernels.cuda.sample import FIELDS, NO_TOKEN, has_filters, pack
from logitd.model.inference.kernels.cuda.stream import (
    CudaStream,
    DirectStream,
    Integers,
    Stream,
    padded,
)
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.config import BLOCK, parts_of
from logitd.model.transformer.gpt import GPT

SHORTEST = 256
"""The smallest bucket of keys."""
PROMPT_ROWS = 256
"""Maximum number of prompt positions in a recorded step."""
FEWEST_PROMPT_ROWS = 32
LONGEST_PROMPT = 1024
"""Prompts up to this length are computed by recorded steps, in which attention reads all keys for
each position. On an H200, 1,000 positions of GPT-2 take 5.8 ms, in torch 5.4 ms; 256 take 0.9 and
5.1 ms."""

Key = tuple[int | str, ...]
"""Key of a recording: (kind, rows, keys, several rows in a slot, sampling)."""
NO_ROW = -1
"""Marks a token that the host knows, instead of a row that samples it."""
FORWARD, GREEDY, FILTERED = range(3)
"""Kinds of sampling in a recording: none, temperature only, with filters."""


class Forward(Protocol):
    """The computations of a step, on tensors of the device. `given` (R, 4 + FIELDS) are uploaded
    rows; they may refer to `sampled` tokens. Rows of one slot and position are equal."""

    def logits(
        self, given: Tensor, sampled: Tensor, logits: Tensor, *, keys: int, several: bool
    ) -> None:
        """Compute `logits` (R, V), float32, with up to `keys` keys per row. `several`: a slot may
        have rows of several positions, in order."""

    def hidden(self, given: Tensor, sampled: Tensor, hidden: Tensor, *, keys: int) -> None:
        """Compute final hidden states (R, C) of positions of prompts."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (R, V), float32, of final hidden states (R, C)."""

    def sample(self, logits: Tensor, computed: Tensor, packed: Tensor, *, filtered: bool) -> Tensor:
        """A token for each row of `logits` (R, V), float32: int64 (R,). It is NO_TOKEN if the row
        of `computed` (R, V) is not finite or exceeds LARGEST_LOGIT. `packed` (R, FIELDS) is the
        result of `pack` on the device. `filtered`: apply the rows' top_k, top_p and min_p, which
        sorts every row."""


class GraphDecoder:
    """A GPT over its KV cache. Steps are recorded for each combination of sizes at its first
    use."""

    has_threads = False
    mixed_pass = None

    def __init__(
        self,
        gpt: GPT,
        cache: KVCache,
        *,
        batch_invariant: bool = False,
        overlap: bool = True,
        stream: Stream | None = None,
        forward_of: Callable[[int], Forward] | None = None,
    ) -> None:
        """`overlap`: allow launching a step before the tokens of the last one are read.
        `forward_of`: the computation of a number of rows. Raises ValueError for a model with
        `parts_of` nanochat's shape, whose kernels do not exist."""
        if parts := parts_of(gpt.config):
            raise ValueError(f"CUDA graphs do not support {', '.join(parts)}")
        device, config = gpt.token_embedding.weight.device, gpt.config
        on_gpu = device.type == "cuda"
        self.batch_invariant = self.prefill_matches_decode = batch_invariant
        self.launcher: Launcher | None = self if overlap else None
        self._prefill = TorchPrefill(
            gpt, cache, blockwise=batch_invariant, at_once=not batch_invariant
        )
        self._rows = max(cache.slots, DRAFTED_ROWS)
        self._row_buckets = buckets(1, self._rows)
        self._prompt_buckets = buckets(FEWEST_PROMPT_ROWS, PROMPT_ROWS)
        self._key_buckets = buckets(SHORTEST, cache.slot_length)
        most = max(self._rows, PROMPT_ROWS)
        self._given = torch.zeros(most * (4 + FIELDS), dtype=torch.int64, device=device)
        direct = DirectStream()
        self._stream = stream or (CudaStream(device, len(self._given)) if on_gpu else direct)
        self._logits = torch.zeros(self._rows, config.vocab_size, device=device)
        self._hidden = torch.zeros(
            PROMPT_ROWS, config.d_model, dtype=gpt.token_embedding.weight.dtype, device=device
        )
        self._tokens = torch.zeros(self._rows, dtype=torch.int64, device=device)
        self._recorded: dict[Key, Callable[[], None]] = {}
        self._forward_of = forward_of or self._compiled(gpt, cache)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Prefill pieces. Positions of prompts are rows of steps. Torch computes additional outputs
        and, unless bits must not depend on the batch, long prompts."""
        plain = all(piece.plain for piece in pieces)
        ends = [piece.start + len(piece.token_ids) for piece in pieces]
        if plain and (self.batch_invariant or max(ends) <= LONGEST_PROMPT):
            return self._prefill_steps(pieces)
        if not self.batch_invariant or plain:
            return self._prefill(pieces)
        return [self._prefill_apart(piece) for piece in pieces]

    @torch.inference_mode()
    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Logits (B, V) in float32. The next call overwrites them."""
        self._step(token_ids, slots, positions, [NO_ROW] * len(slots), None)
        return self._logits[: len(token_ids)]

    @torch.inference_mode()
    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self._step(token_ids, slots, positions, [NO_ROW] * len(slots), sampling)
        return self._collect(len(slots))

    @torch.inference_mode()
    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self._step([0] * len(slots), slots, positions, rows, sampling)
        return self._collect(len(slots))

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self._forward_of(len(hidden)).head(hidden)

    @torch.inference_mode()
    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """A token for each row, chosen like `sample_tokens` up to the rounding of sums."""
        packed = torch.from_numpy(pack(sampling)).to(logits.device)
        sample = self._forward_of(len(packed)).sample
        return _usable(sample(logits, computed, packed, filtered=has_filters(sampling)).tolist())

    def restore_weights(self) -> None:
        """Do nothing: all weights stay in memory."""

    def close(self) -> None:
        """Free the recordings once nothing runs in their memory."""
        with suppress(RuntimeError):  # a step whose tokens will not be collected may have failed
            self._stream.download(self._tokens[:1])()
        self._recorded.clear()

    def _step(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampled_in: Sequence[int],
        sampling: SamplingRows | None,
    ) -> None:
        """Start a forward pass and, with `sampling`, the choice of tokens. The tokens are known, or
        the last step samples them in the rows `sampled_in`."""
        rows = bucket(self._row_buckets, len(slots))
        keys = bucket(self._key_buckets, max(positions) + 1)
        several, kind = len(set(slots)) < len(slots), FORWARD
        given = np.zeros((len(slots), 4 + FIELDS), dtype=np.int64)
        given[:, :4] = np.array((token_ids, slots, positions, sampled_in)).T
        if sampling is not None:
            given[:, 4:] = pack(sampling)
            kind = FILTERED if has_filters(sampling) else GREEDY
        self._upload(given, rows)
        self._run(
            ("step", rows, keys, several, kind),
            lambda: self._compute_step(rows, keys, several, kind),
        )

    def _collect(self, count: int) -> Collect:
        download = self._stream.download(self._tokens[:count])
        return lambda: _usable(download())

    def _prefill_steps(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        rows = [
            (token_id, piece.slot, piece.start + offset, NO_ROW)
            for piece in pieces
            for offset, token_id in enumerate(piece.token_ids)
        ]
        hidden = [
            self._prefill_rows(rows[start : start + PROMPT_ROWS])
            for start in range(0, len(rows), PROMPT_ROWS)
        ]
        parts = torch.cat(hidden).split([len(piece.token_ids) for piece in pieces])
        return [Prefilled(part) for part in parts]

    def _prefill_apart(self, piece: PrefillInput) -> Prefilled:
        """Prefill a piece with additional outputs. A step writes each block's keys and values again
        after torch, so that the cache has the bits of steps."""
        outputs = list[Prefilled]()
        for offset in range(0, len(piece.token_ids), BLOCK):
            ids = piece.token_ids[offset : offset + BLOCK]
            block = replace(piece, token_ids=ids, start=piece.start + offset)
            outputs += self._prefill([block])
            self._prefill_steps([replace(block, states=False, weights=None)])
        return joined(outputs)

    def _prefill_rows(self, given: Sequence[tuple[int, ...]]) -> Tensor:
        """Final hidden states (T, C) of positions of prompts (token, slot, position, NO_ROW)."""
        rows = bucket(self._prompt_buckets, len(given))
        keys = bucket(self._key_buckets, max(position for _, _, position, _ in given) + 1)
        fields = np.zeros((len(given), 4 + FIELDS), dtype=np.int64)
        fields[:, :4] = given
        self._upload(fields, rows)
        self._run(("prompts", rows, keys), lambda: self._compute_prompts(rows, keys))
        return self._hidden[: len(given)].clone()

    def _upload(self, given: Integers, rows: int) -> None:
        """Upload rows (R, 4 + FIELDS), padded."""
        self._stream.upload(padded(given, rows), self._given[: rows * (4 + FIELDS)])

    def _uploaded(self, rows: int) -> Tensor:
        """The uploaded rows (R, 4 + FIELDS)."""
        return self._given[: rows * (4 + FIELDS)].view(rows, 4 + FIELDS)

    def _run(self, key: Key, compute: Callable[[], None]) -> None:
        """Replay the recording for a key, making it first if it is missing."""
        replay = self._recorded.get(key)
        if replay is None:
            tokens = self._tokens.clone()  # a recording runs a step several times

            def undo() -> None:
                self._tokens.copy_(tokens)

            replay = self._recorded[key] = self._stream.record(compute, undo)
        replay()

    def _compute_step(self, rows: int, keys: int, several: bool, kind: int) -> None:
        """The recorded part of a step, from uploaded rows into `_logits` and `_tokens`."""
        given, forward, logits = self._uploaded(rows), self._forward_of(rows), self._logits[:rows]
        forward.logits(given, self._tokens, logits, keys=keys, several=several)
        if kind != FORWARD:
            how = given[:, 4:]
            self._tokens[:rows] = forward.sample(logits, logits, how, filtered=kind == FILTERED)

    def _compute_prompts(self, rows: int, keys: int) -> None:
        """The recorded part of a prefill, from uploaded rows into `_hidden`."""
        given, hidden = self._uploaded(rows), self._hidden[:rows]
        self._forward_of(rows).hidden(given, self._tokens, hidden, keys=keys)

    @torch.inference_mode()
    def _compiled(self, gpt: GPT, cache: KVCache) -> Callable[[int], Forward]:
        """The Triton kernels, compiled for all sizes, so that no request waits for it."""
        # Triton reads this when it is imported. Its default folder may not be writable in a
        # service.
        os.environ.setdefault("TRITON_CACHE_DIR", str(kernel_cache() / "triton"))
        from logitd.model.inference.kernels.cuda.forward import forwards

        make = partial(forwards, gpt, batch_invariant=self.batch_invariant)
        keys, dtype = self._key_buckets[0], gpt.token_embedding.weight.dtype
        # Use separate keys and values: requests may be decoding in the cache.
        self._forward_of = make(KVCache(gpt.config, 1, device=self._logits.device, dtype=dtype))
        if self._logits.is_cuda:
            for rows in self._row_buckets:
                for several in (False, True):
                    self._compute_step(rows, keys, several, GREEDY)
            for rows in self._prompt_buckets:
                self._compute_prompts(rows, keys)
        return make(cache)


def joined(parts: Sequence[Prefilled]) -> Prefilled:
    """Join the outputs of successive pieces."""

    def cat(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if present else None

    return Prefilled(
        hidden=torch.cat([part.hidden for part in parts]),
        states=cat([part.states for part in parts], 1),
        weights=cat([part.weights for part in parts], 0),
    )


def buckets(first: int, last: int) -> tuple[int, ...]:
    """`first`, its doubles below `last`, and `last`."""
    doubles = (first << power for power in range(last.bit_length()))
    return (*(size for size in doubles if size < last), last)


def bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size that is at least `count`."""
    return sizes[bisect.bisect_left(sizes, count)]


def _usable(token_ids: list[int]) -> list[int | None]:
    return [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
