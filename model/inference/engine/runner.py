"""Runner: computes what a step plan asks for. The one file between the engine and the tensors.

The passes themselves are a decoder's (`model/kernels/`): each sees to it that the arithmetic of a
row depends on its phase and position only, never on who is computed beside it.

Knows sequences and plans, not queues or events. Decides nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from model.device import one_thread
from model.inference.constraints.protocol import BackgroundMasks
from model.inference.engine.ngram import Draft
from model.inference.engine.overlap import StepsAhead
from model.inference.engine.requests import AttentionWeights, HiddenStates, Logits, OutputsRequest
from model.inference.engine.scheduler import PrefillChunk, StepPlan
from model.inference.engine.sequence import Sequence
from model.inference.errors import ConstraintError
from model.inference.kernels.base import Decoder, Piece, Prefilled, WantedWeights
from model.inference.kernels.eager.decoder import PlainDecoder
from model.inference.kv_cache import KVCache
from model.inference.sampling.sampler import Drawn, Row, Sampled, SlotDraws, process, sample, score
from model.transformer.config import BLOCK
from model.transformer.gpt import GPT

DecoderMaker = Callable[[GPT, KVCache], Decoder]
NO_DRAFTS: Mapping[Sequence, Draft] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rows:
    """What a OutputsRequest wants of some positions: a NumPy array (len(positions), ...),
    float32."""

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

    sampled: dict[Sequence, Drawn] = field(default_factory=dict)
    verified: dict[Sequence, list[Drawn]] = field(default_factory=dict)
    rows: dict[Sequence, Rows] = field(default_factory=dict)
    scores: dict[Sequence, Scores] = field(default_factory=dict)


@dataclass(slots=True)
class _Drawable:
    """Rows of logits to draw tokens from. Of each sequence its own row, and behind it those of its
    draft's tokens; `slots` and `positions` are where the drawn tokens will stand."""

    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # each (rows, V)


