"""Runner: computes what a step plan asks for. With `outputs.py`, all of the engine that knows
tensors.

The passes themselves are a decoder's (`model/kernels/`): each sees to it that the arithmetic of a
row depends on its phase and position only, never on who is computed beside it.

Knows sequences and plans, not queues or events. Decides nothing.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.attribution import gradients
from logitd.model.inference.attribution.attribute import Attributing
from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.engine.ngram import Draft
from logitd.model.inference.engine.outputs import (
    Outputs,
    OutputsComputer,
    TappedPasses,
    listed_ids,
    prefill_input,
)
from logitd.model.inference.engine.overlap import OverlapScheduler
from logitd.model.inference.engine.scheduler import PrefillChunk, StepPlan
from logitd.model.inference.engine.sequence import Sequence
from logitd.model.inference.errors import ConstraintError
from logitd.model.inference.kernels.base import Decoder, DecodeRows, MixedPass
from logitd.model.inference.kernels.eager.contention import ContentionMonitor
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import KVCacheDType
from logitd.model.inference.sampling.results import (
    ConstraintComplete,
    SampleError,
    SampleResult,
    ScoredRows,
    ScoredToken,
)
from logitd.model.inference.sampling.sampler import (
    RowContext,
    sample,
    score,
    score_rows,
)
from logitd.model.inference.sampling.state import SamplingState
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT

DecoderMaker = Callable[[GPT, KVCache], Decoder]
NO_DRAFTS: Mapping[Sequence, Draft] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored tokens of a prompt from position `start` on: one by one, or in arrays for each block
    where the request asks for these."""

    start: int
    tokens: list[ScoredToken]
    rows: list[ScoredRows]


@dataclass(slots=True)
class StepOutput:
    """The results of one plan, by sequence. `verified` has the sample after each token of a draft,
    each as if the draft had been right up to there. `prefill_seconds` is how long its prompts took;
    None where the device computes them behind the host's back, and where they were one pass
    `together` with what was decoded."""

    sampled: dict[Sequence, SampleResult] = field(default_factory=dict)
    verified: dict[Sequence, list[SampleResult]] = field(default_factory=dict)
    outputs: dict[Sequence, Outputs] = field(default_factory=dict)
    scores: dict[Sequence, Scores] = field(default_factory=dict)
    prefill_seconds: float | None = None
    together: bool = False


@dataclass(slots=True)
class _LogitsToSample:
    """Rows of logits to sample tokens from. Of each sequence its own row, and after it those of its
    draft's tokens; `slots` and `positions` are where the sampled tokens will stand."""

    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # each (rows, V)

    def decoded(self, sequences: tuple[Sequence, ...], rows: DecodeRows) -> None:
        """Take the places of rows that were decoded of sequences."""
        _, slots, positions = rows
        self.sequences += sequences
        self.slots += slots
        self.positions += [position + 1 for position in positions]


@dataclass(frozen=True, slots=True)
class Passes:
    """A model's weights and what computes with them over one cache."""

    gpt: GPT
    decoder: Decoder
    overlap: OverlapScheduler
    tapped: TappedPasses
    outputs: OutputsComputer
    contention: ContentionMonitor

    def close(self) -> None:
        """End the threads that compute for it."""
        self.decoder.close()


