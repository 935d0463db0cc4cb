"""Outputs: computes logits, hidden states, attention weights and named stages at requested
positions.

In the engine, only this file and `runner.py` handle tensors. Tapped sequences, whose stages are
recorded or changed, are computed one by one (`TappedPasses`, of a GPT or of an owner's code).

Shapes: P requested positions, T positions of a chunk, V = vocab_size.
"""

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from logitd.model.inference.engine import sequence as engine_sequence
from logitd.model.inference.engine.events import OutputsChunk
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
from logitd.model.inference.kernels.code.decoder import CodeDecoder
from logitd.model.inference.kernels.eager.tapped import TappedDecoder
from logitd.model.inference.kernels.eager.taps import Changes, PieceTap, Readers
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.lens import LensDigest, lens_width
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import usable
from logitd.model.inference.sampling.sampler import ListedIds, RowContext, process
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import BLOCK, GPTConfig, ModelConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.stages import Key, match_stages


def prefill_input(
    chunk: PrefillChunk, states: bool = False, weights: AttentionSelection | None = None
) -> PrefillInput:
    """The decoder's input for a chunk. The slot of the chunk must hold the prefix before it."""
    sequence, start = chunk.sequence, chunk.start
    token_ids = sequence.tokens[start : chunk.end]
    first = min(max(0, sequence.first_needed - start), len(token_ids))
    return PrefillInput(
        token_ids, sequence.held_slot, start, states, weights, sequence.tokens, first
    )


class TappedGPT:
    """Computes tapped sequences of a GPT."""

    def __init__(
        self,
        gpt: GPT,
        config: ModelConfig,
        cache: KVCache,
        prepare: Callable[[], None],
        readers: Readers,
    ) -> None:
        """`config` has the stages of the model, `prepare` restores weights that the decoder holds
        only in a packed form, and `readers` compute features."""
        self._prepare = prepare
        self._gpt = gpt
        self._config = config
        self._readers = readers
        self._decoder = TappedDecoder(gpt, cache, readers)
        self._changes: WeakKeyDictionary[engine_sequence.Sequence, Changes] = WeakKeyDictionary()

    def prefill(
        self, chunk: PrefillChunk, record: Sequence[Key] = (), rows: Sequence[int] = ()
    ) -> tuple[Tensor, PieceTap]:
        """Compute a chunk into its slot. Returns final hidden states (T, d_model), and the tap with
        the stages in `record` at the `rows` of the chunk."""
        self._prepare()
        sequence = chunk.sequence
        tap = PieceTap(
            chunk.start,
            self._changes_of(sequence),
            record,
            rows=rows,
            length=sequence.prompt_length,
            readers=self._readers,
        )
        token_ids = sequence.tokens[chunk.start : chunk.end]
        return self._decoder.prefill(token_ids, sequence.held_slot, chunk.start, tap), tap

    def decode(self, sequences: Sequence[engine_sequence.Sequence]) -> Tensor:
        """Logits (B, V) after the last token of each sequence."""
        self._prepare()
        return self._decoder.decode(
            [sequence.tokens[sequence.computed] for sequence in sequences],
            [sequence.held_slot for sequence in sequences],
            [sequence.computed for sequence in sequences],
            [self._changes_of(sequence) for sequence in sequences],
        )

    def _changes_of(self, sequence: engine_sequence.Sequence) -> Changes:
        if sequence not in self._changes:
            self._changes[sequence] = changes_of(
                sequence, self._config, self._gpt.token_embedding.weight
            )
        return self._changes[sequence]


class TappedCode:
    """Computes tapped sequences of a model by running its owner's code, with the methods of
    `TappedGPT`. Each pass computes the whole sequence."""

    def __init__(self, config: CodeConfig, decoder: CodeDecoder) -> None:
        self._config = config
        self._decoder = decoder

    def prefill(
        self, chunk: PrefillChunk, record: Sequence[Key] = (), rows: Sequence[int] = ()
    ) -> tuple[Tensor, PieceTap]:
        changes = changes_of(chunk.sequence, self._config, torch.empty(0))
        tap = PieceTap(0, changes, record, rows=[chunk.start + row for row in rows])
        tokens, keys = chunk.sequence.tokens, {*record, *changes.keys}
        return self._decoder.tapped(tokens, chunk.start, chunk.end, tap, keys), tap

    def decode(self, sequences: Sequence[engine_sequence.Sequence]) -> Tensor:
        logits = []
        for sequence in sequences:
            changes = changes_of(sequence, self._config, torch.empty(0))
            ids, end = sequence.tokens[: sequence.computed + 1], sequence.computed + 1
            tap = PieceTap(0, changes)
            logits.append(self._decoder.tapped(ids, end - 1, end, tap, changes.keys))
        return torch.cat(logits)


TappedPasses = TappedGPT | TappedCode


def changes_of(sequence: engine_sequence.Sequence, config: ModelConfig, like: Tensor) -> Changes:
    """The interventions of a sequence, with their values on the device and in the dtype of
    `like`."""
    request = sequence.request
    return Changes(request.interventions, len(request.token_ids), config, like)


Normed = Callable[[Tensor], Tensor]
"""Computes the final norm of a stream (P, d_model). For a model that its owner's code computes, it
returns the logits instead, because the head of that decoder is the identity."""