class Runner:
    """A model, its cache, and the forward passes of a step."""

    def __init__(
        self,
        gpt: GPT,
        slots: int,
        make_decoder: DecoderMaker = PlainDecoder,
        masks: BackgroundMasks | None = None,
    ) -> None:
        _check_mode(gpt)
        weight = gpt.token_embedding.weight
        self.gpt = gpt
        self.device = weight.device
        self.cache = KVCache(gpt.config, slots, device=weight.device, dtype=weight.dtype)
        self._make_decoder = make_decoder
        self._decoder = make_decoder(gpt, self.cache)
        self._draws = SlotDraws(slots)
        self._ahead = StepsAhead(self._decoder.ahead, self._draws)
        self._masks = masks

    @property
    def prefill_matches_decode(self) -> bool:
        """Whether decoded positions are the bits that prefill would give them."""
        return self._decoder.prefill_matches_decode

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
        self._ahead = StepsAhead(self._decoder.ahead, self._draws)
        self.gpt = gpt

    def close(self) -> None:
        """End the threads that compute for it."""
        if self._masks is not None:
            self._masks.close()
        self._decoder.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        flight = self._ahead.begin(plan)
        rest = plan if flight is None else replace(plan, decode=())
        output = StepOutput()
        wait_for_masks = self._ask_matchers(rest.decode)
        try:
            drawable = self._compute(rest, output)
        finally:
            if wait_for_masks is not None:
                wait_for_masks()
        if drawable.sequences:
            self._draw(drawable, plan.drafts, output)
        if flight is not None:
            output.sampled |= flight.collect(plan.decode)
        return output

    def _ask_matchers(self, sequences: tuple[Sequence, ...]) -> Callable[[], None] | None:
        """Have the masks of those that decode computed beside what the caller computes, who then
        waits by what is returned; None where nobody has a mask, or nobody looks ahead."""
        if self._masks is None:
            return None
        matchers = [one.matcher for one in sequences if one.matcher is not None]
        return self._masks.begin(matchers) if matchers else None

    def _compute(self, plan: StepPlan, output: StepOutput) -> _Drawable:
        """All forward passes; what tokens are drawn from."""
        drawable = _Drawable()
        ends: list[Tensor] = []  # of prompts: their last hidden states, each (1, d_model)
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
                assert sequence.slot is not None
                self._draws.begin(sequence.slot, sequence.generation.params, sequence.index)
                drawable.sequences.append(sequence)
                drawable.slots.append(sequence.slot)
                drawable.positions.append(chunk.end)
                ends.append(hidden[-1:])
        if ends:
            drawable.logits.append(self._decoder.head(torch.cat(ends)))
        if plan.decode:
            token_ids, slots, positions = _rows_to_decode(plan.decode, plan.drafts)
            drawable.sequences += plan.decode
            drawable.slots += slots
            drawable.positions += [position + 1 for position in positions]
            drawable.logits.append(self._decoder.decode(token_ids, slots, positions))
        return drawable

    def _draw(
        self, drawable: _Drawable, drafts: Mapping[Sequence, Draft], output: StepOutput
    ) -> None:
        """A token for each sequence, and for each token of its draft the one behind it."""
        sequences, logits = drawable.sequences, drawable.logits
        draws, asking = self._draws.of(drawable.slots, drawable.positions)
        masks: dict[Sequence, Any] = {}
        rows: dict[int, Row] = {}
        if asking:
            masks = {one: _mask(one) for one in sequences if one.matcher is not None}
            every = [row for one in sequences for row in _rows_of(one, masks, drafts.get(one))]
            rows = {place: every[place] for place in asking}
        torch_computes = asking or len(logits) > 1
        alone = self._decoder.has_threads and torch_computes
        with one_thread() if alone else nullcontext():
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            sampled = sample(together, draws, rows, self._decoder.draw)
        if not drafts:
            output.sampled = dict(zip(sequences, sampled, strict=True))
        else:
            _deal_out(sampled, sequences, drafts, output)
        for sequence, mask in masks.items():
            if isinstance(mask, Sampled):
                output.sampled[sequence] = mask

    def prefill(
        self, chunk: PrefillChunk, *, states: bool = False, weights: WantedWeights | None = None
    ) -> Prefilled:
        """Compute a chunk into its slot."""
        sequence, start = chunk.sequence, chunk.start
        assert sequence.slot is not None
        if chunk.copy_from is not None:
            self.cache.copy_prefix(chunk.copy_from, sequence.slot, start)
        token_ids = sequence.tokens[start : chunk.end]
        return self._decoder.prefill(Piece(token_ids, sequence.slot, start, states, weights))

    def decode(
        self, sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft] = NO_DRAFTS
    ) -> Tensor:
        """Compute the last token of each sequence, with its draft behind it; the logits that follow
        each token, a row each: (B + drafted, V)."""
        return self._decoder.decode(*_rows_to_decode(sequences, drafts))

    def _rows(self, chunk: PrefillChunk, request: OutputsRequest) -> Rows:
        """Compute a chunk, and the rows that are wanted of it."""
        positions = tuple(p for p in request.positions if chunk.start <= p < chunk.end)
        offsets = [position - chunk.start for position in positions]
        match request.output:
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


def _rows_to_decode(
    sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft]
) -> tuple[list[int], list[int], list[int]]:
    """Token ids, slots and positions of a decode step's rows: each sequence's last token, with its
    draft behind it."""
    token_ids: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        slot, position = sequence.slot, sequence.computed
        assert slot is not None
        # What wrong drafts leave behind `computed` is overwritten before it is looked at, and
        # never shared.
        token_ids.append(sequence.tokens[position])
        slots.append(slot)
        positions.append(position)
        if drafts and (draft := drafts.get(sequence)) is not None:
            drafted = len(draft.token_ids)
            token_ids += draft.token_ids
            slots += [slot] * drafted
            positions += range(position + 1, position + 1 + drafted)
    return token_ids, slots, positions


def _deal_out(
    sampled: list[Drawn],
    sequences: list[Sequence],
    drafts: Mapping[Sequence, Draft],
    output: StepOutput,
) -> None:
    """Book what was drawn: each sequence's own draw, then those behind the tokens of its draft."""
    drawn = iter(sampled)
    for sequence in sequences:
        output.sampled[sequence] = next(drawn)
        if (draft := drafts.get(sequence)) is not None:
            output.verified[sequence] = list(islice(drawn, len(draft.token_ids)))


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


def _rows_of(sequence: Sequence, masks: Mapping[Sequence, Any], draft: Draft | None) -> list[Row]:
    """A sequence's own row, and those behind the tokens of its draft as if these were its text."""
    request, mask = sequence.generation, masks.get(sequence)
    assert request is not None
    allowed = None if isinstance(mask, Sampled) else mask
    texts = [sequence.tokens]
    if draft is not None:
        drafted = draft.token_ids
        texts += [sequence.tokens + drafted[: count + 1] for count in range(len(drafted))]
    return [
        Row(request.params, sequence.index, text, sequence.prompt_length, allowed) for text in texts
    ]