class Runner:
    """A model, its cache, and the forward passes of a step."""

    def __init__(
        self,
        gpt: GPT,
        slots: int,
        make_decoder: DecoderMaker = PlainDecoder,
        *,
        clock: Callable[[], float] = time.monotonic,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        _check_mode(gpt)
        weight = gpt.token_embedding.weight
        self.gpt = gpt
        self._clock = clock
        self.device = weight.device
        self.cache = KVCache(
            gpt.config,
            slots,
            device=weight.device,
            dtype=weight.dtype,
            kept=kv_cache_dtype,
        )
        self._make_decoder = make_decoder
        self._sampling = SamplingState(slots)
        self._attributing: dict[Sequence, Attributing] = {}
        self._use(self._passes(gpt))

    @property
    def prefill_matches_decode(self) -> bool:
        """Whether decoded positions are the bits that prefill would give them."""
        return self._decoder.prefill_matches_decode

    @property
    def computes_at_once(self) -> bool:
        """Whether what was called has been computed when the call returns."""
        return self.device.type == "cpu"

    def prepare(self, gpt: GPT) -> "Passes":
        """All that `replace` needs to compute with other weights, made while these still compute:
        nothing is written to the cache. Raises ValueError unless `gpt` can use the cache as it
        is, and what making a decoder raises."""
        _check_mode(gpt)
        weight, old = gpt.token_embedding.weight, self.gpt.token_embedding.weight
        if gpt.config != self.gpt.config:
            raise ValueError("the new weights are of another shape than the model being served")
        if (weight.device, weight.dtype) != (old.device, old.dtype):
            raise ValueError(
                f"the new weights are {weight.dtype} on {weight.device}, those being served "
                f"{old.dtype} on {old.device}"
            )
        return self._passes(gpt)

    def replace(self, passes: "Passes") -> None:
        """Compute with other weights from now on; the cache's contents mean nothing to them."""
        self._decoder.close()
        self._use(passes)

    def _passes(self, gpt: GPT) -> "Passes":
        decoder = self._make_decoder(gpt, self.cache)
        tapped = TappedPasses(gpt, self.cache, decoder.restore_weights)
        return Passes(
            gpt=gpt,
            decoder=decoder,
            overlap=OverlapScheduler(decoder.launcher, self._sampling),
            tapped=tapped,
            outputs=OutputsComputer(gpt, decoder, tapped),
            contention=_contention(gpt),
        )

    def _use(self, passes: "Passes") -> None:
        self.gpt, self._decoder, self._overlap = passes.gpt, passes.decoder, passes.overlap
        self._tapped, self._outputs = passes.tapped, passes.outputs
        self._contention = passes.contention

    def close(self) -> None:
        """End the threads that compute for it."""
        self._decoder.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan: the decode may be in flight already, or be launched by this call."""
        in_flight, rest = self._overlap.begin(plan), plan
        if in_flight is not None:  # without tapped rows, which are never launched ahead
            rest = replace(plan, decode=tuple(s for s in plan.decode if s.tapped))
        output = StepOutput()
        to_sample = self._compute(rest, output)
        if to_sample.sequences:
            self._sample(to_sample, plan.drafts, output)
        if in_flight is not None:
            output.sampled |= in_flight.collect(s for s in plan.decode if not s.tapped)
        return output

    def attribute(self, sequence: Sequence) -> Attribution | None:
        """Compute the next piece of a sequence's attributions; they themselves after the last."""
        request = sequence.attribution
        assert request is not None
        self._decoder.restore_weights()
        if sequence not in self._attributing:
            watched = self._contention.watched
            attributing = Attributing(self.gpt, request.token_ids, request.task, watched)
            self._attributing[sequence] = attributing
        return self._attributing[sequence].advance()

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the attributions of a sequence that has ended."""
        self._attributing.pop(sequence, None)

    def _compute(self, plan: StepPlan, output: StepOutput) -> _LogitsToSample:
        """All forward passes; the logits that tokens are sampled from."""
        to_sample = _LogitsToSample()
        began = self._clock()
        self._copy_prefixes(plan.prefill)
        for chunk in plan.prefill:
            if (asked := chunk.sequence.outputs) is not None:
                outputs = self._outputs.compute(chunk, asked)
                if outputs.positions:
                    output.outputs[chunk.sequence] = outputs
        prompts = [chunk for chunk in plan.prefill if chunk.sequence.outputs is None]
        ends = [i for i, chunk in enumerate(prompts) if _is_sampled_from(chunk)]
        tapped = tuple(sequence for sequence in plan.decode if sequence.tapped)
        plain = tuple(s for s in plan.decode if not s.tapped) if tapped else plan.decode
        rows = _rows_to_decode(plain, plan.drafts)
        mixed = self._mixed_pass(plan, rows)
        if mixed is not None:
            output.together = True
            pieces = [prefill_input(chunk) for chunk in prompts]
            hidden, logits = mixed.mixed(pieces, ends, rows)
            to_sample.logits.append(logits)
        else:
            hidden = self._hidden(prompts)  # (T, d_model) each
        for chunk, states in zip(prompts, hidden, strict=True):
            first = chunk.sequence.scores_from
            if first is not None and chunk.end > first:
                output.scores[chunk.sequence] = self._scores(chunk, states, first)
        self._begin_sampling([prompts[end] for end in ends], to_sample)
        if mixed is None:
            if self.computes_at_once:
                output.prefill_seconds = self._clock() - began
            if ends:
                last = torch.cat([hidden[end][-1:] for end in ends])  # (E, d_model)
                to_sample.logits.append(self._decoder.head(last))
            if plain:
                to_sample.logits.append(self._decoder.decode(*rows))
        to_sample.decoded(plain, rows)
        if tapped:
            to_sample.logits.append(self._tapped.decode(tapped))
            to_sample.decoded(tapped, _rows_to_decode(tapped, NO_DRAFTS))
        return to_sample

    def _mixed_pass(self, plan: StepPlan, rows: DecodeRows) -> MixedPass | None:
        """What computes the prompts of a plan together with these rows of its decode step; None
        where they are computed one after the other."""
        mixed, count = self._decoder.mixed_pass, len(rows[0])
        if mixed is None or not plan.prefill or not count:
            return None
        if any(chunk.sequence.tapped or chunk.sequence.outputs for chunk in plan.prefill):
            return None
        count += sum(chunk.end - chunk.start for chunk in plan.prefill)
        return mixed if count <= mixed.most_rows else None

    def _begin_sampling(self, ending: Iterable[PrefillChunk], to_sample: _LogitsToSample) -> None:
        """Prompts that end are sampled from behind their last token."""
        for chunk in ending:
            sequence = chunk.sequence
            assert sequence.slot is not None
            assert sequence.generation is not None
            self._sampling.begin(sequence.slot, sequence.generation.params, sequence.index)
            to_sample.sequences.append(sequence)
            to_sample.slots.append(sequence.slot)
            to_sample.positions.append(chunk.end)

    def _sample(
        self, to_sample: _LogitsToSample, drafts: Mapping[Sequence, Draft], output: StepOutput
    ) -> None:
        """A token for each sequence, and the one after each token of its draft."""
        sequences, logits = to_sample.sequences, to_sample.logits
        # 1) How each row is sampled, and which rows need logits processing.
        sampling, processed = self._sampling.rows(to_sample.slots, to_sample.positions)
        # 2) The texts and masks of these rows. Some sequences may have ended by their constraint.
        contexts: dict[int, RowContext] = {}
        without_token: dict[Sequence, SampleError | ConstraintComplete] = {}
        if processed:
            masks, without_token = _masks(sequences)
            every = [
                context
                for sequence in sequences
                for context in _contexts(
                    sequence, masks.get(sequence), drafts.get(sequence), logits[0]
                )
            ]
            contexts = {row: every[row] for row in processed}
        # 3) Sample all rows together. Torch keeps to one thread beside a decoder that has its own.
        torch_computes = processed or len(logits) > 1
        one = self._decoder.has_threads and torch_computes
        with one_thread() if one else nullcontext():
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            results = sample(together, sampling, contexts, self._decoder.sample)
        # 4) To each sequence its result.
        if drafts or without_token:
            _distribute(results, sequences, drafts, without_token, output)
        else:
            output.sampled = dict(zip(sequences, results, strict=True))

    def prefill(self, chunks: Iterable[PrefillChunk]) -> list[Tensor]:
        """Compute chunks into their slots: final hidden states (T, d_model) of each (for tests)."""
        chunks = tuple(chunks)
        self._copy_prefixes(chunks)
        return self._hidden(chunks)

    def _copy_prefixes(self, chunks: Iterable[PrefillChunk]) -> None:
        """In the order of the plan, and before anything is computed: what one copies, another may
        write over behind the prefix that the two have in common."""
        for chunk in chunks:
            if chunk.copy_from is not None:
                assert chunk.sequence.slot is not None
                self.cache.copy_prefix(chunk.copy_from, chunk.sequence.slot, chunk.start)

    def _hidden(self, chunks: Many[PrefillChunk]) -> list[Tensor]:
        """Those of sequences that are not tapped go through the model together."""
        plain = [chunk for chunk in chunks if not chunk.sequence.tapped]
        computed = self._decoder.prefill([prefill_input(chunk) for chunk in plain]) if plain else []
        together = iter(computed)
        return [
            self._tapped.prefill(chunk)[0] if chunk.sequence.tapped else next(together).hidden
            for chunk in chunks
        ]

    def decode(
        self, sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft] = NO_DRAFTS
    ) -> Tensor:
        """Compute the last token of each sequence, with its draft behind it; the logits that follow
        each token, a row each: (B + drafted, V)."""
        return self._decoder.decode(*_rows_to_decode(sequences, drafts))

    def _scores(self, chunk: PrefillChunk, hidden: Tensor, scores_from: int) -> Scores:
        """Logprobs of the tokens after the chunk's positions, block by block."""
        tokens, first = chunk.sequence.tokens, max(chunk.start, scores_from)
        hidden = hidden[first - chunk.start :]
        # One less where the prompt ends.
        following = tokens[first + 1 : min(chunk.end + 1, chunk.sequence.prompt_length)]
        scored = Scores(first + 1, [], [])
        for start in range(0, len(following), BLOCK):
            targets = following[start : start + BLOCK]
            logits = self._decoder.head(hidden[start : start + len(targets)])
            with one_thread() if self._decoder.has_threads else nullcontext():
                if chunk.sequence.scored_in_arrays:
                    scored.rows.append(score_rows(logits, targets, chunk.sequence.scored_top))
                else:
                    scored.tokens.extend(score(logits, targets, chunk.sequence.scored_top))
        return scored


def _is_sampled_from(chunk: PrefillChunk) -> bool:
    """Whether a chunk ends a prompt that is generated from."""
    return chunk.completes_prompt and chunk.sequence.tokens_left > 0


def _contention(gpt: GPT) -> ContentionMonitor:
    """Watches blocks that are computed for attributions."""
    return ContentionMonitor(gpt, keep_bits=gradients.threads_keep_bits)


def _check_mode(gpt: GPT) -> None:
    if gpt.training:
        raise ValueError("the model is in training mode and would drop out; call eval() on it")


def _rows_to_decode(
    sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft]
) -> DecodeRows:
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


