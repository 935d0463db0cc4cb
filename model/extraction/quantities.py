"""Quantities: the values that are extracted for each token.

A quantity is logprobs (`Logprobs`), the values of stages (`Stages`) or the figures of the logit
lens (`LensFigures`). It makes the engine's request for a unit, and the file of a shard from the
chunks that the engine answered with. Anything that a model cannot give is refused here, before a
text is read. Reads no text and writes no file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import Unit
from logitd.model.extraction.shards import (
    Column,
    list_column,
    nullable_column,
    parquet_file,
    position_column,
    safetensors_file,
)
from logitd.model.inference.engine.cost import activation_shapes, split_activations
from logitd.model.inference.engine.requests import (
    Activations,
    Lens,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.engine.validation import check_request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.lens import lens_width
from logitd.model.inference.selection import resolve_stages
from logitd.model.transformer.config import GPTConfig

SHARD_TOKENS = 2**18
"""Default tokens of a shard: some megabytes of logprobs."""
SHARD_BYTES = 2**28
"""Default bytes of a shard of stages or of a lens, which is held in memory before it is written."""
WINDOW_BYTES = 2**30
"""Limit of the lens figures of one window, which is never divided between shards."""
LENS_TOP_K = 5
"""Default likeliest tokens of each layer, as in POST /lens."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of each token, and those of the `top_k` likeliest in its place."""

    top_k: int = 0

    suffix = ".parquet"
    predicts = True  # a window's first token is predicted by none in the window

    def shard_tokens(self, config: GPTConfig) -> int:
        return SHARD_TOKENS

    def request(self, request_id: str, unit: Unit) -> Request:
        """Score the counted tokens."""
        ids, context = unit.token_ids, unit.context
        return ScoreRequest(
            request_id=request_id,
            token_ids=ids[:context] or ids,
            continuations=(ids[context:],) if context else (),
            top=self.top_k,
            arrays=True,
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: GPTConfig) -> bytes:
        """The Parquet file of units; `chunks` are their ScoresChunks, in order."""
        predicted = position_column(units) > 0
        logprobs = np.concatenate([np.empty(0), *(chunk.scores.logprobs for chunk in chunks)])
        columns: dict[str, Column] = {
            "logprob": nullable_column(logprobs.astype(np.float32), predicted)
        }
        if self.top_k:
            counts = np.zeros(len(predicted), dtype=np.int32)
            for name, attribute, kind in (
                ("", "counts", np.int32),
                ("top_tokens", "top_ids", np.int32),
                ("top_logprobs", "top_logprobs", np.float32),
            ):
                parts = [getattr(chunk.scores, attribute) for chunk in chunks]
                values = np.concatenate([np.empty(0, kind), *parts]).astype(kind)
                if name:
                    columns[name] = list_column(values, counts, predicted)
                else:
                    counts[predicted] = values
        return parquet_file(units, columns)

    def settings(self) -> dict[str, Any]:
        """Entries of the index."""
        return {"kind": "logprobs", "top_k": self.top_k}


