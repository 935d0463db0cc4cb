"""Quantities: the values that are extracted for each token.

A quantity is logprobs (`Logprobs`), the values of stages (`Stages`) or the figures of the logit
lens (`LensFigures`). Its class creates the request to the engine for each unit, and builds a
shard's file from the chunks of the replies. A request that the model cannot compute is refused
before any text is read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

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
from logitd.model.inference.sampling.lens import lens_width
from logitd.model.inference.sampling.philox import uniforms
from logitd.model.inference.selection import lens_layers, resolve_stages
from logitd.model.transformer.config import GPTConfig, ModelConfig

StoredDType = Literal["float32", "float16", "bfloat16"]
TORCH_DTYPES: Mapping[StoredDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
SHARD_TOKENS = 2**18
"""Upper limit on the default number of tokens in a shard. Their logprobs take a megabyte."""
SHARD_BYTES = 2**28
"""Upper limit on the default size in bytes of a shard before compression. The whole shard is in
memory until it is written."""
WINDOW_BYTES = 2**30
"""Maximum size, in bytes, of the lens figures of one window. There is a limit because a window
cannot be divided between shards."""
LENS_TOP_K = 5
"""Default number of likeliest tokens that the lens lists per layer, as in POST /lens."""


class Predictions:
    """A quantity with one row per counted token, for the prediction of this token from the tokens
    before it. The first token of a document has no prediction, so its values are null."""

    __slots__ = ()
    suffix = ".parquet"
    share = 1.0
    predicts = True

    def rows(self, units: Sequence[Unit]) -> int:
        """Number of rows in the file for the units."""
        return sum(unit.counted for unit in units)


@dataclass(frozen=True, slots=True)
class Logprobs(Predictions):
    """The logprob of each token, and the `top_k` likeliest tokens at its position."""

    top_k: int = 0

    def shard_tokens(self, config: ModelConfig) -> int:
        return _shard_tokens(4 + 8 * self.top_k)  # logprob; id and logprob of likely tokens

    def request(self, request_id: str, unit: Unit) -> Request:
        """A request for the scores of the counted tokens."""
        ids, context = unit.token_ids, unit.context
        return ScoreRequest(
            request_id=request_id,
            token_ids=ids[:context] or ids,
            continuations=(ids[context:],) if context else (),
            top=self.top_k,
            arrays=True,
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: ModelConfig) -> bytes:
        """The Parquet file for the units; `chunks` are their ScoresChunks, in order."""
        predicted = position_column(units) > 0
        logprobs = _joined(chunks, "logprobs", np.float32)
        columns: dict[str, Column] = {"logprob": nullable_column(logprobs, predicted)}
        if self.top_k:
            counts = np.zeros(len(predicted), dtype=np.int32)
            counts[predicted] = _joined(chunks, "counts", np.int32)
            for name, attribute, kind in (
                ("top_tokens", "top_ids", np.int32),
                ("top_logprobs", "top_logprobs", np.float32),
            ):
                columns[name] = list_column(_joined(chunks, attribute, kind), counts, predicted)
        return parquet_file(units, columns)

    def settings(self) -> dict[str, Any]:
        return {"kind": "logprobs", "top_k": self.top_k}


@dataclass(frozen=True, slots=True)
class Stages:
    """The values of named stages at each token, or at a sample of tokens.

    dtype  dtype of the stored values
    share  expected share of the tokens that are sampled. Whether a token is sampled depends only on
           `seed`, its document and its position, not on windows or shards
    """

    names: tuple[str, ...]
    dtype: StoredDType = "float32"
    share: float = 1.0
    seed: int = 0

    suffix = ".safetensors"
    predicts = False

    def shard_tokens(self, config: ModelConfig) -> int:
        shapes = activation_shapes(self.output, config, 1)
        row_bytes = TORCH_DTYPES[self.dtype].itemsize * sum(map(math.prod, shapes))
        return _shard_tokens(row_bytes * self.share)

    @property
    def output(self) -> Activations:
        return Activations(stages=self.names)

    def sampled(self, unit: Unit) -> npt.NDArray[np.bool_]:
        """True for each counted token of a unit that belongs to the sample."""
        if self.share == 1:
            return np.ones(unit.counted, dtype=np.bool_)
        positions = np.arange(unit.place[1], unit.end[1], dtype=np.uint64)
        seeds, documents = (np.full_like(positions, n) for n in (self.seed, unit.document))
        return uniforms(seeds, positions, documents) < self.share

    def request(self, request_id: str, unit: Unit) -> OutputsRequest | None:
        """A request for the values at the counted tokens of the sample; None if there are none."""
        positions = tuple(int(place) for place in unit.context + self.sampled(unit).nonzero()[0])
        if not positions:
            return None
        return OutputsRequest(
            request_id=request_id,
            token_ids=unit.token_ids,
            positions=positions,
            output=self.output,
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: ModelConfig) -> bytes:
        """The safetensors file for the units; `chunks` are their OutputsChunks, in order."""
        # The length (1) has no effect: `choose_stages` refuses stages whose shape depends on it.
        width = sum(map(math.prod, activation_shapes(self.output, config, 1)))
        empty = np.empty((0, width), dtype=np.float32)
        rows = np.concatenate([empty, *(chunk.rows for chunk in chunks)])  # (tokens, elements)
        values = split_activations(rows, self.output, config, 1)
        kept = np.concatenate([self.sampled(unit) for unit in units])
        return safetensors_file(units, values, kept, TORCH_DTYPES[self.dtype])

    def rows(self, units: Sequence[Unit]) -> int:
        """Number of tokens in the file for the units."""
        return sum(int(self.sampled(unit).sum()) for unit in units)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"kind": "stages", "stages": list(self.names)}
        if self.dtype != "float32":
            settings["stored_dtype"] = self.dtype
        if self.share < 1:
            settings |= {"sample": self.share, "sample_seed": self.seed}
        return settings


@dataclass(frozen=True, slots=True)
class LensFigures(Predictions):
    """The logit lens at each token: the head predicts the token from the residual stream of the
    previous token, after each layer. A row has the logprob and rank of the token, the `top_k`
    likeliest tokens, entropy and divergence. There are as many rows as for `Logprobs`."""

    layers: int  # from 0, after the embeddings, to the last block
    top_k: int

    def shard_tokens(self, config: ModelConfig) -> int:
        return _shard_tokens(self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes per token: in each layer an id and a logprob for each likeliest token, and four
        figures."""
        return self.layers * 4 * (2 * self.top_k + 4)

    def request(self, request_id: str, unit: Unit) -> OutputsRequest | None:
        """A request for the figures at the position before each counted token. None if the unit has
        only the first token of a document, which has no prediction."""
        positions = tuple(range(max(0, unit.context - 1), len(unit.token_ids) - 1))
        if not positions:
            return None
        return OutputsRequest(
            request_id=request_id,
            token_ids=unit.token_ids,
            positions=positions,
            output=Lens(layers=tuple(range(self.layers)), top_k=self.top_k, following=True),
        )

    def file(self, units: Sequence[Unit], chunks: Sequence[Any], config: ModelConfig) -> bytes:
        """The Parquet file for the units; `chunks` are their OutputsChunks, in order."""
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
        return {"kind": "lens", "top_k": self.top_k}


