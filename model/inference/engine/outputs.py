"""Outputs: what is computed of a chunk beside the cache, for requests that ask for it.

Rows of logits, hidden states, attention weights and named stages, each at the positions of the
chunk that the request chose. Beside `runner.py`, which knows the passes, the one file of the engine
that knows tensors. Sequences that are tapped (`TappedPasses`) are computed apart from the others.

Shapes: P chosen positions, T positions of a chunk, V = vocab_size.
"""

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
from logitd.model.inference.kernels.base import AttentionSelection, Decoder, Prefilled, PrefillInput
from logitd.model.inference.kernels.eager.tapped import TappedDecoder
from logitd.model.inference.kernels.eager.taps import Changes, Key, PieceTap
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.lens import LensDigest, lens_width
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sampler import ListedIds, RowContext, process
from logitd.model.transformer.config import BLOCK, GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import match_stages

NOT_FINITE = "a layer's logits are not finite"


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an OutputsRequest asks for at some positions: a NumPy array (len(positions), ...),
    float32. `error` says why it cannot be told."""

    positions: tuple[int, ...]
    values: Any
    error: str | None = None


def prefill_input(
    chunk: PrefillChunk, states: bool = False, weights: AttentionSelection | None = None
) -> PrefillInput:
    """A chunk as a decoder takes it. The prefix that it continues has to be in its slot."""
    slot, token_ids = chunk.sequence.slot, chunk.sequence.tokens[chunk.start : chunk.end]
    assert slot is not None
    return PrefillInput(token_ids, slot, chunk.start, states, weights)


class TappedPasses:
    """The passes of sequences whose stages are recorded or changed."""

    def __init__(self, gpt: GPT, cache: KVCache, prepare: Callable[[], None]) -> None:
        """`prepare` has all of the weights in memory."""
        self._prepare = prepare
        self._gpt = gpt
        self._decoder = TappedDecoder(gpt, cache)
        self._changes: WeakKeyDictionary[engine_sequence.Sequence, Changes] = WeakKeyDictionary()

    def prefill(
        self, chunk: PrefillChunk, record: Sequence[Key] = (), rows: Sequence[int] = ()
    ) -> tuple[Tensor, PieceTap]:
        """Compute a chunk into its slot: final hidden states (T, d_model), and what was recorded of
        some stages at some rows of the chunk."""
        self._prepare()
        sequence = chunk.sequence
        assert sequence.slot is not None
        tap = PieceTap(
            chunk.start,
            self._changes_of(sequence),
            record,
            rows=rows,
            length=sequence.prompt_length,
        )
        token_ids = sequence.tokens[chunk.start : chunk.end]
        return self._decoder.prefill(token_ids, sequence.slot, chunk.start, tap), tap

    def decode(self, sequences: Sequence[engine_sequence.Sequence]) -> Tensor:
        """Logits (B, V) that follow the last token of each sequence."""
        self._prepare()
        slots = []
        for sequence in sequences:
            assert sequence.slot is not None
            slots.append(sequence.slot)
        return self._decoder.decode(
            [sequence.tokens[sequence.computed] for sequence in sequences],
            slots,
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
    """Computes chunks of prompts, and what is asked for in them."""

    def __init__(self, gpt: GPT, decoder: Decoder, tapped: TappedPasses) -> None:
        self._config = gpt.config
        self._final_norm = gpt.final_norm
        self._decoder = decoder
        self._tapped = tapped

    def compute(self, chunk: PrefillChunk, request: OutputsRequest) -> Outputs:
        """Compute a chunk, and the outputs that are asked for in it and were not handed out before
        the sequence gave its slot back."""
        positions = chunk.sequence.positions_in(chunk.start, chunk.end)
        offsets = [position - chunk.start for position in positions]
        if chunk.sequence.tapped:
            values = self._of_tapped(chunk, request.output, positions, offsets)
        else:
            values = self._of_plain(chunk, request.output, positions, offsets)
        told = not isinstance(request.output, Lens) or bool(values.isfinite().all())
        return Outputs(positions, values.float().cpu().numpy(), None if told else NOT_FINITE)

    def _of_plain(
        self, chunk: PrefillChunk, output: Output, positions: tuple[int, ...], offsets: list[int]
    ) -> Tensor:
        match output:
            case Logits():
                hidden = self._prefill(chunk).hidden[offsets]  # (P, d_model)
                return self._logits(chunk.sequence, output, positions, hidden)
            case HiddenStates(layers=layers):
                states = self._prefill(chunk, states=True).states
                assert states is not None
                return states[list(layers)][:, offsets].transpose(0, 1)  # (P, layers, d_model)
            case Lens(layers=layers):
                prefilled = self._prefill(chunk, states=True)
                assert prefilled.states is not None
                states = prefilled.states[list(layers)][:, offsets]  # (layers, P, d_model)
                following = _following(output, chunk, positions)
                return self._lens(output, states, prefilled.hidden[offsets], following)
            case AttentionWeights(layers=layers, heads=heads):
                length = len(chunk.sequence.request.token_ids)
                selection = AttentionSelection(layers, heads, length)
                weights = self._prefill(chunk, weights=selection).weights
                assert weights is not None
                return weights[offsets]  # (P, layers, heads, T)
            case Activations():
                raise AssertionError("sequences whose stages are recorded are tapped")

    def _prefill(
        self,
        chunk: PrefillChunk,
        *,
        states: bool = False,
        weights: AttentionSelection | None = None,
    ) -> Prefilled:
        [prefilled] = self._decoder.prefill([prefill_input(chunk, states, weights)])
        return prefilled

    def _of_tapped(
        self, chunk: PrefillChunk, output: Output, positions: tuple[int, ...], offsets: list[int]
    ) -> Tensor:
        record = list(_recorded(output, self._config))
        hidden, tap = self._tapped.prefill(chunk, record, offsets)
        hidden = hidden[offsets]  # (P, d_model)
        match output:
            case Logits():
                return self._logits(chunk.sequence, output, positions, hidden)
            case Lens():
                states = torch.stack([tap.recorded(*key) for key in record])
                return self._lens(output, states, hidden, _following(output, chunk, positions))
            case HiddenStates():
                return torch.stack([tap.recorded(*key) for key in record], dim=1)
            case AttentionWeights(heads=heads):
                weights = [tap.recorded(*key)[:, list(heads)] for key in record]
                return torch.stack(weights, dim=1)  # (P, layers, heads, T)
            case Activations(stages=stages, heads=heads):
                values = []
                for stage in match_stages(stages, self._config):
                    if stage.name == "logits":
                        values.append(self._decoder.head(hidden))
                        continue
                    value = tap.recorded(stage.layer, stage.kind.name)  # (P, ...)
                    chosen = heads is not None and stage.heads_axis is not None
                    values.append(value[:, list(heads or ())] if chosen else value)
                return torch.cat([value.flatten(1).float() for value in values], dim=1)

    def _lens(
        self, asked: Lens, states: Tensor, hidden: Tensor, following: Sequence[int]
    ) -> Tensor:
        """Numbers (P, layers, numbers) of streams (layers, P, d_model), of which the last becomes
        the final hidden state (P, d_model): a block of positions and a layer at a time, so that the
        logits of two layers are all that there is in memory."""
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
            padding = [0] * (len(own) - len(following))  # as the rows of logits are
            next_ids = torch.tensor([*following, *padding], device=own.device)
        digest = LensDigest(own, asked.top_k, asked.token_ids, next_ids)
        rows = []
        for layer, stream in zip(asked.layers, states, strict=True):
            at_the_end = layer == self._config.n_layer
            logits = own if at_the_end else self._lens_logits(self._normed(stream))
            rows.append(digest.numbers(logits))
        return torch.stack(rows, dim=1)[: len(hidden)]

    def _lens_logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 of up to a block of final hidden states; on a GPU of a whole block,
        because there the bits of a sum may depend on how many there are."""
        if hidden.is_cuda:
            hidden = F.pad(hidden, (0, 0, 0, BLOCK - len(hidden)))
        return self._decoder.head(hidden).float()

    def _normed(self, stream: Tensor) -> Tensor:
        """The final norm of a stream (P, d_model) in its own dtype: that of the native decoder is
        float32, whatever the weights are in."""
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
            contexts = [
                RowContext(
                    asked.processing,
                    listed,
                    sequence.index,
                    sequence.tokens[: position + 1],
                    _prompt_part(position + 1, asked.completion_start),
                )
                for position in positions
            ]
            logits = process(logits, contexts)
        return logits if asked.columns is None else logits[:, list(asked.columns)]


def listed_ids(group: engine_sequence.Group, params: SamplingParams, logits: Tensor) -> ListedIds:
    """The lists of ids of a request, made for the first row of `logits` (R, V) that needs them."""
    if group.listed is None:
        group.listed = ListedIds(params, logits.shape[-1], logits.device)
    listed: ListedIds = group.listed
    return listed


def _following(asked: Lens, chunk: PrefillChunk, positions: Sequence[int]) -> list[int]:
    """The token after each position, where it is asked about; else nothing."""
    tokens = chunk.sequence.tokens
    return [tokens[position + 1] for position in positions] if asked.following else []


def _recorded(output: Output, config: GPTConfig) -> Iterator[Key]:
    """The stages that an output is made of, but for logits."""
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


def _prompt_part(length: int, completion_start: int | None) -> int:
    """How many of a text's leading tokens are prompt, the rest counting as generated."""
    return length if completion_start is None else min(length, completion_start)
