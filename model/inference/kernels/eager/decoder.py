"""PlainDecoder: prompts and decode steps in stock torch, wherever torch runs; the others' twin.

Rows of a step are padded to a multiple of ROW_GROUP: so the arithmetic of a row does not depend on
how many others are in the batch. Measured on the matrix products of CPUs: the bits of a row differ
between 1, 2 to 3, and 4 or more rows, and are one class from 4 rows up in multiples of 4. Only
products smaller than those of real models are outside of this: in float32 with fewer than 12
columns and an inner width that is not a multiple of 4, in bfloat16 with rows * columns * inner
width up to 4096, where torch changes kernels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.inference.kernels.base import Prefilled, PrefillInput
from model.inference.kernels.eager.prefill import TorchPrefill
from model.inference.kv_cache import KVCache
from model.inference.sampling.sample import SamplingRows, sample_tokens
from model.transformer.config import BLOCK
from model.transformer.gpt import GPT

ROW_GROUP = 4


class PlainDecoder:
    """A GPT over its KV cache, one torch operation after the other."""

    has_threads = False
    prefill_matches_decode = False
    launcher = None

    def __init__(self, gpt: GPT, cache: KVCache) -> None:
        self._gpt = gpt
        self._cache = cache
        self._device = gpt.token_embedding.weight.device
        self._prefill = TorchPrefill(gpt, cache)

    def prefill(self, pieces: Sequence[PrefillInput]) -> list[Prefilled]:
        return self._prefill(pieces)

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        padding = [0] * (-len(token_ids) % ROW_GROUP)
        ids = torch.tensor([*token_ids, *padding], device=self._device)
        position_ids = torch.tensor([*positions, *padding], device=self._device)
        attend = self._cache.decode(slots, positions)
        hidden = self._gpt.transform(
            ids[:, None], position_ids[:, None], attend
        )  # (B padded, 1, d_model)
        return self._gpt.logits(hidden[:, 0])[: len(token_ids)]

    def head(self, hidden: Tensor) -> Tensor:
        return padded_logits(self._gpt, hidden)

    def sample(self, logits: Tensor, computed: Tensor, sampling: SamplingRows) -> list[int | None]:
        return sample_tokens(logits, computed, sampling)

    def close(self) -> None:
        """Nothing to end."""


def padded_logits(gpt: GPT, hidden: Tensor) -> Tensor:
    """Logits (R, V) of hidden states (R, d_model), by rows padded like those of decode."""
    padding = -len(hidden) % ROW_GROUP
    return gpt.logits(F.pad(hidden, (0, 0, 0, padding)))[: len(hidden)]


def block_logits(gpt: GPT, hidden: Tensor) -> Tensor:
    """Logits (R, V) of hidden states (R, d_model), by products of BLOCK rows each whatever R is:
    where the kernel of a product, and with it a row's bits, depends on the number of rows."""
    padded = F.pad(hidden, (0, 0, 0, -len(hidden) % BLOCK))
    return torch.cat([gpt.logits(rows) for rows in padded.split(BLOCK)])[: len(hidden)]