def _distribute(
    results: list[SampleResult],
    sequences: list[Sequence],
    drafts: Mapping[Sequence, Draft],
    without_token: Mapping[Sequence, SampleError | ConstraintComplete],
    output: StepOutput,
) -> None:
    """Each sequence's own result, or why it has none, then those after the tokens of its draft."""
    rest = iter(results)
    for sequence in sequences:
        result = next(rest)
        output.sampled[sequence] = without_token.get(sequence, result)
        if (draft := drafts.get(sequence)) is not None:
            output.verified[sequence] = list(islice(rest, len(draft.token_ids)))


def _masks(
    sequences: list[Sequence],
) -> tuple[dict[Sequence, Any], dict[Sequence, SampleError | ConstraintComplete]]:
    """What the constraints allow now: NumPy booleans (V,) by sequence; and why others, whose
    constraint is complete or failed, get no token."""
    masks: dict[Sequence, Any] = {}
    without_token: dict[Sequence, SampleError | ConstraintComplete] = {}
    for sequence in sequences:
        constraint, matcher = sequence.constraint, sequence.matcher
        if constraint is None or matcher is None:
            continue
        try:
            allowed = matcher.allowed()
        except ConstraintError as error:
            without_token[sequence] = SampleError(str(error), constraint.kind)
        except Exception as error:  # a bug of the matcher's, for which no other sequence may fail
            message = f"the constraint failed: {type(error).__name__}: {error}"
            without_token[sequence] = SampleError(message)
        else:
            if matcher.complete:
                without_token[sequence] = ConstraintComplete()
            else:
                masks[sequence] = allowed
    return masks, without_token


def _contexts(
    sequence: Sequence, mask: Any, draft: Draft | None, logits: Tensor
) -> list[RowContext]:
    """A sequence's own row, and those after the tokens of its draft as if these were its text."""
    request = sequence.generation
    assert request is not None
    texts = [sequence.tokens]
    if draft is not None:
        drafted = draft.token_ids
        texts += [sequence.tokens + drafted[: count + 1] for count in range(len(drafted))]
    listed = listed_ids(sequence.group, request.params, logits)
    return [
        RowContext(request.params, listed, sequence.index, text, sequence.prompt_length, mask)
        for text in texts
    ]
