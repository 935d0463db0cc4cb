"""Outputs: rows of logits, hidden states, attention weights and named stages of a chunk.

Computed at the positions that the request chose. With `runner.py` the only file of the engine that
knows tensors. Tapped sequences are computed apart from the others (`TappedPasses`).

Shapes: P chosen positions, T positions of a chunk, V = vocab_size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from logitd.model.inference.engine import sequence as engine_sequence
from logitd.model.inference.engine.requests import (
    Activations,
    AttentionWeights,
    HiddenStates,
    Lens,
    Logits,
    Output,
    OutputsRequest,
)
from logitd.model.inference.engine.scheduler import PrefillChunk
from logitd.model.inference.kernels.base import AttentionSelection, Decoder, PrefillInput
from logitd.model.inference.kernels.eager.tapped import TappedDecoder
from logitd.model.inference.kernels.eager.taps import Changes, Key, PieceTap
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.lens import LensDigest, lens_width
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sampler import ListedIds, RowContext, process
from logitd.model.transformer.config import BLOCK, GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import match_stages

NOT_FINITE = "the logits, or those of a layer, are not finite"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of an OutputsRequest at some positions: a NumPy array (len(positions), ...), float32.
    `error` is the reason why they are invalid."""

    positions: tuple[int, ...]
    values: Any
    error: str | None = None


def prefill_input(
    chunk: PrefillChunk, states: bool = False, weights: AttentionSelection | None = None
) -> PrefillInput:
    """A chunk as input of a decoder. Its slot must hold the prefix before it."""
    token_ids = chunk.sequence.tokens[chunk.start : chunk.end]
    return PrefillInput(token_ids, chunk.sequence.held_slot, chunk.start, states, weights)


class TappedPasses:
    """The passes of sequences whose stages are recorded or changed."""

    def __init__(self, gpt: GPT, cache: KVCache, prepare: Callable[[], None]) -> None:
        """`prepare` restores all weights in memory."""
        self._prepare = prepare
        self._gpt = gpt
        self._decoder = TappedDecoder(gpt, cache)
        self._changes: WeakKeyDictionary[engine_sequence.Sequence, Changes] = WeakKeyDictionary()

    def prefill(
        self, chunk: PrefillChunk, record: Sequence[Key] = (), rows: Sequence[int] = ()
    ) -> tuple[Tensor, PieceTap]:
        """Compute a chunk into its slot. Returns final hidden states (T, d_model), and the tap that
        recorded some stages at some rows of the chunk."""
        self._prepare()
        sequence = chunk.sequence
        tap = PieceTap(
            chunk.start,
            self._changes_of(sequence),
            record,
            rows=rows,
            length=sequence.prompt_length,
        )
        token_ids = sequence.tokens[chunk.start : chunk.end]
        return self._decoder.prefill(token_ids, sequence.held_slot, chunk.start, tap), tap

    def decode(self, sequences: Sequence[engine_sequence.Sequence]) -> Tensor:
        """Logits (B, V) that follow the last token of each sequence."""
        self._prepare()
        return self._decoder.decode(
            [sequence.tokens[sequence.computed] for sequence in sequences],
            [sequence.held_slot for sequence in sequences],
            [sequence.computed for sequence in sequences],
            [self._changes_of(sequence) for sequence in sequences],
        )

    def _changes_of(self, sequence: engine_sequence.Sequence) -> Changes:
        if sequence not in self._changes:
            self._changes[sequence] = Changes(
                sequence.request.interventions,
                len(sequence.request.token_ids),
                self._gpt.config,
                self._gpt.token_embedding.weight,
            )
        return self._changes[sequence]


