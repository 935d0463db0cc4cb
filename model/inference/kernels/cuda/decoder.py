"""GraphDecoder: computes prompts, decodes and samples on a GPU. One launch covers several steps.

A recording is made once for each combination of a number of steps, a number of rows and a number of
keys, all rounded up to a few sizes (buckets). It is replayed on tensors at fixed addresses, which
one copy from pinned memory fills. Padding rows repeat the first row and write the same values. This
module handles sizes, recordings and copies; `forward.py` computes a step. The host waits only for
the tokens.

A step takes the tokens of the step before it from the device. The host knows everything else,
because a random number is a function of its position. So a launch may have several steps, and the
next one can be launched before the host reads their tokens.

Positions of prompts are computed as rows of steps too. With batch invariance, every row's sums have
the same order for any number of rows, so prompts, decoded tokens and drafts have the same bits in
any batch. The self-check on the device (`check.py`) verifies this.

Shapes: K steps of a launch, R rows of a step, C = d_model, V = vocab_size.
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
)
from logitd.model.inference.kernels.eager.prefill import TorchPrefill
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT

SHORTEST = 256
"""The smallest bucket size for numbers of keys."""
PROMPT_ROWS = 256
"""Maximum number of prompt positions in a recorded step."""
FEWEST_PROMPT_ROWS = 32
LONGEST_PROMPT = 1024
"""Prompts up to this length are computed by recorded steps, in which attention reads all keys for
each position. On an H200, 1,000 positions of GPT-2 take 5.8 ms in recorded steps and 5.4 ms in
torch; 256 positions take 0.9 ms in recorded steps and 5.1 ms in torch."""

MOST_STEPS = 4
LAUNCHED_ROWS = 32
"""Maximum number of rows of a launch, counted over all its steps. Longer launches take less of the
host's time, but a new prompt waits for the steps in flight, and a sequence that ends wastes the
remaining steps. On an H200, one sequence of GPT-2 124M decodes 4,600 tokens/s with 1 step, 4,860
with 4, 4,890 with 8."""

Key = tuple[int | str, ...]
"""Key of a recording: (kind, steps, rows, keys, whether a slot has several rows, sampling)."""
NO_ROW = -1
"""An uploaded row holds the index of the row that samples its token, or this value if the host
knows the token."""
FORWARD, GREEDY, FILTERED = range(3)
"""How a recording samples: not at all, without filters, or with filters."""


class Forward(Protocol):
    """The computations that make up a step. All tensors are on the device. `given` (R, 4 + FIELDS)
    holds the uploaded rows. A row may refer to an entry of `sampled` for its token. Rows with the
    same slot and position are equal."""

    def logits(
        self, given: Tensor, sampled: Tensor, logits: Tensor, *, keys: int, several: bool
    ) -> None:
        """Compute `logits` (R, V), float32, with up to `keys` keys per row. `several`: a slot may
        have rows of several positions, in order."""

    def hidden(self, given: Tensor, sampled: Tensor, hidden: Tensor, *, keys: int) -> None:
        """Compute final hidden states (R, C) of positions of prompts."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (R, V), float32, of final hidden states (R, C)."""

    def sample(
        self, logits: Tensor, computed: Tensor, packed: Tensor, out: Tensor, *, filtered: bool
    ) -> None:
        """Write a token for each row of `logits` (R, V), float32, into `out`, int64 (R,). The token
        is NO_TOKEN if the row of `computed` (R, V) is not finite or exceeds LARGEST_LOGIT. `packed`
        (R, FIELDS) is the result of `pack` on the device. `filtered`: apply the rows' top_k, top_p
        and min_p, which sorts every row."""


