"""POST /probs: the distribution of the next token. Nothing is sampled."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.inference.sampling.distribution import Summary, summarise
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.api.requests.body import body_of, described_by, unless_gone
from logitd.service.api.requests.resolve import ResolvedProbs, resolve_probs
from logitd.service.api.responses.text import envelope, server_timing, token_json
from logitd.service.core.errors import ERRORS
from logitd.service.core.gather import Gathered, gather, perplexity
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.tensors import ProbsReply, ProbsRequest

router = APIRouter()

ProbsBody = Annotated[ProbsRequest, Depends(body_of(ProbsRequest))]


@router.post(
    "/probs",
    response_model=ProbsReply,
    responses=ERRORS,
    openapi_extra=described_by(ProbsRequest),
    summary="Next-token probabilities",
    tags=["outputs"],
)
async def probs(body: ProbsBody, models: Ready, request: Request) -> Response:
    """The likeliest next tokens after each prompt, or named ones, with probability, logprob and
    rank; and the entropy of the whole distribution."""
    served = models.of(body.model)
    resolved = await resolve_probs(body, served, request)
    submission = served.session.submit([*resolved.outputs, *resolved.scores])
    computed = await unless_gone(request, gather(submission))
    # In a thread: it sorts whole vocabularies.
    reply = await asyncio.to_thread(_reply, body, resolved, computed, served)
    return Response(
        orjson.dumps(reply),
        media_type="application/json",
        headers=server_timing(computed.finishes),
    )


def _reply(
    body: ProbsRequest, resolved: ResolvedProbs, computed: Gathered, served: Served
) -> dict[str, Any]:
    """The ProbsReply."""
    tokenizer = served.checkpoint.tokenizer
    prompts = [
        {
            "index": index,
            "token_ids": request.token_ids,
            **_summary_json(_summary(request, resolved, computed), tokenizer),
        }
        for index, request in enumerate(resolved.outputs)
    ]
    if body.perplexity:
        for prompt, score in zip(prompts, resolved.scores, strict=True):
            prompt["perplexity"] = perplexity(computed.tokens[score.request_id, 0])
    head = envelope(new_id("probs"), served.checkpoint)
    return {**head, "stage": body.stage, "prompts": prompts}


def _summary(request: OutputsRequest, resolved: ResolvedProbs, computed: Gathered) -> Summary:
    """The distribution after one prompt, of the tokens to list."""
    logits = computed.rows[request.request_id][0]
    if resolved.token_ids is None:
        return summarise(logits, top_k=resolved.top_k)
    return summarise(logits, token_ids=resolved.token_ids)


def _summary_json(summary: Summary, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [
            {
                **token_json(tokenizer, token.token_id),
                "prob": token.prob,
                "logprob": token.logprob,  # -inf is written as null
                "rank": token.rank,
            }
            for token in summary.tokens
        ],
        "mass": summary.mass,
        "entropy": summary.entropy,
    }