class OutputsComputer:
    """Computes chunks of prompts with their outputs."""

    def __init__(self, gpt: GPT, decoder: Decoder, tapped: TappedPasses) -> None:
        self._config = gpt.config
        self._final_norm = gpt.final_norm
        self._decoder = decoder
        self._tapped = tapped

    def compute(self, chunk: PrefillChunk, request: OutputsRequest) -> Outputs:
        """Compute a chunk, and its outputs that were not handed out before an eviction."""
        output, error = request.output, None
        positions = chunk.sequence.positions_in(chunk.start, chunk.end)
        offsets = [position - chunk.start for position in positions]
        compute_pass = self._tapped_pass if chunk.sequence.tapped else self._plain_pass
        hidden, values = compute_pass(chunk, output, offsets)
        if isinstance(output, Logits):
            values = self._logits(chunk.sequence, output, positions, hidden)
            # Processing drops ids by -inf; a maximum is NaN if any element is.
            error = NOT_FINITE if values.numel() and not values.amax() < math.inf else None
        elif isinstance(output, HiddenStates):
            values = values.transpose(0, 1)  # (P, layers, d_model)
        elif isinstance(output, Lens):
            tokens = chunk.sequence.tokens
            following = [tokens[p + 1] for p in positions] if output.following else []
            values = self._lens(output, values, hidden, following)
            error = None if values.isfinite().all() else NOT_FINITE
        return Outputs(positions, values.float().cpu().numpy(), error)

    def _plain_pass(
        self, chunk: PrefillChunk, output: Output, offsets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states (P, d_model) of a chunk, and the stages that its output is made of:
        streams (layers, P, d_model), or attention weights (P, layers, heads, T)."""
        states, weights = isinstance(output, HiddenStates | Lens), None
        if isinstance(output, AttentionWeights):
            length = len(chunk.sequence.request.token_ids)
            weights = AttentionSelection(output.layers, output.heads, length)
        [prefilled] = self._decoder.prefill([prefill_input(chunk, states, weights)])
        hidden = values = prefilled.hidden[offsets]
        if prefilled.weights is not None:
            values = prefilled.weights[offsets]
        elif isinstance(output, HiddenStates | Lens):
            assert prefilled.states is not None
            values = prefilled.states[list(output.layers)][:, offsets]
        return hidden, values

    def _tapped_pass(
        self, chunk: PrefillChunk, output: Output, offsets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The same of a tapped sequence; of activations the stages (P, elements), flattened."""
        record = list(_recorded(output, self._config))
        hidden, tap = self._tapped.prefill(chunk, record, offsets)
        hidden = values = hidden[offsets]
        match output:
            case Lens() | HiddenStates():
                values = torch.stack([tap.recorded(*key) for key in record])
            case AttentionWeights(heads=heads):
                weights = [tap.recorded(*key)[:, list(heads)] for key in record]
                values = torch.stack(weights, dim=1)
            case Activations():
                stages = self._activations(output, hidden, tap)
                values = torch.cat([value.flatten(1).float() for value in stages], dim=1)
        return hidden, values

    def _activations(self, asked: Activations, hidden: Tensor, tap: PieceTap) -> Iterator[Tensor]:
        for stage in match_stages(asked.stages, self._config):
            if stage.name == "logits":
                yield self._decoder.head(hidden)
                continue
            value = tap.recorded(stage.layer, stage.kind.name)
            chosen = asked.heads is not None and stage.heads_axis is not None
            yield value[:, list(asked.heads or ())] if chosen else value

    def _lens(
        self, asked: Lens, states: Tensor, hidden: Tensor, following: Sequence[int]
    ) -> Tensor:
        """Figures (P, layers, numbers) of streams (layers, P, d_model), next to the final hidden
        states (P, d_model). A block of positions and a layer at a time: only the logits of two
        layers are in memory."""
        blocks = [
            self._lens_block(
                asked,
                states[:, start : start + BLOCK],
                hidden[start : start + BLOCK],
                following[start : start + BLOCK],
            )
            for start in range(0, len(hidden), BLOCK)
        ]
        width = lens_width(asked.top_k, asked.named)
        return torch.cat(blocks) if blocks else torch.empty(0, len(asked.layers), width)

    def _lens_block(
        self, asked: Lens, states: Tensor, hidden: Tensor, following: Sequence[int]
    ) -> Tensor:
        own = self._lens_logits(hidden)
        next_ids = None
        if asked.following:
            padding = [0] * (len(own) - len(following))  # like the rows of logits
            next_ids = torch.tensor([*following, *padding], device=own.device)
        digest = LensDigest(own, asked.top_k, asked.token_ids, next_ids)
        rows = []
        for layer, stream in zip(asked.layers, states, strict=True):
            is_last = layer == self._config.n_layer
            logits = own if is_last else self._lens_logits(self._normed(stream))
            rows.append(digest.numbers(logits))
        return torch.stack(rows, dim=1)[: len(hidden)]

    def _lens_logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 of up to a block of final hidden states. Padded to a whole block on a
        GPU, because the bits of a sum may depend on the number of rows there."""
        if hidden.is_cuda:
            hidden = F.pad(hidden, (0, 0, 0, BLOCK - len(hidden)))
        return self._decoder.head(hidden).float()

    def _normed(self, stream: Tensor) -> Tensor:
        """The final norm of a stream (P, d_model) in the stream's dtype, which is float32 on the
        native decoder for weights of any dtype."""
        norm = self._final_norm
        parameters = {name: value.to(stream.dtype) for name, value in norm.named_parameters()}
        normed: Tensor = functional_call(norm, parameters, (stream,))
        return normed

    def _logits(
        self,
        sequence: engine_sequence.Sequence,
        asked: Logits,
        positions: tuple[int, ...],
        hidden: Tensor,
    ) -> Tensor:
        """Logits (P, columns) of final hidden states (P, d_model)."""
        logits = self._decoder.head(hidden)
        if asked.processing is not None:
            listed = listed_ids(sequence.group, asked.processing, logits)
            contexts = []
            for length in (position + 1 for position in positions):
                start = asked.completion_start
                prompt_length = length if start is None else min(length, start)
                tokens = sequence.tokens[:length]
                context = (asked.processing, listed, sequence.index, tokens, prompt_length)
                contexts.append(RowContext(*context))
            logits = process(logits, contexts)
        return logits if asked.columns is None else logits[:, list(asked.columns)]


def listed_ids(group: engine_sequence.Group, params: SamplingParams, logits: Tensor) -> ListedIds:
    """The lists of ids of a request, made when a row of `logits` (R, V) first needs them."""
    if group.listed is None:
        group.listed = ListedIds(params, logits.shape[-1], logits.device)
    listed: ListedIds = group.listed
    return listed


def _recorded(output: Output, config: GPTConfig) -> Iterator[Key]:
    """The stages that an output is made of, except logits."""
    match output:
        case Logits():
            return
        case HiddenStates(layers=layers) | Lens(layers=layers):
            for layer in layers:
                yield (layer - 1, "output") if layer else (None, "embedding")
        case AttentionWeights(layers=layers):
            for layer in layers:
                yield layer, "attention.probs"
        case Activations(stages=stages):
            for stage in match_stages(stages, config):
                if stage.name != "logits":
                    yield stage.layer, stage.kind.name
