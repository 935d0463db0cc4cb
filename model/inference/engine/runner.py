"""Runner: carries out the plan of a step. In the engine, only this file and `outputs.py` handle
tensors.

A decoder computes the passes (`model/inference/kernels/`). The arithmetic of a row depends on its
phase (prefill or decode) and its position, never on other rows. The runner makes no decisions:
queues and events are left to the scheduler and the engine.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.gradients import Pieces, threads_keep_bits
from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.circuit.find import finding
from logitd.model.inference.circuit.task import Circuit, CircuitTask
from logitd.model.inference.engine.events import OutputsChunk, PromptEvent, ScoresChunk
from logitd.model.inference.engine.ngram import Draft
from logitd.model.inference.engine.outputs import (
    OutputsComputer,
    TappedCode,
    TappedGPT,
    TappedPasses,
    final_norm,
    listed_ids,
    prefill_input,
)
from logitd.model.inference.engine.overlap import OverlapScheduler
from logitd.model.inference.engine.scheduler import PrefillChunk, StepPlan
from logitd.model.inference.engine.sequence import Scoring, Sequence
from logitd.model.inference.errors import ConstraintError
from logitd.model.inference.kernels.base import Decoder, DecodeRows, MixedPass
from logitd.model.inference.kernels.code.decoder import CodeDecoder, TokenCache
from logitd.model.inference.kernels.eager.contention import ContentionMonitor
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import KVCacheDType
from logitd.model.inference.sampling.results import (
    ConstraintComplete,
    SampleError,
    SampleResult,
    ScoredToken,
)
from logitd.model.inference.sampling.sample import SamplingState, usable
from logitd.model.inference.sampling.sampler import RowContext, sample, score, score_rows
from logitd.model.owner_code.connection import CodeModel
from logitd.model.transformer.autoencoder import WITHOUT, Autoencoder, Autoencoders
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.features import with_features
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import Key

Network = GPT | CodeModel
"""A GPT, or the process that runs an owner's code."""
DecoderMaker = Callable[[GPT, KVCache], Decoder]


ScoreEvents = list[PromptEvent | ScoresChunk]


@dataclass(slots=True)
class StepOutput:
    """The results of one plan, by sequence.

    later            samples of the later steps, if several were launched together
    verified         a sample after each token of a draft, on the assumption that all tokens up to
                     it are right
    outputs          outputs of a chunk
    scores           events with the scores of a chunk
    unusable         sequences that want outputs or scores of positions whose logits are not
                     `usable`
    prefill_seconds  time of the prompts; None if the device computes asynchronously, or if one
                     pass computed them `together` with the decode step
    """

    sampled: dict[Sequence, SampleResult] = field(default_factory=dict)
    later: dict[Sequence, list[SampleResult]] = field(default_factory=dict)
    verified: dict[Sequence, list[SampleResult]] = field(default_factory=dict)
    outputs: dict[Sequence, OutputsChunk] = field(default_factory=dict)
    scores: dict[Sequence, ScoreEvents] = field(default_factory=dict)
    unusable: set[Sequence] = field(default_factory=set)
    prefill_seconds: float | None = None
    together: bool = False


@dataclass(frozen=True, slots=True)
class _RowsToSample:
    """Rows of logits (R, V), in one or more tensors. Each sequence has one row, followed by a row
    for each token of its draft. `slots` and `positions` have one entry per row, for the token to be
    sampled."""

    sequences: tuple[Sequence, ...]
    slots: list[int]
    positions: list[int]
    logits: list[Tensor]


@dataclass(frozen=True, slots=True)
class ForwardModel:
    """A model's weights, and the objects that compute with them on one cache. While other processes
    use the cores, `contention` makes attributions run on one thread. It is None if the owner's code
    computes the model, because such a model has no attributions."""

    network: Network
    decoder: Decoder
    overlap: OverlapScheduler
    tapped: TappedPasses
    outputs: OutputsComputer
    contention: ContentionMonitor | None

    def close(self) -> None:
        self.decoder.close()


