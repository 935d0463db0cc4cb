"""Runner: computes what a step plan asks for. The one file between the engine and the tensors.

The passes themselves are a decoder's (`model/kernels/`): each sees to it that the arithmetic of a
row depends on its phase and position only, never on who is computed beside it.

Knows sequences and plans, not queues or events. Decides nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from model.config import BLOCK
from model.device import one_thread
from model.engine.api import (
    AttentionWeights,
    ConstraintError,
    HiddenStates,
    Logits,
    MaskAhead,
    RowsRequest,
)
from model.engine.draft import Draft
from model.engine.sampler import Row, Sampled, process, sample, score
from model.engine.scheduler import PrefillChunk, StepPlan
from model.engine.sequence import Sequence
from model.gpt import GPT
from model.kernels.plain import Decoder, PlainDecoder
from model.kernels.prefill import Prefilled, WantedWeights
from model.kv_cache import KVCache

DecoderMaker = Callable[[GPT, KVCache], Decoder]
NO_DRAFTS: Mapping[Sequence, Draft] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rows:
    """What a RowsRequest wants of some positions: a NumPy array (len(positions), ...), float32."""

    positions: tuple[int, ...]
    values: Any


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored tokens of a prompt from position `start` on."""

    start: int
    tokens: list[Sampled]


@dataclass(slots=True)
class StepOutput:
    """The results of one plan, by sequence. `verified` are the draws behind each token of a draft,
    each as if those before it had been drawn."""

    sampled: dict[Sequence, Sampled] = field(default_factory=dict)
    verified: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    rows: dict[Sequence, Rows] = field(default_factory=dict)
    scores: dict[Sequence, Scores] = field(default_factory=dict)


class Runner:
    """A model, its cache, and the forward passes of a step."""

    def __init__(
        self,
        gpt: GPT,
        slots: int,
        make_decoder: DecoderMaker = PlainDecoder,
        masks: MaskAhead | None = None,
    ) -> None:
        _check_mode(gpt)
        weight = gpt.token_embedding.weight
        self.gpt = gpt
        self.device = weight.device
        self.cache = KVCache(gpt.config, slots, device=weight.device, dtype=weight.dtype)
        self._make_decoder = make_decoder
        self._decoder = make_decoder(gpt, self.cache)
        self._masks = masks

    @property
    def phases_agree(self) -> bool:
        """Whether decoded positions are the bits that prefill would give them."""
        return self._decoder.phases_agree

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
        self._decoder.close()
        self._decoder = self._make_decoder(gpt, self.cache)
        self.gpt = gpt

    def close(self) -> None:
        """End the threads that compute for it."""
        self._decoder.close()
        if self._masks is not None:
            self._masks.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        output = StepOutput()
        with self._asking_matchers(plan.decode):
            sequences, logits = self._compute(plan, output)
        if sequences:
            self._draw(plan, sequences, logits, output)
        return output

    @contextmanager
    def _asking_matchers(self, sequences: tuple[Sequence, ...]) -> Iterator[None]:
        """Have the masks of those that decode computed beside what is computed within."""
        matchers = [one.matcher for one in sequences if one.matcher is not None]
        if self._masks is None or not matchers:
            yield
            return
        wait = self._masks.begin(matchers)
        try:
            yield
        finally:
            wait()

    def _compute(self, plan: StepPlan, output: StepOutput) -> tuple[list[Sequence], list[Tensor]]:
        """All forward passes; the sequences that get a token, and their logits, (rows, V) each."""
        sequences: list[Sequence] = []
        ends: list[Tensor] = []  # of prompts: their last hidden states, each (1, d_model)
        logits: list[Tensor] = []  # each (rows, V)
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if sequence.rows is not None:
                handed_out = self._rows(chunk, sequence.rows)
                if handed_out.positions:
                    output.rows[sequence] = handed_out
                continue
            hidden = self.prefill(chunk).hidden  # (T, d_model)
            if sequence.scores_from is not None and chunk.end > sequence.scores_from:
                output.scores[sequence] = self._scores(chunk, hidden, sequence.scores_from)
            if chunk.completes_prompt and sequence.generation is not None:
                sequences.append(sequence)
                ends.append(hidden[-1:])
        if ends:
            logits.append(self._decoder.head(torch.cat(ends)))
        if plan.decode:
            sequences.extend(plan.decode)
            logits.append(self.decode(plan.decode, plan.drafts))
        return sequences, logits

    def _draw(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        logits: list[Tensor],
        output: StepOutput,
    ) -> None:
        """A token for each sequence, and for each token of its draft the one behind it."""
        drafts = plan.drafts
        masks = {one: _mask(one) for one in sequences if one.matcher is not None}
        rows = [row for one in sequences for row in _rows_of(one, masks, drafts.get(one))]
        with one_thread() if self._decoder.has_threads else nullcontext():
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            sampled = iter(sample(together, rows, self._decoder.draw))
        for sequence in sequences:
            drawn, mask = next(sampled), masks.get(sequence)
            output.sampled[sequence] = mask if isinstance(mask, Sampled) else drawn
            if (draft := drafts.get(sequence)) is not None:
                output.verified[sequence] = list(islice(sampled, len(draft.token_ids)))

    def prefill(
        self, chunk: PrefillChunk, *, states: bool = False, weights: WantedWeights | None = None
    ) -> Prefilled:
        """Compute a chunk into its slot."""
        sequence, start = chunk.sequence, chunk.start
        assert sequence.slot is not None
        if chunk.copy_from is not None:
            self.cache.copy_prefix(chunk.copy_from, sequence.slot, start)
        token_ids = sequence.tokens[start : chunk.end]
        return self._decoder.prefill(
            token_ids, sequence.slot, start, states=states, weights=weights
        )

    def decode(
        self, sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft] = NO_DRAFTS
    ) -> Tensor:
        """Compute the last token of each sequence, with its draft behind it; the logits that follow
        each token, a row each: (B + drafted, V)."""
        token_ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for sequence in sequences:
            assert sequence.slot is not None
            position, draft = sequence.computed, drafts.get(sequence)
            # What wrong drafts leave behind `computed` is overwritten before it is looked at, and
            # never shared.
            text = [sequence.tokens[position], *(draft.token_ids if draft else ())]
            token_ids += text
            slots += [sequence.slot] * len(text)
            positions += range(position, position + len(text))
        return self._decoder.decode(token_ids, slots, positions)

    def _rows(self, chunk: PrefillChunk, request: RowsRequest) -> Rows:
        """Compute a chunk, and the rows that are wanted of it."""
        positions = tuple(p for p in request.positions if chunk.start <= p < chunk.end)
        offsets = [position - chunk.start for position in positions]
        match request.wanted:
            case Logits() as wanted:
                hidden = self.prefill(chunk).hidden[offsets]  # (P, d_model)
                values = self._wanted_logits(chunk.sequence, wanted, positions, hidden)
            case HiddenStates(layers=layers):
                states = self.prefill(chunk, states=True).states
                assert states is not None
                values = states[list(layers)][:, offsets].transpose(0, 1)  # (P, layers, d_model)
            case AttentionWeights(layers=layers, heads=heads):
                wanted_weights = WantedWeights(layers, heads, len(request.token_ids))
                weights = self.prefill(chunk, weights=wanted_weights).weights
                assert weights is not None
                values = weights[offsets]  # (P, layers, heads, T)
        return Rows(positions, values.float().cpu().numpy())

    def _wanted_logits(
        self, sequence: Sequence, wanted: Logits, positions: tuple[int, ...], hidden: Tensor
    ) -> Tensor:
        """Logits (P, columns) of final hidden states (P, d_model)."""
        logits = self._decoder.head(hidden)
        if wanted.processing is not None:
            rows = [
                Row(
                    wanted.processing,
                    sequence.index,
                    sequence.tokens[: position + 1],
                    _prompt_part(position + 1, wanted.completion_start),
                )
                for position in positions
            ]
            logits = process(logits, rows)
        return logits if wanted.columns is None else logits[:, list(wanted.columns)]

    def _scores(self, chunk: PrefillChunk, hidden: Tensor, scores_from: int) -> Scores:
        """Logprobs of the tokens after the chunk's positions, block by block."""
        tokens, first = chunk.sequence.tokens, max(chunk.start, scores_from)
        hidden = hidden[first - chunk.start :]
        # One less where the prompt ends.
        following = tokens[first + 1 : min(chunk.end + 1, chunk.sequence.prompt_length)]
        scored: list[Sampled] = []
        for start in range(0, len(following), BLOCK):
            targets = following[start : start + BLOCK]
            logits = self._decoder.head(hidden[start : start + len(targets)])
            scored += score(logits, targets, chunk.sequence.scored_top)
        return Scores(first + 1, scored)