@dataclass(frozen=True, slots=True)
class Stages:
    """The values of named stages at each token."""

    names: tuple[str, ...]

    suffix = ".safetensors"
    predicts = False

    def shard_tokens(self, config: GPTConfig) -> int:
        """Tokens whose float32 values fill SHARD_BYTES."""
        shapes = activation_shapes(self.output, config, 1)
        return max(1, min(SHARD_TOKENS, SHARD_BYTES // (4 * sum(map(math.prod, shapes)))))

    @property
    def output(self) -> Activations:
        return Activations(stages=self.names)

    def request(self, request_id: str, unit: Unit) -> Request:
        """Values at the counted tokens."""
        positions = tuple(range(unit.context, len(unit.token_ids)))
        return OutputsRequest(
            request_id=request_id,
            token_ids=unit.token_ids,
            positions=positions,
            output=self.output,
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: GPTConfig) -> bytes:
        """The safetensors file of units; `chunks` are their OutputsChunks, in order."""
        rows = np.concatenate([chunk.rows for chunk in chunks])  # (tokens, elements)
        # No stage here depends on the length of the prompt, so 1 does.
        return safetensors_file(units, split_activations(rows, self.output, config, 1))

    def settings(self) -> dict[str, Any]:
        """Entries of the index."""
        return {"kind": "stages", "stages": list(self.names)}


@dataclass(frozen=True, slots=True)
class LensFigures:
    """The head's prediction of each token after each of `layers` layers, from the stream of the
    token before it: logprob and rank of the token, the `top_k` likeliest in its place, entropy and
    divergence. Rows are those of `Logprobs`."""

    layers: int  # from 0, after the embeddings, to the last block
    top_k: int

    suffix = ".parquet"
    predicts = True

    def shard_tokens(self, config: GPTConfig) -> int:
        """Tokens whose figures fill SHARD_BYTES."""
        return max(1, min(SHARD_TOKENS, SHARD_BYTES // self.row_bytes))

    @property
    def row_bytes(self) -> int:
        """Bytes of a token: per layer id and logprob of each likeliest token, and four figures."""
        return self.layers * 4 * (2 * self.top_k + 4)

    def request(self, request_id: str, unit: Unit) -> OutputsRequest | None:
        """Figures at the positions before the counted tokens; None if the only one is a document's
        first, which nothing predicts."""
        positions = tuple(range(max(0, unit.context - 1), len(unit.token_ids) - 1))
        if not positions:
            return None
        return OutputsRequest(
            request_id=request_id,
            token_ids=unit.token_ids,
            positions=positions,
            output=Lens(layers=tuple(range(self.layers)), top_k=self.top_k, following=True),
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: GPTConfig) -> bytes:
        """The Parquet file of units; `chunks` are their OutputsChunks, in order."""
        k, predicted = self.top_k, position_column(units) > 0
        empty = np.empty((0, self.layers, lens_width(k, 1)), dtype=np.float32)
        rows = np.concatenate([empty, *(chunk.rows for chunk in chunks)])  # (P, L, width)
        logprobs, ranks, entropies, divergences = np.moveaxis(rows[..., 2 * k :], -1, 0)
        values = {
            "logprobs": logprobs,
            "ranks": ranks.astype(np.int32),
            "entropies": entropies,
            "divergences": divergences,
            "top_tokens": rows[..., :k].astype(np.int32),
            "top_logprobs": rows[..., k : 2 * k],
        }
        counts = predicted * self.layers
        columns = {
            f"layer_{name}": list_column(value.reshape(-1, *value.shape[2:]), counts, predicted)
            for name, value in values.items()
        }
        return parquet_file(units, columns)

    def settings(self) -> dict[str, Any]:
        """Entries of the index."""
        return {"kind": "lens", "top_k": self.top_k}


Quantity = Logprobs | Stages | LensFigures


def choose_logprobs(top_k: int, config: GPTConfig) -> Logprobs:
    """Logprobs, with those of the `top_k` likeliest. Raises ExtractionError if a model of this
    shape cannot give them."""
    if not 0 <= top_k <= config.vocab_size:
        raise ExtractionError(f"top_k is {top_k}; the vocabulary has {config.vocab_size} ids")
    _require_prediction(config)
    return Logprobs(top_k)


def choose_lens(top_k: int, config: GPTConfig) -> LensFigures:
    """The lens after every layer, with the `top_k` likeliest. Raises ExtractionError if a model of
    this shape cannot give it, or if one window would fill the memory."""
    _require_prediction(config)
    lens = LensFigures(config.n_layer + 1, top_k)
    example = lens.request("example", Unit(0, "", 0, (0, 0), 0))
    assert example is not None
    try:
        check_request(example, config)
    except InvalidRequest as error:
        raise ExtractionError(str(error)) from error
    window = config.context_length
    if window * lens.row_bytes > WINDOW_BYTES:
        most = (WINDOW_BYTES // (4 * window * lens.layers) - 4) // 2
        fix = (
            f"give --top-k {most} or less" if most > 0 else "extract outputs of blocks by --stages"
        )
        raise ExtractionError(
            f"top_k is {top_k}: the figures of {lens.layers} layers and a window of {window:,} "
            f"tokens take {window * lens.row_bytes:,} bytes, and at most {WINDOW_BYTES:,} are held "
            f"in memory; {fix}"
        )
    return lens


def _require_prediction(config: GPTConfig) -> None:
    """Raise ExtractionError unless a window has room for a token and the one before it."""
    if config.context_length < 2:
        raise ExtractionError(
            "the model's context is 1 token, and predicting a token needs the one before it; "
            "extract --stages"
        )


def choose_stages(patterns: Sequence[str], config: GPTConfig) -> Stages:
    """The stages that names and patterns choose. Raises ExtractionError for those that make no
    file for a whole text."""
    try:
        stages = resolve_stages(patterns, config)
    except InvalidRequest as error:
        raise ExtractionError(str(error)) from error
    for stage in stages:
        if "T" in stage.kind.axes:
            raise ExtractionError(
                f"{stage.name} has a value for each token of the window, which would be "
                f"{config.context_length:,} for each row and head: POST /activations and "
                "LLM.activations give it for a prompt; leave it out of --stages, or extract "
                "attention.q and attention.k, from which it is made"
            )
        if stage.name == "logits":
            source = "final_norm" if config.final_norm else "the last block's output"
            raise ExtractionError(
                f"logits are {config.vocab_size:,} values a token: extract --top-k K, the logprobs "
                f"of the K likeliest, or {source}, from which the head makes them; POST /logits "
                "and LLM.logits give them for a prompt"
            )
    return Stages(tuple(stage.name for stage in stages))
