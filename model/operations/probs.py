"""Probabilities of the next token after each prompt. Nothing is sampled."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from logitd.model.inference.engine.requests import OutputsRequest, ScoreRequest
from logitd.model.inference.engine.validation import check_count, check_token_ids
from logitd.model.inference.sampling.distribution import summarize
from logitd.model.operations.body import (
    ChosenIds,
    Examples,
    PromptBody,
    PromptReply,
    Reply,
    Stage,
    Text,
)
from logitd.model.operations.computed import Computed, perplexity
from logitd.model.operations.interventions import Interventions, resolve_interventions
from logitd.model.operations.operation import (
    Compute,
    Operation,
    Planning,
    Record,
    Subject,
    new_id,
)
from logitd.model.operations.processing import StageBody, logits_output
from logitd.model.operations.prompts import encode_all, resolve_positions, single_token
from logitd.model.operations.tokens import TokenProb, prob_json

DEFAULT_LISTED = 10


class ProbsRequest(StageBody, PromptBody):
    """The distribution of the token after each prompt. Nothing is sampled."""

    examples: ClassVar[Examples] = {
        "The three likeliest next tokens": {"prompt": "if __name__ ==", "top_k": 3},
        "Two tokens, after each of two prompts": {
            "prompt": ["for i in", "if not"],
            "tokens": [" ", "("],
        },
        "The distribution that /generate samples from": {
            "prompt": "import",
            "stage": "processed",
            "processing": {"temperature": 0.7, "top_p": 0.9},
        },
    }

    alternatives: ClassVar[Sequence[Sequence[str]]] = (("top_k", "token_ids", "tokens"),)

    top_k: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="List the k likeliest tokens. Default: 10, unless token_ids or tokens is set.",
    )
    token_ids: ChosenIds | None = Field(None, description="List these tokens instead, at any rank.")
    tokens: list[Text] | None = Field(
        None,
        min_length=1,
        max_length=4096,
        fail_fast=True,
        description="List the tokens with these texts; each must be one token of the vocabulary.",
    )
    perplexity: bool = Field(False, description="Also return the perplexity of each prompt.")
    interventions: Interventions = Field(default_factory=list)


class PromptProbs(PromptReply):
    tokens: list[TokenProb]
    mass: float = Field(description="Sum of the probabilities of the listed tokens.")
    entropy: float = Field(description="Entropy of the whole distribution, in nats.")
    perplexity: float | None = Field(
        None,
        description="Perplexity of the prompt's tokens after the first; null for a single token.",
    )


class ProbsReply(Reply):
    stage: Stage
    prompts: list[PromptProbs]


def plan(body: ProbsRequest, subject: Subject) -> Planning:
    """Compute the logits at the last position of each prompt. If the perplexity is requested, the
    prompts are scored first."""
    vocab_size, tokenizer = subject.config.vocab_size, subject.tokenizer
    check_count("top_k", body.top_k, vocab_size)
    check_token_ids("token_ids", body.token_ids or (), vocab_size)
    output = logits_output(body)
    prompts = encode_all(body.prompts, "prompt", subject)
    changes = yield from resolve_interventions(body.interventions, prompts, subject)
    token_ids, top_k = body.token_ids, body.top_k or DEFAULT_LISTED
    if body.tokens is not None:
        token_ids = [single_token(text, tokenizer, "tokens") for text in body.tokens]
    listed = top_k if token_ids is None else len(token_ids)
    param = "top_k" if token_ids is None else "token_ids"
    subject.check_listed(listed * len(prompts), "logprobs", param)
    perplexities: list[dict[str, Any]] = [{}] * len(prompts)
    if body.perplexity:
        scores = [
            ScoreRequest(request_id=new_id("score"), token_ids=prompt, interventions=interventions)
            for prompt, interventions in zip(prompts, changes, strict=True)
        ]
        # Scores first: the requests below then reuse the cache blocks that the scores computed.
        scored: Computed = yield Compute(scores)
        perplexities = [
            {"perplexity": perplexity(scored.tokens[score.request_id, 0])} for score in scores
        ]
    requests = [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=prompt,
            positions=resolve_positions("last", len(prompt)),
            output=output,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]

    def reply(computed: Computed) -> dict[str, Any]:
        prompts = []
        for index, request in enumerate(requests):
            (row,) = computed.rows[request.request_id]
            summary = summarize(row, top_k=top_k, token_ids=token_ids)
            prompts.append(
                {
                    "index": index,
                    "token_ids": request.token_ids,
                    "tokens": [prob_json(tokenizer, token) for token in summary.tokens],
                    "mass": summary.mass,
                    "entropy": summary.entropy,
                    **perplexities[index],
                }
            )
        return {"stage": body.stage, "prompts": prompts}

    return Record(requests, reply)


PROBS = Operation(
    name="probs",
    body=ProbsRequest,
    reply=ProbsReply,
    plan=plan,
    form="record",
    summary="Probabilities of the next token",
    description="""\
The likeliest next tokens after each prompt, or chosen tokens, with their probability, logprob and
rank. Also the entropy of the whole distribution.""",
)