Quantity = Logprobs | Stages | LensFigures


def _joined(chunks: Sequence[Any], name: str, kind: Any) -> Any:
    parts = (getattr(chunk.scores, name) for chunk in chunks)
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind)


def _shard_tokens(row_bytes: float) -> int:
    """The default number of tokens in a shard: as many as fill SHARD_BYTES, but at most
    SHARD_TOKENS."""
    return max(1, min(SHARD_TOKENS, int(SHARD_BYTES / row_bytes)))


def choose_logprobs(top_k: int, config: ModelConfig) -> Logprobs:
    """Logprobs with the `top_k` likeliest tokens. Raises ExtractionError if `top_k` exceeds the
    vocabulary or the model's context is 1 token."""
    if not 0 <= top_k <= config.vocab_size:
        raise ExtractionError(f"top_k is {top_k}; the vocabulary has {config.vocab_size} ids")
    _require_prediction(config)
    return Logprobs(top_k)


def choose_lens(top_k: int, config: ModelConfig) -> LensFigures:
    """The lens after every layer, with the `top_k` likeliest tokens. Raises InvalidRequest if the
    model cannot compute it, and ExtractionError if the figures of a window exceed WINDOW_BYTES."""
    _require_prediction(config)
    lens = LensFigures(lens_layers(config), top_k)
    example = lens.request("example", Unit(0, "", 0, (0, 0), 0))
    assert example is not None
    check_request(example, config)
    window = config.context_length
    if window * lens.row_bytes > WINDOW_BYTES:
        most = (WINDOW_BYTES // (4 * window * lens.layers) - 4) // 2
        fix = (
            f"set --top-k {most} or less"
            if most > 0
            else "extract the blocks' outputs with --stages"
        )
        raise ExtractionError(
            f"top_k is {top_k}: the lens values of {lens.layers} layers for a window of {window:,} "
            f"tokens take {window * lens.row_bytes:,} bytes; the limit is {WINDOW_BYTES:,}: {fix}"
        )
    return lens


def _require_prediction(config: ModelConfig) -> None:
    if config.context_length < 2:
        raise ExtractionError(
            "the model's context is 1 token, so it cannot predict a token from the one before it: "
            "use --stages to extract stages instead"
        )


def choose_stages(
    patterns: Sequence[str],
    config: ModelConfig,
    dtype: StoredDType = "float32",
    share: float = 1.0,
    seed: int = 0,
) -> Stages:
    """The stages that match the names and patterns. Raises InvalidRequest if there are none, and
    ExtractionError for stages that are too large to extract for a whole text."""
    stages = resolve_stages(patterns, config)
    for stage in stages:
        if "T" in stage.kind.axes:
            raise ExtractionError(
                f"{stage.name} has {config.context_length:,} values for each row and head, one per "
                "token of the window: leave it out of --stages, or extract attention.q and "
                "attention.k, from which it is computed; POST /activations and LLM.activations "
                "return it for a prompt"
            )
        if stage.name == "logits":
            source = "the last block's output"
            if isinstance(config, GPTConfig) and (config.final_norm or config.backout):
                source = "final_norm" if config.final_norm else "backout"
            raise ExtractionError(
                f"logits are {config.vocab_size:,} values per token: extract --top-k K, the "
                f"logprobs of the K likeliest tokens, or {source}, from which the head computes "
                "the logits; POST /logits and LLM.logits return them for a prompt"
            )
    return Stages(tuple(stage.name for stage in stages), dtype, share, seed)
