"""The logit lens: predictions of the next token after each layer."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from logitd.model.inference.engine.requests import Lens
from logitd.model.inference.sampling import distribution
from logitd.model.inference.sampling.lens import read_lens
from logitd.model.inference.selection import lens_layers
from logitd.model.operations.body import (
    ChosenIds,
    Examples,
    PromptReply,
    Reply,
    ReplyBody,
    Text,
)
from logitd.model.operations.operation import (
    Listing,
    Operation,
    Outputs,
    Planning,
    Subject,
)
from logitd.model.operations.outputs import (
    HiddenLayers,
    OutputsBody,
    outputs_requests,
    resolve_layers,
)
from logitd.model.operations.prompts import single_token
from logitd.model.operations.tokens import TokenProb, prob_json
from logitd.model.text.tokenizer import Tokenizer

MAX_NAMED = 1024


class LensRequest(OutputsBody):
    """The logit lens: the final norm and the head, applied to the stream after each layer."""

    examples: ClassVar[Examples] = {
        "The likeliest tokens after each layer": {"prompt": "for i in range(10", "top_k": 3},
        "Two tokens, layer by layer, at every position": {
            "prompt": "import os\nimport",
            "token_ids": [10, 32],
            "positions": "all",
            "top_k": 1,
        },
    }

    alternatives: ClassVar[Sequence[Sequence[str]]] = (("token_ids", "tokens"),)

    layers: HiddenLayers = None
    top_k: int = Field(
        5, ge=1, le=1024, description="Number of likeliest tokens listed for each layer."
    )
    token_ids: Annotated[ChosenIds, Field(max_length=MAX_NAMED)] | None = Field(
        None, description="Additional tokens to list, by id, at any rank."
    )
    tokens: Annotated[list[Text], Field(min_length=1, max_length=MAX_NAMED)] | None = Field(
        None, description="Additional tokens to list, by text, at any rank."
    )


class LensLayer(ReplyBody):
    """The prediction after a layer."""

    layer: int
    top: list[TokenProb]
    tokens: list[TokenProb] = Field(description="The tokens named in the request.")
    entropy: float = Field(description="In nats.")
    divergence: float = Field(
        description="Kullback-Leibler divergence of the model's own prediction from this "
        "prediction, in nats; 0 at the last layer."
    )


class LensPosition(ReplyBody):
    position: int
    layers: list[LensLayer]


class PromptLens(PromptReply):
    positions: list[LensPosition]


class LensReply(Reply):
    prompts: list[PromptLens]


def plan(body: LensRequest, subject: Subject) -> Planning:
    layers = resolve_layers(body.layers, lens_layers(subject.config))
    named = tuple(body.token_ids or ())
    if body.tokens is not None:
        named = tuple(single_token(text, subject.tokenizer, "tokens") for text in body.tokens)
    lens = Lens(layers=layers, top_k=body.top_k, token_ids=named)
    requests = yield from outputs_requests(body, lens, subject)
    rows = len(layers) * sum(len(request.positions) for request in requests)
    subject.check_listed(rows * (body.top_k + len(named)), "logprobs", "top_k")
    items = partial(_layers, lens=lens, tokenizer=subject.tokenizer)
    return Outputs(requests, listing=Listing("positions", items, wrapped_in="layers"))


def _layers(rows: Any, *, lens: Lens, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The LensLayer of each layer at a position."""
    for layer, numbers in zip(lens.layers, rows, strict=True):
        row = read_lens(numbers, lens.top_k, len(lens.token_ids))
        ranks = 1 + np.searchsorted(
            -row.top_logprobs, -row.top_logprobs
        )  # equal logprobs share a rank
        yield {
            "layer": layer,
            "top": _tokens(row.top_ids, row.top_logprobs, ranks, tokenizer),
            "tokens": _tokens(lens.token_ids, row.logprobs, row.ranks, tokenizer),
            "entropy": row.entropy,
            "divergence": row.divergence,
        }


def _tokens(
    ids: Iterable[Any], logprobs: Iterable[Any], ranks: Iterable[Any], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    return [
        prob_json(
            tokenizer,
            distribution.TokenProb(
                int(token_id), float(np.exp(np.float64(logprob))), float(logprob), int(rank)
            ),
        )
        for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True)
    ]


LENS = Operation(
    name="lens",
    body=LensRequest,
    reply=LensReply,
    plan=plan,
    form="listing",
    summary="Predictions of the next token after each layer",
    description="""\
The final norm and the head are applied to the residual stream after each layer. For each layer, the
reply has the likeliest next tokens, the probability and rank of chosen tokens, the entropy, and the
divergence of the model's own prediction, which is the prediction of the last layer, from this one.
In a model with `backout`, the middle block's contribution is subtracted from the streams after
later blocks.""",
)
