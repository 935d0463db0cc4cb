"""The logit lens: what the model would say if it stopped after each layer."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from logitd.model.inference.engine.requests import Lens
from logitd.model.inference.sampling.lens import read_lens
from logitd.model.inference.selection import resolve_indices
from logitd.model.operations.body import (
    ChosenIds,
    Examples,
    ModelName,
    Places,
    PositionChoice,
    PromptBody,
    Reply,
    ReplyBody,
    Text,
    Timeout,
)
from logitd.model.operations.interventions import Interventions
from logitd.model.operations.operation import (
    Listing,
    Operation,
    Outputs,
    Planning,
    RowObject,
    Subject,
)
from logitd.model.operations.outputs import outputs_requests
from logitd.model.operations.prompts import single_token
from logitd.model.operations.tokens import TokenProb, token_json
from logitd.model.text.tokenizer import Tokenizer

MAX_NAMED = 1024


class LensRequest(PromptBody):
    """The final norm and the head on the stream after each layer (the logit lens)."""

    examples: ClassVar[Examples] = {
        "When does it know?": {"prompt": "for i in range(10", "top_k": 3},
        "Two tokens, layer by layer, at every position": {
            "prompt": "import os\nimport",
            "token_ids": [10, 32],
            "positions": "all",
            "top_k": 1,
        },
    }

    layers: Places | None = Field(
        None,
        description="0 is after the embeddings, i after block i; negative ones count from the end. "
        "Absent: all.",
    )
    positions: PositionChoice = "last"
    top_k: int = Field(5, ge=1, le=1024, description="Of each layer, the likeliest next tokens.")
    token_ids: Annotated[ChosenIds, Field(max_length=MAX_NAMED)] | None = Field(
        None, description="Also these tokens, by id, whatever their rank."
    )
    tokens: Annotated[list[Text], Field(min_length=1, max_length=MAX_NAMED)] | None = Field(
        None, description="Also these tokens, by text."
    )
    interventions: Interventions = Field(default_factory=list)
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "LensRequest":
        if self.token_ids is not None and self.tokens is not None:
            raise ValueError("token_ids and tokens both name tokens; give one of them")
        return self


class LensLayer(ReplyBody):
    """What the model would say after a layer."""

    layer: int
    top: list[TokenProb]
    tokens: list[TokenProb] = Field(description="Those that the request names.")
    entropy: float = Field(description="In nats.")
    divergence: float = Field(
        description="Kullback-Leibler divergence of the model's own answer from this one, in nats; "
        "0 at the last layer."
    )


class LensPosition(ReplyBody):
    position: int
    layers: list[LensLayer]


class PromptLens(ReplyBody):
    index: int
    token_ids: list[int]
    positions: list[LensPosition]


class LensReply(Reply):
    prompts: list[PromptLens]


def plan(body: LensRequest, subject: Subject) -> Planning:
    """The head on the stream after each chosen layer, at each chosen position."""
    states = subject.config.n_layer + 1
    layers = resolve_indices("layers", body.layers, states, f"there are {states} hidden states")
    named = tuple(body.token_ids or ())
    if body.tokens is not None:
        named = tuple(single_token(text, subject.tokenizer, "tokens") for text in body.tokens)
    lens = Lens(layers=layers, top_k=body.top_k, token_ids=named)
    requests = yield from outputs_requests(body, lens, subject)
    rows = len(layers) * sum(len(request.positions) for request in requests)
    subject.check_listed(rows * (body.top_k + len(named)), "logprobs", "top_k")
    row = partial(_position, lens=lens, tokenizer=subject.tokenizer)
    return Outputs(requests, listing=Listing("positions", row))


def _position(position: int, rows: Any, *, lens: Lens, tokenizer: Tokenizer) -> RowObject:
    """The LensPosition; its layers are made one by one."""
    layers = (
        _layer(layer, numbers, lens, tokenizer)
        for layer, numbers in zip(lens.layers, rows, strict=True)
    )
    return RowObject(layers, {"position": position}, "layers")


def _layer(layer: int, numbers: Any, lens: Lens, tokenizer: Tokenizer) -> dict[str, Any]:
    """The LensLayer of a row."""
    row = read_lens(numbers, lens.top_k, len(lens.token_ids))
    ranks = 1 + np.searchsorted(-row.top_logprobs, -row.top_logprobs)  # equals share one
    return {
        "layer": layer,
        "top": _tokens(row.top_ids, row.top_logprobs, ranks, tokenizer),
        "tokens": _tokens(lens.token_ids, row.logprobs, row.ranks, tokenizer),
        "entropy": row.entropy,
        "divergence": row.divergence,
    }


def _tokens(
    ids: Iterable[Any], logprobs: Iterable[Any], ranks: Iterable[Any], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The TokenProb of each id."""
    return [
        {
            **token_json(tokenizer, int(token_id)),
            "prob": float(np.exp(np.float64(logprob))),
            "logprob": float(logprob),
            "rank": int(rank),
        }
        for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True)
    ]


LENS = Operation(
    name="lens",
    body=LensRequest,
    reply=LensReply,
    plan=plan,
    form="listing",
    reply_id="lens",
    summary="Predictions of the next token after each layer",
    description="""\
The final norm and the head on the residual stream after each layer: the likeliest next
tokens, probability and rank of named ones, the entropy, and the divergence of the model's own
answer, which is the last layer's.""",
)
