"""POST /probs: the distribution of the next token. Nothing is sampled."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.distribution import Summary, summarise
from model.tokenizer import Tokenizer
from service.openapi import ERRORS
from service.replies import envelope, new_id, token_json
from service.requests import (
    bad_request_unless_ids,
    body_of,
    check_requests,
    described_by,
    logits_request,
    prompt_ids,
    submit,
    unless_gone,
)
from service.rows import read_rows
from service.schemas import ProbsReply, ProbsRequest
from service.state import Ready, Served

router = APIRouter()

DEFAULT_TOP_K = 10

ProbsBody = Annotated[ProbsRequest, Depends(body_of(ProbsRequest))]


@router.post(
    "/probs",
    response_model=ProbsReply,
    responses=ERRORS,
    openapi_extra=described_by(ProbsRequest),
    summary="Next-token probabilities",
    tags=["numbers"],
)
async def probs(body: ProbsBody, served: Ready, request: Request) -> Response:
    """The likeliest next tokens after each prompt, or named ones, with probability, logprob and
    rank; and the entropy of the whole distribution."""
    served.check_model(body.model)
    prompts = await prompt_ids(body.prompt, served)
    check_requests(len(prompts), served)
    if body.token_ids is not None:
        bad_request_unless_ids("token_ids", body.token_ids, served)
    reply = await unless_gone(request, _reply(body, prompts, served))
    return Response(orjson.dumps(reply), media_type="application/json")


async def _reply(
    body: ProbsRequest, prompts: list[tuple[int, ...]], served: Served
) -> dict[str, Any]:
    tokenizer = served.checkpoint.tokenizer
    top_k = body.top_k or DEFAULT_TOP_K
    results = []
    requests = [logits_request(ids, "last", served, timeout=body.timeout) for ids in prompts]
    submissions = [submit(served, [one]) for one in requests]
    try:
        for index, (ids, submission) in enumerate(zip(prompts, submissions, strict=True)):
            async for piece in read_rows(submission):
                summary = await asyncio.to_thread(
                    summarise, piece.rows[0], top_k=top_k, token_ids=body.token_ids
                )
                results.append(
                    {"index": index, "token_ids": ids, **_summary_json(summary, tokenizer)}
                )
    finally:
        for submission in submissions:
            submission.abort()
    return {**envelope(new_id("probs"), served.checkpoint), "stage": "raw", "prompts": results}


def _summary_json(summary: Summary, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [
            {
                **token_json(tokenizer, token.token_id),
                "prob": token.prob,
                "logprob": token.logprob,
                "rank": token.rank,
            }
            for token in summary.tokens
        ],
        "mass": summary.mass,
        "entropy": summary.entropy,
    }
