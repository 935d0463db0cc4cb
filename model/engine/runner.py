"""Runner: computes what a step plan asks for. The one file between the engine and the tensors.

Prefill runs in whole blocks of 32 positions at multiples of 32, decode in rows padded to a multiple
of ROW_GROUP: so the arithmetic of a row depends on its phase and position only, never on who is
computed beside it. Measured on the matrix products of CPUs: the bits of a row differ between 1, 2
to 3, and 4 or more rows, and are one class from 4 rows up in multiples of 4. Only products smaller
than those of real models are outside of this: in float32 with fewer than 12 columns and an inner
width that is no multiple of 4, in bfloat16 with rows * columns * inner width up to 4096, where
torch changes kernels.

Knows sequences and plans, not queues or events. Decides nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.config import BLOCK
from model.engine.sampler import Row, Sampled, sample, score
from model.engine.scheduler import PrefillChunk, StepPlan
from model.engine.sequence import Sequence
from model.gpt import GPT
from model.kv_cache import KVCache

ROW_GROUP = 4
ROWS_BYTES = 16 * 2**20
"""What one piece of full-vocabulary rows may take in float32."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits of some prompt positions: a NumPy array (len(positions), columns), float32."""

    positions: tuple[int, ...]
    values: Any


@dataclass(slots=True)
class StepOutput:
    """The results of one plan, by sequence."""

    sampled: dict[Sequence, Sampled] = field(default_factory=dict)
    rows: dict[Sequence, Rows] = field(default_factory=dict)
    prompts: dict[Sequence, list[Sampled]] = field(default_factory=dict)


class Runner:
    """A model, its cache, and the forward passes of a step."""

    def __init__(self, gpt: GPT, slots: int) -> None:
        _check_mode(gpt)
        weight = gpt.token_embedding.weight
        self.gpt = gpt
        self.device = weight.device
        self.cache = KVCache(gpt.config, slots, device=weight.device, dtype=weight.dtype)

    def check_replaceable(self, gpt: GPT) -> None:
        """Raise ValueError unless `gpt` could use this cache as it is."""
        _check_mode(gpt)
        weight, old = gpt.token_embedding.weight, self.gpt.token_embedding.weight
        if gpt.config != self.gpt.config:
            raise ValueError("the new weights are of another shape than the model being served")
        if (weight.device, weight.dtype) != (old.device, old.dtype):
            raise ValueError(
                f"the new weights are {weight.dtype} on {weight.device}, those being served "
                f"{old.dtype} on {old.device}"
            )

    def replace(self, gpt: GPT) -> None:
        """Compute with other weights from now on; the cache's contents mean nothing to them."""
        self.gpt = gpt

    @property
    def rows_chunk(self) -> int:
        """Positions of a LogitsRequest to compute at once, whole blocks of 32."""
        row_bytes = 4 * self.gpt.config.vocab_size
        return max(1, ROWS_BYTES // row_bytes // BLOCK) * BLOCK

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        output = StepOutput()
        sequences: list[Sequence] = []
        logits: list[Tensor] = []  # each (1, V)
        for chunk in plan.prefill:
            hidden = self.prefill(chunk)
            if chunk.sequence.scores_prompt:
                output.prompts[chunk.sequence] = self._prompt_scores(chunk, hidden)
            if chunk.sequence.logits is not None:
                output.rows[chunk.sequence] = self._rows(chunk, hidden)
            elif chunk.completes_prompt:
                sequences.append(chunk.sequence)
                logits.append(self._logits(hidden[-1:]))
        if plan.decode:
            sequences.extend(plan.decode)
            logits.append(self.decode(plan.decode))
        if sequences:
            rows = [_row(sequence) for sequence in sequences]
            sampled = sample(torch.cat(logits), rows)
            output.sampled = dict(zip(sequences, sampled, strict=True))
        return output

    def prefill(self, chunk: PrefillChunk) -> Tensor:
        """Compute a chunk into its slot; the hidden states of its positions (T, d_model)."""
        sequence, start = chunk.sequence, chunk.start
        assert sequence.slot is not None
        assert start % BLOCK == 0
        if chunk.copy_from is not None:
            self.cache.copy_prefix(chunk.copy_from, sequence.slot, start)
        length = chunk.end - start
        padding = -length % BLOCK
        # The padding's keys lie behind every position that is ever looked at before it is
        # overwritten; its own results are dropped.
        token_ids = torch.tensor(
            [sequence.tokens[start : chunk.end] + [0] * padding], device=self.device
        )
        positions = torch.arange(start, chunk.end + padding, device=self.device)
        positions = positions.clamp(max=self.gpt.config.context_length - 1)[None]
        hidden = self.gpt.transform(token_ids, positions, self.cache.prefill(sequence.slot, start))
        return hidden[0, :length]

    def decode(self, sequences: tuple[Sequence, ...]) -> Tensor:
        """Compute the last token of each sequence; the logits that follow it (B, V)."""
        padding = [0] * (-len(sequences) % ROW_GROUP)
        slots = [s.slot for s in sequences if s.slot is not None]
        places = [s.computed for s in sequences]
        token_ids = torch.tensor(
            [s.tokens[s.computed] for s in sequences] + padding, device=self.device
        )
        positions = torch.tensor(places + padding, device=self.device)
        attend = self.cache.decode(slots, places)
        hidden = self.gpt.transform(token_ids[:, None], positions[:, None], attend)
        return self.gpt.logits(hidden[:, 0])[: len(sequences)]

    def _rows(self, chunk: PrefillChunk, hidden: Tensor) -> Rows:
        request = chunk.sequence.logits
        assert request is not None
        positions = tuple(p for p in request.positions if chunk.start <= p < chunk.end)
        # (P, C) of those positions, then (P, V), then (P, columns)
        logits = self._logits(hidden[[p - chunk.start for p in positions]])
        if request.columns is not None:
            logits = logits[:, list(request.columns)]
        return Rows(positions, logits.float().cpu().numpy())

    def _prompt_scores(self, chunk: PrefillChunk, hidden: Tensor) -> list[Sampled]:
        """Logprobs of the prompt's tokens after each position of the chunk, block by block."""
        request = chunk.sequence.generation
        assert request is not None
        following = request.token_ids[chunk.start + 1 : chunk.end + 1]  # one less at the end
        scored: list[Sampled] = []
        for start in range(0, len(following), BLOCK):
            targets = following[start : start + BLOCK]
            logits = self._logits(hidden[start : start + len(targets)])
            scored += score(logits, targets, request.prompt_logprobs or 0)
        return scored

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits (R, V) of hidden states (R, d_model), by rows padded like those of decode."""
        padding = -len(hidden) % ROW_GROUP
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        return self.gpt.logits(padded)[: len(hidden)]


def _check_mode(gpt: GPT) -> None:
    if gpt.training:
        raise ValueError("the model is in training mode and would drop out; call eval() on it")


def _row(sequence: Sequence) -> Row:
    request = sequence.generation
    assert request is not None
    matcher = sequence.matcher
    return Row(
        request.params,
        sequence.index,
        sequence.tokens,
        sequence.prompt_length,
        None if matcher is None else matcher.allowed(),
    )
