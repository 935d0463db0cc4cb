"""Score: the logprobs of given texts. Nothing is sampled."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from logitd.model.inference.engine.requests import ScoreRequest as EngineScoreRequest
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.operations.body import (
    Examples,
    PromptBody,
    PromptReply,
    Reply,
    ReplyBody,
    Text,
    TokenIds,
)
from logitd.model.operations.computed import Computed, logprobs_of, perplexity
from logitd.model.operations.interventions import Interventions, resolve_interventions
from logitd.model.operations.operation import Operation, Planning, Record, Subject, new_id
from logitd.model.operations.prompts import encode_all
from logitd.model.operations.tokens import Token, first_likeliest, scored_json
from logitd.model.text.tokenizer import Tokenizer

MAX_CONTINUATIONS = 4096


class ScoreRequest(PromptBody):
    """Logprobs of given texts: each prompt as a whole, or continuations of it."""

    examples: ClassVar[Examples] = {
        "Three endings compared": {
            "prompt": "import os\n\ndef main(",
            "continuations": ["):", "self):", "os):"],
        },
        "A whole text, token by token": {"prompt": "for i in range(10):", "logprobs": 0},
        "Two texts": {"prompt": ["return None", "return Nobody"]},
    }

    continuations: (
        Annotated[
            list[Text | TokenIds],
            Field(min_length=1, max_length=MAX_CONTINUATIONS, fail_fast=True),
        ]
        | None
    ) = Field(
        None,
        description="Texts or lists of ids to score after each prompt. Each is tokenized "
        "separately, and the prompt is computed once. Absent: the prompt itself is scored.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="List each token with its logprob, and the k likeliest tokens at its position.",
    )
    interventions: Interventions = Field(default_factory=list)

    @property
    def queued(self) -> tuple[int, str]:
        per_prompt = max(1, len(self.continuations or ()))
        param = "prompt" if per_prompt == 1 else "continuations"
        return len(self.prompts) * per_prompt, param


class TextScore(PromptReply):
    tokens: list[Token] | None = Field(None, description="With `logprobs`.")
    scored_tokens: int = Field(
        description="All tokens except the first of a prompt, which has no prediction."
    )
    logprob: float = Field(description="Sum of the logprobs of the scored tokens, in nats.")
    is_greedy: bool = Field(description="True if temperature 0 generates these tokens.")
    perplexity: float | None = Field(description="null if no token is scored.")
    bits_per_byte: float | None = Field(
        description="Minus `logprob` in bits, divided by the bytes of the scored tokens. Special "
        "tokens have no bytes. null if there are none."
    )


class PromptScores(PromptReply):
    score: TextScore | None = Field(
        None, description="The score of the prompt, if the request has no continuations."
    )
    continuations: list[TextScore] | None = None


class ScoreUsage(ReplyBody):
    prompt_tokens: int
    scored_tokens: int
    cached_tokens: int


class ScoreReply(Reply):
    prompts: list[PromptScores]
    usage: ScoreUsage


def plan(body: ScoreRequest, subject: Subject) -> Planning:
    texts = body.continuations or []
    prompts = encode_all(body.prompts, "prompt", subject)
    continuations = tuple(encode_all(texts, "continuations", subject))
    changes = yield from resolve_interventions(
        body.interventions, prompts, subject, generates=bool(texts)
    )
    # At least 1, because `is_greedy` compares each token with the likeliest one.
    top = max(1, body.logprobs or 0)
    scored = [sum(map(len, continuations)) or len(prompt) for prompt in prompts]
    subject.check_listed(sum(scored) * (1 + top), "logprobs", "logprobs")
    requests = [
        EngineScoreRequest(
            request_id=new_id("score"),
            token_ids=prompt,
            continuations=continuations,
            top=top,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]

    def reply(computed: Computed) -> dict[str, Any]:
        prompts = []
        for index, request in enumerate(requests):
            scores = [
                _text_score(
                    i, computed.tokens[request.request_id, i], body.logprobs, subject.tokenizer
                )
                for i in range(max(1, len(continuations)))
            ]
            scored = {"continuations": scores} if continuations else {"score": scores[0]}
            prompts.append({"index": index, "token_ids": request.token_ids, **scored})
        usage = {
            "prompt_tokens": sum(len(request.token_ids) for request in requests),
            "scored_tokens": sum(len(logprobs_of(tokens)) for tokens in computed.tokens.values()),
            "cached_tokens": sum(e.cached_tokens for e in computed.finishes if e.counts_prompt),
        }
        return {"prompts": prompts, "usage": usage}

    return Record(requests, reply)


def _text_score(
    index: int, tokens: Sequence[ScoredToken], listed: int | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The TextScore of a text, with the `listed` likeliest tokens at each position."""
    scored = [token for token in tokens if token.chosen is not None]
    total = math.fsum(logprobs_of(scored))
    size = tokenizer.text_bytes(token.token_id for token in scored)
    score = {
        "index": index,
        "token_ids": [token.token_id for token in tokens],
        "scored_tokens": len(scored),
        "logprob": total,
        # Among equally likely tokens, temperature 0 generates the lowest id.
        "is_greedy": all(
            token.token_id in [likeliest.token_id for likeliest in token.top[:1]]
            for token in scored
        ),
        "perplexity": perplexity(scored),
        "bits_per_byte": -total / math.log(2) / size if size else None,
    }
    if listed is not None:
        score["tokens"] = [scored_json(tokenizer, first_likeliest(t, listed)) for t in tokens]
    return score


SCORE = Operation(
    name="score",
    body=ScoreRequest,
    reply=ScoreReply,
    plan=plan,
    form="record",
    summary="Logprobs of given texts",
    description="""\
How likely each prompt is, or each of its continuations: the sum of logprobs, the perplexity, the
bits per byte, and on request the logprob of each token. A prompt with several continuations is
computed once.""",
)