class Runner:
    """A model, its cache, and the forward passes of a step."""

    def __init__(
        self,
        network: Network,
        slots: int,
        make_decoder: DecoderMaker = PlainDecoder,
        *,
        clock: Callable[[], float] = time.monotonic,
        kv_cache_dtype: KVCacheDType = "auto",
        autoencoders: Autoencoders = WITHOUT,
    ) -> None:
        self._config = with_features(network.config, tuple(autoencoders))
        self._readers: dict[Key, list[tuple[Key, Autoencoder]]] = {}
        for features, autoencoder in autoencoders.items():
            self._readers.setdefault(features.reads, []).append((features.key, autoencoder))
        self._clock = clock
        self._make_decoder = make_decoder
        self._sampling = SamplingState(slots)
        self._attributing: dict[Sequence, Pieces[Attribution] | Pieces[Circuit]] = {}
        self.cache: KVCache | TokenCache
        if isinstance(network, CodeModel):
            self.device = torch.device("cpu")
            self.cache = TokenCache(slots, network.config.context_length)
        else:
            weight = network.token_embedding.weight
            self.device = weight.device
            self.cache = KVCache(
                network.config, slots, device=weight.device, dtype=weight.dtype, kept=kv_cache_dtype
            )
        self.model = self._forward_model(network)

    @property
    def computes_at_once(self) -> bool:
        """True if operations are complete when their calls return."""
        return self.device.type == "cpu"

    def prepare(self, network: Network) -> ForwardModel:
        """Prepare new weights for `replace` while the current weights are still in use. Does not
        write to the cache. Raises ValueError if `network` does not fit the cache. Also raises any
        error of the decoder's constructor."""
        served = self.model.network
        if network.config != served.config:
            raise ValueError("the new weights have a different shape from the served model")
        if isinstance(network, GPT) and isinstance(served, GPT):
            weight, old = network.token_embedding.weight, served.token_embedding.weight
            if (weight.device, weight.dtype) != (old.device, old.dtype):
                raise ValueError(
                    f"the new weights are {weight.dtype} on {weight.device}, but the served "
                    f"weights are {old.dtype} on {old.device}"
                )
        return self._forward_model(network)

    def replace(self, model: ForwardModel) -> None:
        """Replace the weights with the prepared weights. The contents of the cache become
        invalid."""
        self.model.close()
        self.model = model

    def _forward_model(self, network: Network) -> ForwardModel:
        decoder: Decoder
        tapped: TappedPasses
        contention = None
        backout_scale: Tensor | None = None
        if isinstance(network, CodeModel):
            assert isinstance(self.cache, TokenCache)
            decoder = code = CodeDecoder(network, self.cache)
            tapped, normed = TappedCode(network.config, code), code.lens
        else:
            if network.training:
                raise ValueError(
                    "the model is in training mode and would apply dropout: call eval() on it"
                )
            assert isinstance(self.cache, KVCache)
            decoder = self._make_decoder(network, self.cache)
            tapped = TappedGPT(
                network, self._config, self.cache, decoder.restore_weights, self._readers
            )
            normed = partial(final_norm, network)
            backout_scale = network.backout_scale if network.config.backout else None
            contention = ContentionMonitor(network, keep_bits=threads_keep_bits)
        return ForwardModel(
            network=network,
            decoder=decoder,
            overlap=OverlapScheduler(decoder.launcher, self._sampling),
            tapped=tapped,
            outputs=OutputsComputer(self._config, decoder, tapped, normed, backout_scale),
            contention=contention,
        )

    def close(self) -> None:
        self.model.close()

    def parts(self, plan: StepPlan) -> list[StepPlan]:
        """The parts of a plan that are computed one after the other. An error ends only the
        sequences of its part. The owner's code computes each sequence separately, except with
        `--batch-code`."""
        if not isinstance(self.model.network, CodeModel) or self.model.network.together:
            return [plan] if plan else []
        return [
            *(StepPlan((chunk,), ()) for chunk in plan.prefill),
            *(StepPlan((), (sequence,)) for sequence in plan.decode),
        ]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Carry out a plan. Its decode steps may have been launched by an earlier call."""
        in_flight, rest = self.model.overlap.begin(plan), plan
        if in_flight is not None:  # launched steps have no tapped rows
            rest = replace(plan, decode=tuple(s for s in plan.decode if s.tapped))
        output = StepOutput()
        rows = self._compute(rest, output)
        if rows.sequences:
            self._sample(rows, plan.drafts, output)
        if in_flight is not None:
            collected = in_flight.collect(s for s in plan.decode if not s.tapped)
            for sequence, (first, *later) in collected.items():
                output.sampled[sequence] = first
                output.later[sequence] = later
        return output

    def attribute(self, sequence: Sequence) -> Attribution | Circuit | None:
        """Compute the next piece of a sequence's attributions or circuit. Returns None before the
        last piece."""
        request = sequence.attribution
        assert request is not None
        gpt, contention = self.whole_gpt(), self.model.contention
        assert contention is not None
        if sequence not in self._attributing:
            begun: Pieces[Attribution] | Pieces[Circuit]
            if isinstance(request.task, CircuitTask):
                begun = finding(gpt, request.token_ids, request.task)
            else:
                begun = attributing(gpt, request.token_ids, request.task, contention.watched)
            self._attributing[sequence] = begun
        return self._attributing[sequence].advance()

    def whole_gpt(self) -> GPT:
        """The GPT, after restoring the matrices that its decoder may have freed."""
        self.model.decoder.restore_weights()
        assert isinstance(self.model.network, GPT)
        return self.model.network

    def forget(self, sequence: Sequence) -> None:
        self._attributing.pop(sequence, None)

    def _compute(self, plan: StepPlan, output: StepOutput) -> _RowsToSample:
        """Compute all forward passes of a plan, except decode steps in flight. Returns the rows to
        sample: first the last row of each generation whose prompt this plan completes, then the
        rows of decoding sequences, plain sequences before tapped sequences."""
        began = self._clock()
        decoder = self.model.decoder
        logits: list[Tensor] = []
        self._copy_prefixes(plan.prefill)
        self._compute_outputs(plan.prefill, output)
        prompts = [chunk for chunk in plan.prefill if chunk.sequence.outputs is None]
        ends = [i for i, chunk in enumerate(prompts) if _is_sampled_from(chunk)]
        plain = tuple(sequence for sequence in plan.decode if not sequence.tapped)
        tapped = tuple(sequence for sequence in plan.decode if sequence.tapped)
        rows = _rows_to_decode(plain, plan.drafts)
        mixed = self._mixed_pass(plan, rows)
        if mixed is not None:
            output.together = True
            inputs = [prefill_input(chunk) for chunk in prompts]
            hidden, logits_of_both = mixed.mixed(inputs, ends, rows)
            logits.append(logits_of_both)
            self._score(prompts, hidden, output)
        else:
            hidden = self._hidden(prompts)
            self._score(prompts, hidden, output)
            if self.computes_at_once:
                output.prefill_seconds = self._clock() - began
            if ends:
                last = torch.cat([hidden[end][-1:] for end in ends])  # (E, d_model)
                logits.append(decoder.head(last))
            if plain:
                logits.append(decoder.decode(*rows))
        if tapped:
            logits.append(self.model.tapped.decode(tapped))
            rows = _rows_to_decode(plain + tapped, plan.drafts)
        ended = [prompts[end] for end in ends]
        self._begin_sampling(ended)
        _, slots, positions = rows
        return _RowsToSample(
            sequences=(*(chunk.sequence for chunk in ended), *plain, *tapped),
            slots=[*(chunk.sequence.held_slot for chunk in ended), *slots],
            positions=[*(chunk.end for chunk in ended), *(p + 1 for p in positions)],
            logits=logits,
        )

    def _copy_prefixes(self, chunks: Iterable[PrefillChunk]) -> None:
        """Copy the shared prefixes of all chunks before any chunk is computed, and in plan order: a
        later chunk may overwrite the slot from which an earlier chunk copies."""
        for chunk in chunks:
            if chunk.copy_from is not None:
                self.cache.copy_prefix(chunk.copy_from, chunk.sequence.held_slot, chunk.start)

    def _compute_outputs(self, chunks: Iterable[PrefillChunk], output: StepOutput) -> None:
        for chunk in chunks:
            if (request := chunk.sequence.outputs) is not None:
                outputs = self.model.outputs.compute(chunk, request)
                if outputs is None:
                    output.unusable.add(chunk.sequence)
                elif outputs.positions:
                    output.outputs[chunk.sequence] = outputs

    def _mixed_pass(self, plan: StepPlan, rows: DecodeRows) -> MixedPass | None:
        """The pass that computes the prompts of a plan together with the `rows` of its decode step;
        None if they need separate passes."""
        mixed, count = self.model.decoder.mixed_pass, len(rows[0])
        if mixed is None or not plan.prefill or not count:
            return None
        if any(chunk.sequence.tapped or chunk.sequence.outputs for chunk in plan.prefill):
            return None
        count += sum(chunk.end - chunk.start for chunk in plan.prefill)
        return mixed if count <= mixed.most_rows else None

    def _hidden(self, chunks: Many[PrefillChunk]) -> list[Tensor]:
        """Final hidden states (T, d_model) of each chunk. Plain chunks are computed in one pass."""
        plain = [prefill_input(chunk) for chunk in chunks if not chunk.sequence.tapped]
        together = iter(self.model.decoder.prefill(plain) if plain else [])
        return [
            self.model.tapped.prefill(chunk)[0] if chunk.sequence.tapped else next(together).hidden
            for chunk in chunks
        ]

    def _score(
        self, chunks: Iterable[PrefillChunk], hidden: Iterable[Tensor], output: StepOutput
    ) -> None:
        for chunk, states in zip(chunks, hidden, strict=True):
            scoring = chunk.sequence.scoring
            if scoring is not None and chunk.end > scoring.start:
                scores = self._scores(chunk, states, scoring)
                if scores is None:
                    output.unusable.add(chunk.sequence)
                else:
                    output.scores[chunk.sequence] = scores

    def _scores(self, chunk: PrefillChunk, hidden: Tensor, scoring: Scoring) -> ScoreEvents | None:
        """Events with the scores of a chunk; None if a row of logits is not `usable`. A row scores
        the token after its position, so a prompt's first token has no score."""
        sequence, first = chunk.sequence, max(chunk.start, scoring.start)
        request_id, index = sequence.request_id, sequence.index
        hidden = hidden[first - chunk.start :]
        # The last position of a prompt has no token after it.
        following = sequence.tokens[first + 1 : min(chunk.end + 1, sequence.prompt_length)]
        arrays: list[ScoresChunk] = []
        tokens: list[ScoredToken] = []
        for start in range(0, len(following), BLOCK):
            targets = following[start : start + BLOCK]
            logits = self.model.decoder.head(hidden[start : start + len(targets)])
            with self._apart_from_decoder():
                if not usable(logits).all():
                    return None
                if scoring.arrays:
                    rows = score_rows(logits, targets, scoring.top)
                    arrays.append(ScoresChunk(request_id, index, first + 1 + start, rows))
                else:
                    tokens += score(logits, targets, scoring.top)
        if scoring.arrays:
            return [*arrays]
        if first == 0 and scoring.whole:
            tokens = [ScoredToken(sequence.tokens[0]), *tokens]
            return [PromptEvent(request_id, index, 0, tuple(tokens))]
        return [PromptEvent(request_id, index, first + 1, tuple(tokens))]

    def _begin_sampling(self, ended: Iterable[PrefillChunk]) -> None:
        for chunk in ended:
            sequence = chunk.sequence
            assert sequence.generation is not None
            self._sampling.begin(sequence.held_slot, sequence.generation.params, sequence.index)

    def _sample(
        self, rows: _RowsToSample, drafts: Mapping[Sequence, Draft], output: StepOutput
    ) -> None:
        """Sample a token for each sequence, and another after each token of its draft."""
        sequences, logits = rows.sequences, rows.logits
        # 1) Collect the sampling parameters of all rows, and the rows that need logits processing.
        sampling, processed = self._sampling.rows(rows.slots, rows.positions)
        # 2) Collect the tokens and masks of these rows. A constraint may end its sequence here.
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
        # 3) Sample all rows together.
        torch_computes = processed or len(logits) > 1
        with self._apart_from_decoder() if torch_computes else nullcontext():
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            results = iter(sample(together, sampling, contexts, self.model.decoder.sample))
        # 4) Store the result of each sequence, then the results after the tokens of its draft.
        for sequence in sequences:
            result = next(results)
            output.sampled[sequence] = without_token.get(sequence, result)
            if (draft := drafts.get(sequence)) is not None:
                output.verified[sequence] = list(islice(results, len(draft.token_ids)))

    def _apart_from_decoder(self) -> AbstractContextManager[None]:
        """A context that limits torch to one thread if the decoder has its own threads."""
        return one_thread() if self.model.decoder.has_threads else nullcontext()