def _check_mode(gpt: GPT) -> None:
    if gpt.training:
        raise ValueError("the model is in training mode and would drop out; call eval() on it")


def _prompt_part(length: int, completion_start: int | None) -> int:
    """How many of a text's leading tokens are prompt, the rest counting as generated."""
    return length if completion_start is None else min(length, completion_start)


def _mask(sequence: Sequence) -> Any:
    """What a sequence's constraint allows now; or, as `Sampled`, why it gets no token."""
    constraint, matcher = sequence.constraint, sequence.matcher
    assert constraint is not None
    assert matcher is not None
    try:
        allowed = matcher.allowed()
    except ConstraintError as error:
        return Sampled(0, error=str(error), param=constraint.kind)
    except Exception as error:  # a bug of the matcher's, for which nobody else has to pay
        return Sampled(0, error=f"the constraint failed: {type(error).__name__}: {error}")
    return Sampled(0, whole=True) if matcher.complete else allowed


def _row(sequence: Sequence, mask: Any) -> Row:
    request = sequence.generation
    assert request is not None
    return Row(
        request.params,
        sequence.index,
        sequence.tokens,
        sequence.prompt_length,
        None if isinstance(mask, Sampled) else mask,
    )


def _rows_of(sequence: Sequence, masks: Mapping[Sequence, Any], draft: Draft | None) -> list[Row]:
    """A sequence's own row, and those behind the tokens of its draft as if these were its text."""
    row = _row(sequence, masks.get(sequence))
    if draft is None:
        return [row]
    token_ids = draft.token_ids
    texts = [sequence.tokens + token_ids[:count] for count in range(1, len(token_ids) + 1)]
    return [row, *(replace(row, tokens=tokens) for tokens in texts)]