class GraphDecoder:
    """Computes a GPT on its KV cache. Steps are recorded for each combination of sizes at its first
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
        most_steps: int = MOST_STEPS,
        stream: Stream | None = None,
        forward_of: Callable[[int], Forward] | None = None,
    ) -> None:
        """`overlap`: allow launching steps before the tokens of the previous steps are read.
        `most_steps`: maximum number of steps of a launch, a power of 2. `forward_of`: returns the
        computation for a number of rows."""
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
        self._most_steps, self._last_position = most_steps, cache.slot_length - 1
        most = max(self._rows, PROMPT_ROWS, LAUNCHED_ROWS)
        self._given = torch.zeros(most * (4 + FIELDS), dtype=torch.int64, device=device)
        direct = DirectStream()
        self._stream = stream or (CudaStream(device, len(self._given)) if on_gpu else direct)
        self._logits = torch.zeros(self._rows, config.vocab_size, device=device)
        self._hidden = torch.zeros(
            PROMPT_ROWS, config.d_model, dtype=gpt.token_embedding.weight.dtype, device=device
        )
        # The tokens of a launch's steps; those of the last step are in the last row.
        self._tokens = torch.zeros(most_steps, self._rows, dtype=torch.int64, device=device)
        self._recorded: dict[Key, Callable[[], None]] = {}
        self._forward_of = forward_of or self._compiled(gpt, cache)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        """Prefill pieces. Each position of a prompt is computed as a row of a step. Torch computes
        additional outputs and, without batch invariance, long prompts."""
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
        self._steps(token_ids, slots, positions, NO_ROW, None)
        return self._logits[: len(token_ids)]

    def most_steps(self, rows: int) -> int:
        fitting = LAUNCHED_ROWS // bucket(self._row_buckets, rows)
        return min(self._most_steps, 1 << max(0, fitting.bit_length() - 1))

    @torch.inference_mode()
    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        return self._steps(token_ids, slots, positions, NO_ROW, sampling)

    @torch.inference_mode()
    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        return self._steps(0, slots, positions, rows, sampling)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self._forward_of(len(hidden)).head(hidden)

    @torch.inference_mode()
    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        """Sample a token for each row, with the same result as `sample_tokens` except for the
        rounding of sums."""
        packed = torch.from_numpy(pack(sampling)).to(logits.device)
        out = torch.empty_like(packed[:, 0])
        sample = self._forward_of(len(packed)).sample
        sample(logits, computed, packed, out, filtered=has_filters(sampling))
        return _usable(out.tolist())

    def restore_weights(self) -> None:
        """Do nothing: all weights stay in memory."""

    def close(self) -> None:
        """Wait for the launched steps, then free the recordings."""
        with suppress(RuntimeError):  # a step whose tokens will not be collected may have failed
            self._stream.download(self._tokens[:1])()
        self._recorded.clear()

    def _steps(
        self,
        token_ids: Sequence[int] | int,
        slots: Sequence[int],
        positions: Sequence[int],
        sampled_in: Sequence[int] | int,
        sampling: SamplingRows | None,
    ) -> Collect:
        """Start one step without sampling or, if `sampling` is set, all steps whose sampling rows
        it holds. The tokens of the first step are either `token_ids` or the samples of the last
        launch in the rows with the indices `sampled_in`."""
        count = len(slots)
        steps = 1 if sampling is None else len(sampling) // count
        given = np.empty((steps, count, 4 + FIELDS), dtype=np.int64)
        given[0, :, 0], given[1:, :, 0] = token_ids, 0
        given[0, :, 3], given[1:, :, 3] = sampled_in, np.arange(count)
        given[:, :, 1] = slots
        # A sequence that has reached the end of its slot writes there again, unread.
        later = np.add.outer(np.arange(steps), positions)
        given[:, :, 2] = np.minimum(later, self._last_position)
        kind = FORWARD
        if sampling is not None:
            given[:, :, 4:] = pack(sampling).reshape(steps, count, FIELDS)
            kind = FILTERED if has_filters(sampling) else GREEDY
        rows = bucket(self._row_buckets, count)
        keys = bucket(self._key_buckets, int(given[-1, :, 2].max()) + 1)
        several = len(set(slots)) < count
        self._upload(given, rows)
        self._run(
            ("steps", steps, rows, keys, several, kind),
            lambda: self._compute_steps(steps, rows, keys, several, kind),
        )
        if kind == FORWARD:
            return list
        download = self._stream.download(self._tokens[-steps:])
        return lambda: [_usable(tokens[:count]) for tokens in download()]

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
        """Prefill a piece with additional outputs. Torch computes each block; then a step writes
        the block's keys and values again, so that the cache has the same bits as if steps had
        computed the piece."""
        outputs = list[Prefilled]()
        for offset in range(0, len(piece.token_ids), BLOCK):
            ids = piece.token_ids[offset : offset + BLOCK]
            block = replace(piece, token_ids=ids, start=piece.start + offset)
            outputs += self._prefill([block])
            self._prefill_steps([replace(block, states=False, weights=None)])
        return joined(outputs)

    def _prefill_rows(self, given: Sequence[tuple[int, ...]]) -> Tensor:
        """Final hidden states (T, C) of T positions of prompts, given as (token, slot, position,
        NO_ROW)."""
        rows = bucket(self._prompt_buckets, len(given))
        keys = bucket(self._key_buckets, max(position for _, _, position, _ in given) + 1)
        fields = np.zeros((1, len(given), 4 + FIELDS), dtype=np.int64)
        fields[0, :, :4] = given
        self._upload(fields, rows)
        self._run(("prompts", rows, keys), lambda: self._compute_prompts(rows, keys))
        return self._hidden[: len(given)].clone()

    def _upload(self, given: Integers, rows: int) -> None:
        """Upload the rows of steps (K, R, 4 + FIELDS), padded with copies of the first row."""
        padding = given[:, :1].repeat(rows - given.shape[1], axis=1)
        given = np.concatenate((given, padding), axis=1)
        self._stream.upload(given, self._given[: given.size])

    def _uploaded(self, steps: int, rows: int) -> Tensor:
        """The uploaded rows (K, R, 4 + FIELDS)."""
        return self._given[: steps * rows * (4 + FIELDS)].view(steps, rows, 4 + FIELDS)

    def _run(self, key: Key, compute: Callable[[], None]) -> None:
        """Replay the recording for a key. Record it first if it does not exist."""
        replay = self._recorded.get(key)
        if replay is None:
            tokens = self._tokens.clone()  # a recording runs a step several times

            def undo() -> None:
                self._tokens.copy_(tokens)

            replay = self._recorded[key] = self._stream.record(compute, undo)
        replay()

    def _compute_steps(self, steps: int, rows: int, keys: int, several: bool, kind: int) -> None:
        """Compute `_logits` and `_tokens` from the uploaded rows. This computation is recorded."""
        forward, logits, sampled = self._forward_of(rows), self._logits[:rows], self._tokens[-1]
        for given, tokens in zip(self._uploaded(steps, rows), self._tokens[-steps:], strict=True):
            forward.logits(given, sampled, logits, keys=keys, several=several)
            if kind != FORWARD:
                sampled = tokens[:rows]
                how = given[:, 4:]
                forward.sample(logits, logits, how, sampled, filtered=kind == FILTERED)

    def _compute_prompts(self, rows: int, keys: int) -> None:
        """Compute `_hidden` from the uploaded rows. This computation is recorded."""
        (given,), hidden = self._uploaded(1, rows), self._hidden[:rows]
        self._forward_of(rows).hidden(given, self._tokens[-1], hidden, keys=keys)

    @torch.inference_mode()
    def _compiled(self, gpt: GPT, cache: KVCache) -> Callable[[int], Forward]:
        """Compile the Triton kernels for all sizes, so that no request waits for a compilation.
        Returns the computation for a number of rows."""
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
                    self._compute_steps(1, rows, keys, several, GREEDY)
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
    """Bucket sizes: `first`, doubled repeatedly while below `last`, and then `last`."""
    doubles = (first << power for power in range(last.bit_length()))
    return (*(size for size in doubles if size < last), last)


def bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size that is at least `count`."""
    return sizes[bisect.bisect_left(sizes, count)]


def _usable(token_ids: list[int]) -> list[int | None]:
    return [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