def _is_sampled_from(chunk: PrefillChunk) -> bool:
    """True if a chunk ends the prompt of a generation."""
    return chunk.completes_prompt and chunk.sequence.tokens_left > 0


def _rows_to_decode(
    sequences: tuple[Sequence, ...], drafts: Mapping[Sequence, Draft]
) -> DecodeRows:
    """Token ids, slots and positions of a decode step's rows: each sequence's last token, followed
    by its draft."""
    token_ids: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        slot, position = sequence.held_slot, sequence.computed
        # Keys of wrong drafts after `computed` are never shared, and are overwritten before any
        # read.
        token_ids.append(sequence.tokens[position])
        slots.append(slot)
        positions.append(position)
        if drafts and (draft := drafts.get(sequence)) is not None:
            drafted = len(draft.token_ids)
            token_ids += draft.token_ids
            slots += [slot] * drafted
            positions += range(position + 1, position + 1 + drafted)
    return token_ids, slots, positions


def _masks(
    sequences: Iterable[Sequence],
) -> tuple[dict[Sequence, Any], dict[Sequence, SampleError | ConstraintComplete]]:
    """The mask of each sequence with a constraint, as NumPy booleans (V,), and the result of each
    sequence that gets no token because its constraint is complete or has failed."""
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
        except Exception as error:  # a bug of the matcher ends only its own sequence
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
) -> Iterator[RowContext]:
    """The sampling context of each row of a sequence: one after its last token, and one after each
    token of its draft."""
    request = sequence.generation
    assert request is not None
    drafted = [] if draft is None else draft.token_ids
    listed = listed_ids(sequence.group, request.params, logits)
    for count in range(len(drafted) + 1):
        text = sequence.tokens + drafted[:count] if count else sequence.tokens
        yield RowContext(request.params, listed, sequence.index, text, sequence.prompt_length, mask)
