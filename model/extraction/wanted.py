"""Wanted: what is computed of each token, and the engine's request for it.

Logprobs (`Logprobs`), the values of stages (`Stages`) or the figures of the logit lens
(`LensFigures`). Everything that a model cannot give is refused here, before a text is read. Knows
neither documents nor files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logitd.model.extraction.errors import ExtractionError
from logitd.model.inference.engine.cost import activation_shapes
from logitd.model.inference.engine.requests import (
    Activations,
    Lens,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from logitd.model.inference.engine.validation import check_request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import resolve_stages
from logitd.model.transformer.config import GPTConfig

SHARD_TOKENS = 2**18
"""Of a shard, unless somebody says otherwise: some megabytes of logprobs."""
SHARD_BYTES = 2**28
"""Of a shard of stages or of a lens, which is in memory as a whole before it is written."""
WINDOW_BYTES = 2**30
"""Of the figures of a lens for a window, which is never divided between shards."""
LENS_TOP_K = 5
"""Likeliest tokens of each layer, unless somebody says otherwise; POST /lens has as many."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of each token, and those of the `top_k` likeliest in its place."""

    top_k: int = 0

    suffix = ".parquet"
    predicts = True
    """A window's first token is predicted by none that is in it."""

    def shard_tokens(self, config: GPTConfig) -> int:
        return SHARD_TOKENS

    def request(self, request_id: str, token_ids: tuple[int, ...], context: int) -> Request:
        """Scores of the tokens behind the first `context`; of all where that is 0."""
        if context == 0:
            return ScoreRequest(
                request_id=request_id, token_ids=token_ids, top=self.top_k, arrays=True
            )
        return ScoreRequest(
            request_id=request_id,
            token_ids=token_ids[:context],
            continuations=(token_ids[context:],),
            top=self.top_k,
            arrays=True,
        )

    def settings(self) -> dict[str, Any]:
        """As the index says it."""
        return {"kind": "logprobs", "top_k": self.top_k}


@dataclass(frozen=True, slots=True)
class Stages:
    """The values of named stages at each token."""

    names: tuple[str, ...]

    suffix = ".safetensors"
    predicts = False

    def shard_tokens(self, config: GPTConfig) -> int:
        """As many tokens as fill SHARD_BYTES, of float32."""
        shapes = activation_shapes(self.output, config, 1)
        return max(1, min(SHARD_TOKENS, SHARD_BYTES // (4 * sum(map(math.prod, shapes)))))

    @property
    def output(self) -> Activations:
        return Activations(stages=self.names)

    def request(self, request_id: str, token_ids: tuple[int, ...], context: int) -> Request:
        """The values at the tokens behind the first `context`."""
        return OutputsRequest(
            request_id=request_id,
            token_ids=token_ids,
            positions=tuple(range(context, len(token_ids))),
            output=self.output,
        )

    def settings(self) -> dict[str, Any]:
        """As the index says it."""
        return {"kind": "stages", "stages": list(self.names)}


@dataclass(frozen=True, slots=True)
class LensFigures:
    """What the head says of each token by the stream of the token before it, after each of `layers`
    layers: its logprob and rank, the `top_k` likeliest in its place, entropy and divergence. A row
    is about the token that is predicted, as in `Logprobs`."""

    layers: int  # from 0, after the embeddings, to the last block
    top_k: int

    suffix = ".parquet"
    predicts = True

    def shard_tokens(self, config: GPTConfig) -> int:
        """As many tokens as fill SHARD_BYTES."""
        return max(1, min(SHARD_TOKENS, SHARD_BYTES // self.row_bytes))

    @property
    def row_bytes(self) -> int:
        """Of a token: for each layer id and logprob of each of the likeliest, and four figures
        more."""
        return self.layers * 4 * (2 * self.top_k + 4)

    def request(
        self, request_id: str, token_ids: tuple[int, ...], context: int
    ) -> OutputsRequest | None:
        """The figures at the positions before the tokens behind the first `context`; None where
        these are but a document's only token, which nothing predicts."""
        positions = tuple(range(max(0, context - 1), len(token_ids) - 1))
        if not positions:
            return None
        layers = tuple(range(self.layers))
        return OutputsRequest(
            request_id=request_id,
            token_ids=token_ids,
            positions=positions,
            output=Lens(layers=layers, top_k=self.top_k, following=True),
        )

    def settings(self) -> dict[str, Any]:
        """As the index says it."""
        return {"kind": "lens", "top_k": self.top_k}


Wanted = Logprobs | Stages | LensFigures


def logprobs_wanted(top_k: int, config: GPTConfig) -> Logprobs:
    """Logprobs, with those of the `top_k` likeliest. Raises ExtractionError for what a model of
    this shape cannot give."""
    if not 0 <= top_k <= config.vocab_size:
        raise ExtractionError(f"top_k is {top_k}; the vocabulary has {config.vocab_size} ids")
    _check_predicts(config)
    return Logprobs(top_k)


def lens_wanted(top_k: int, config: GPTConfig) -> LensFigures:
    """The lens after every layer, with the `top_k` likeliest. Raises ExtractionError for what a
    model of this shape cannot give, and for so many that a window would fill the memory."""
    _check_predicts(config)
    wanted = LensFigures(config.n_layer + 1, top_k)
    probe = wanted.request("probe", (0, 0), 0)
    assert probe is not None
    try:
        check_request(probe, config)
    except InvalidRequest as error:
        raise ExtractionError(str(error)) from error
    window = config.context_length
    if window * wanted.row_bytes > WINDOW_BYTES:
        most = (WINDOW_BYTES // (4 * window * wanted.layers) - 4) // 2
        way_out = (
            f"give --top-k {most} or less"
            if most > 0
            else "extract the outputs of blocks by --stages, of which the lens is made"
        )
        raise ExtractionError(
            f"top_k is {top_k}: of {wanted.layers} layers and a window of {window:,} tokens the "
            f"figures take {window * wanted.row_bytes:,} bytes, and {WINDOW_BYTES:,} are the most "
            f"that are held in memory; {way_out}"
        )
    return wanted


def _check_predicts(config: GPTConfig) -> None:
    """Raise ExtractionError where a window has no room for a token and the one before it."""
    if config.context_length < 2:
        raise ExtractionError(
            "the model's context is 1 token, and to predict a token takes the one before it: of "
            "such a model --stages can be extracted"
        )


def stages_wanted(patterns: Sequence[str], config: GPTConfig) -> Stages:
    """The stages that names and patterns choose. Raises ExtractionError for those of which a file
    for a whole text cannot be made."""
    try:
        stages = resolve_stages(patterns, config)
    except InvalidRequest as error:
        raise ExtractionError(str(error)) from error
    for stage in stages:
        if "T" in stage.kind.axes:
            raise ExtractionError(
                f"{stage.name} has a value for each token of the window, so a row for each of "
                f"{config.context_length:,} positions would have as many values for each head: "
                "POST /activations and LLM.activations give it for a prompt; leave it out of "
                "--stages, or extract attention.q and attention.k, from which it is made"
            )
        if stage.name == "logits":
            made_of = "final_norm" if config.final_norm else "the last block's output"
            raise ExtractionError(
                f"logits are {config.vocab_size:,} values a token: extract --top-k K, the logprobs "
                f"of the K likeliest, or {made_of}, from which the head makes them; POST /logits "
                "and LLM.logits give them for a prompt"
            )
    return Stages(tuple(stage.name for stage in stages))