class OutputsComputer:
    """Computes chunks of prompts with their outputs."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        tapped: TappedPasses,
        normed: Normed,
        backout_scale: Tensor | None = None,
    ) -> None:
        """`backout_scale`: the parameter of a GPT with `backout`, else None."""
        self._config = config
        self._normed = normed
        self._backout_scale = backout_scale
        self._decoder = decoder
        self._tapped = tapped

    def compute(self, chunk: PrefillChunk, request: OutputsRequest) -> OutputsChunk | None:
        """Compute a chunk and its outputs, except outputs that were delivered before an eviction.
        Returns None if the logits of a position are not `usable`."""
        output, valid = request.output, True
        positions = chunk.sequence.positions_in(chunk.start, chunk.end)
        offsets = [position - chunk.start for position in positions]
        compute_pass = self._tapped_pass if chunk.sequence.tapped else self._plain_pass
        hidden, values = compute_pass(chunk, output, offsets)
        if isinstance(output, Logits):
            logits = self._decoder.head(hidden)
            valid = bool(usable(logits).all())
            values = self._logits(chunk.sequence, output, positions, logits)
        elif isinstance(output, HiddenStates):
            values = values.transpose(0, 1)  # (P, layers, d_model)
        elif isinstance(output, Lens):
            tokens = chunk.sequence.tokens
            following = [tokens[p + 1] for p in positions] if output.following else []
            values = self._lens(output, values, hidden, following)
            valid = bool(values.isfinite().all())
        if not valid:
            return None
        return OutputsChunk(request.request_id, positions, values.float().cpu().numpy())

    def _plain_pass(
        self, chunk: PrefillChunk, output: Output, offsets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states (P, d_model) of a chunk, and the values for its output: streams
        (layers, P, d_model), attention weights (P, layers, heads, T), or, for logits, the same
        hidden states."""
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
            values = prefilled.states[list(_streams(output, self._config))][:, offsets]
        return hidden, values

    def _tapped_pass(
        self, chunk: PrefillChunk, output: Output, offsets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The values of `_plain_pass` for a tapped sequence. For Activations, the values are all
        requested stages, flattened: (P, elements)."""
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
            value = tap.recorded(*stage.key)
            chosen = asked.heads is not None and stage.heads_axis is not None
            yield value[:, list(asked.heads or ())] if chosen else value

    def _lens(
        self, asked: Lens, states: Tensor, hidden: Tensor, following: Sequence[int]
    ) -> Tensor:
        """Lens statistics (P, layers, numbers), computed from the streams of `_streams` (layers, P,
        d_model) and, for comparison, the final hidden states (P, d_model). One block of positions
        and one layer are computed at a time, so only the logits of two layers are in memory."""
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
            padding = [0] * (len(own) - len(following))  # to the number of rows of logits
            next_ids = torch.tensor([*following, *padding], device=own.device)
        digest = LensDigest(own, asked.top_k, asked.token_ids, next_ids)
        rows = []
        for layer, stream in zip(asked.layers, states, strict=False):
            is_last = layer == self._config.n_layer
            middle = middle_layer(self._config)
            if middle is not None and self._backout_scale is not None and layer > middle + 1:
                stream = stream - self._backout_scale.to(stream.dtype) * states[-1]
            logits = own if is_last else self._lens_logits(self._normed(stream))
            rows.append(digest.numbers(logits))
        return torch.stack(rows, dim=1)[: len(hidden)]

    def _lens_logits(self, hidden: Tensor) -> Tensor:
        """Logits of at most a block of final hidden states, in float32. On a GPU the rows are
        padded to a whole block, because there the bits of a sum may depend on the number of rows.
        """
        if hidden.is_cuda:
            hidden = F.pad(hidden, (0, 0, 0, BLOCK - len(hidden)))
        return self._decoder.head(hidden).float()

    def _logits(
        self,
        sequence: engine_sequence.Sequence,
        asked: Logits,
        positions: tuple[int, ...],
        logits: Tensor,
    ) -> Tensor:
        """The requested logits (P, columns) of computed logits (P, V)."""
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


def middle_layer(config: ModelConfig) -> int | None:
    """The layer whose output a GPT's `backout` subtracts; None for a model without `backout`."""
    return config.backout_layer if isinstance(config, GPTConfig) else None


def _streams(output: HiddenStates | Lens, config: ModelConfig) -> tuple[int, ...]:
    """The layers whose streams an output needs. With `backout`, a lens also needs the layer whose
    stream is subtracted; it is listed last."""
    middle = middle_layer(config) if isinstance(output, Lens) else None
    return output.layers if middle is None else (*output.layers, middle + 1)


def listed_ids(group: engine_sequence.Group, params: SamplingParams, logits: Tensor) -> ListedIds:
    """The lists of token ids in a request's parameters, as tensors on the device of `logits` (R,
    V). They are created when a row first needs them."""
    if group.listed is None:
        group.listed = ListedIds(params, logits.shape[-1], logits.device)
    listed: ListedIds = group.listed
    return listed


def final_norm(gpt: GPT, stream: Tensor) -> Tensor:
    """The final norm of a stream (P, d_model), computed in the stream's dtype. The native decoder's
    streams are float32 for weights of any dtype."""
    norm = gpt.final_norm
    parameters = {name: value.to(stream.dtype) for name, value in norm.named_parameters()}
    normed: Tensor = functional_call(norm, parameters, (stream,))
    return normed


def _recorded(output: Output, config: ModelConfig) -> Iterator[Key]:
    """The stages that must be recorded for an output. Logits are not recorded."""
    match output:
        case Logits():
            return
        case Lens(layers=layers) if isinstance(config, CodeConfig):
            for layer in layers:
                yield None, config.streams[layer]
        case HiddenStates() | Lens():
            for layer in _streams(output, config):
                yield (layer - 1, "output") if layer else (None, "embedding")
        case AttentionWeights(layers=layers):
            for layer in layers:
                yield layer, "attention.probs"
        case Activations(stages=stages):
            for stage in match_stages(stages, config):
                if stage.name != "logits":
                    yield stage.key
